"""Sampled decisions as the console shows them: all numbers that the policy saw, of some candidates.
Pure.

Laws:
- values that change after a decision are read before anything of it is reserved; its rows, which do
  not change, are written out when the console shows them;
- of a decision only numbers and names are kept: no prompt, no token, no session and no tenant;
- at most KEPT_MAX decisions are kept, of at most ROWS_MAX candidates each.
"""

from collections import deque
from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

import msgspec
import numpy as np

from router.decide.decision.decision import Decision
from router.decide.policies.first_token import first_token
from router.decide.policies.own import PolicyFailed
from router.decide.policies.policy import Policy, Scores
from router.fleet.table import Column
from router.observe.audit.shadow_policy import difference, guarded_chances
from router.request.refusal import Refused

KEPT_MAX = 64
ROWS_MAX = 24
"""Most candidates shown of a decision: the pick, the row from which the guard moved the pick, and
the cheapest others."""
NAME_MAX = 128
"""Most characters kept of a name that a request brings, such as its model."""
REQUEST_ID_MAX = 320
"""Most characters kept of a request's id: a gateway's client may choose 256 of them."""
MESSAGE_MAX = 400


class CandidateRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One candidate, as the policy saw it."""

    worker_id: str
    dp_rank: int
    cost: float | None
    """Cost by the policy; None: not a finite number."""
    terms: dict[str, float | None]
    usable_tokens: int
    """Tokens of the prompt that the worker's engine will reuse."""
    new_tokens: float
    active_blocks: float
    running: int
    waiting: int
    reserved: int
    ttft_s: float | None
    """Predicted seconds to the first token there; None: not a finite number."""
    excluded: str = ""


class GuardMove(msgspec.Struct, frozen=True):
    """Why the guard moved the pick: requests and waiting tokens of the cheapest row exceed both
    bounds of the guard."""

    cheapest: int
    """Index of the cheapest row in ShownDecision.rows."""
    margin_tokens: float
    least_requests: float
    least_wait_tokens: float
    cheapest_requests: float
    cheapest_wait_tokens: float
    picked_requests: float
    picked_wait_tokens: float


class Otherwise(msgspec.Struct, frozen=True, omit_defaults=True):
    """The policy `ttft`'s own choice, compared with the pick."""

    agreement: str
    worker_id: str = ""
    """Worker of `ttft`'s choice; where the choice is drawn, the likeliest."""
    dp_rank: int = 0
    sooner_s: float = 0.0
    """Seconds by which the choice's first token is predicted to come sooner; below 0: later."""
    overlap_tokens: float = 0.0
    """Usable overlap of the choice less that of the pick, tokens."""


class ShownDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A decision or a refusal as shown; a refusal may have no rows."""

    number: int
    """Number of the decision among those sampled since the start; 0: looked up by an id."""
    at_s: float
    request_id: str
    reservation_id: str = ""
    """Id of the pick's reservation."""
    model: str
    policy: str
    formula: str = ""
    parameters: dict[str, float] = {}
    shared_terms: dict[str, float] = {}
    prompt_tokens: int = 0
    candidates: int = 0
    """Number of candidates, those without a row in `rows` included."""
    excluded: dict[str, int] = {}
    """Reason of exclusion -> number of workers."""
    tied: int = 0
    rows: list[CandidateRow] = []
    """Shown candidates; the first is the pick, unless the decision is a refusal."""
    guard: GuardMove | None = None
    last_resort: bool = False
    over_estimate: bool = False
    pair: str = ""
    """Place where a pair's prompt is computed, a value of Prefill; empty: the pick is no pair."""
    otherwise: Otherwise | None = None
    refusal: str = ""
    """Reason of the refusal; empty: a worker was picked."""
    message: str = ""
    waited_s: float = 0.0
    """Seconds in the router's queue; 0: the request did not wait."""
    state: str = ""
    """State of a decision that was looked up by an id: open, or how its reservation ended."""


class _Taken(NamedTuple):
    """A decision that is not written out yet."""

    decision: Decision
    number: int
    ttft_s: Column
    """Predicted seconds to the first token, one for each row."""
    otherwise: Otherwise | None


class Decisions:
    """The last sampled decisions, KEPT_MAX at most."""

    def __init__(self, ttft: Callable[[], Policy | None]) -> None:
        """ttft: returns the policy with which each decision is compared; None: there is none."""
        self.count = 0
        """Decisions and refusals that were sampled since the start."""
        self._ttft = ttft
        self._kept: deque[ShownDecision] = deque(maxlen=KEPT_MAX)
        self._taken: deque[_Taken | ShownDecision] = deque(maxlen=KEPT_MAX)
        """Sampled decisions that are not written out yet; refusals among them, in order."""

    @property
    def kept(self) -> deque[ShownDecision]:
        """The kept decisions, the oldest first."""
        while self._taken:
            taken = self._taken.popleft()
            self._kept.append(taken if isinstance(taken, ShownDecision) else shown(taken))
        return self._kept

    def watch(self, decision: Decision) -> None:
        """Keeps a sampled decision, before anything of it is reserved."""
        self.count += 1
        self._taken.append(taken(decision, self.count, self._ttft()))

    def watch_refused(self, refused: Refused) -> None:
        """Keeps a sampled request that got no worker."""
        self.count += 1
        refusal = refused.refusal
        self._taken.append(
            ShownDecision(
                number=self.count,
                at_s=refused.at_s,
                request_id=refused.request_id[:REQUEST_ID_MAX],
                model=refused.model[:NAME_MAX],
                policy=refused.policy[:NAME_MAX],
                prompt_tokens=refused.prompt_tokens,
                refusal=refusal.reason.value,
                message=refusal.message[:MESSAGE_MAX],
                waited_s=refused.waited_s,
            )
        )

    def since(self, number: int) -> list[ShownDecision]:
        """Decisions of higher numbers, oldest first."""
        return [each for each in self.kept if each.number > number]


def taken(decision: Decision, number: int, ttft: Policy | None) -> _Taken:
    """Reads those values of a decision that its reservation will change, and compares its pick with
    `ttft`'s choice."""
    other = None if ttft is None else _scored(decision, ttft)
    if other is None or other.ttft_s is None or ttft is None:
        return _Taken(decision, number, first_token(decision.rows).total_s, None)
    return _Taken(decision, number, other.ttft_s, otherwise(decision, other, ttft.name))


def shown(of: _Taken) -> ShownDecision:
    """Writes out a decision, with the rows that are shown of it."""
    decision = of.decision
    request, policy = decision.request, decision.policy
    rows = _rows(decision)
    places = {row: place for place, row in enumerate(rows)}
    return ShownDecision(
        number=of.number,
        at_s=decision.decided_at_s,
        request_id=request.request_id[:REQUEST_ID_MAX],
        reservation_id=decision.reservation_id,
        model=request.model[:NAME_MAX],
        policy=policy.name,
        formula=policy.formula,
        parameters=dict(policy.parameters),
        shared_terms=dict(decision.scores.shared_terms),
        prompt_tokens=decision.rows.prompt_tokens,
        candidates=len(decision.rows) + len(decision.not_live),
        excluded=dict(decision.exclusions()),
        tied=decision.tied,
        rows=_candidates(of, rows),
        guard=_guard_move(decision, places),
        last_resort=decision.last_resort,
        over_estimate=decision.over_estimate,
        pair=decision.how.value if decision.how is not None else "",
        otherwise=of.otherwise,
        waited_s=decision.waited_s,
    )


def _scored(decision: Decision, policy: Policy) -> Scores | None:
    """Another policy's scores of a decision's rows; None: the policy failed on them."""
    try:
        return policy.score(decision.rows)
    except PolicyFailed:
        return None


def otherwise(decision: Decision, scores: Scores, name: str) -> Otherwise | None:
    """A policy's choice, by its scores and name; None: it could have picked no worker."""
    guard = decision.guard
    looks = guard if guard is not None and guard.looks_at(name) else None
    chances = guarded_chances(decision.rows, decision.excluded, scores, looks)
    if chances is None:
        return None
    gain = difference(
        decision.rows, decision.excluded, decision.order[0], scores, looks, scores.ttft_s
    )
    choice = decision.sources[int(chances.argmax())].key
    return Otherwise(
        gain.agreement.value, choice.worker_id, choice.dp_rank, gain.ttft_s, gain.overlap_tokens
    )


def _rows(decision: Decision) -> list[int]:
    """Indexes of the rows that are shown, the pick's first."""
    first = decision.order[:1]
    if decision.guarded is not None:
        first.append(decision.guarded.cheapest)
    costs = np.where([bool(reason) for reason in decision.excluded], np.inf, decision.scores.costs)
    by_cost = np.argsort(costs, kind="stable")[: ROWS_MAX + len(first)].tolist()
    return list(dict.fromkeys([*first, *by_cost]))[:ROWS_MAX]


def _candidates(of: _Taken, rows: list[int]) -> list[CandidateRow]:
    decision, seconds = of.decision, of.ttft_s
    columns, scores = decision.rows, decision.scores
    shown_rows = []
    for row in rows:
        source = decision.sources[row]
        shown_rows.append(
            CandidateRow(
                worker_id=source.key.worker_id,
                dp_rank=source.key.dp_rank,
                cost=finite(scores.costs.item(row)),
                terms={
                    name: finite(float(column.item(row)))
                    for name, column in scores.row_terms.items()
                },
                usable_tokens=decision.overlap(row).usable,
                new_tokens=columns.new_tokens.item(row),
                active_blocks=columns.active_blocks.item(row),
                running=int(columns.running.item(row)),
                waiting=int(columns.waiting.item(row)),
                reserved=int(columns.reserved.item(row)),
                ttft_s=finite(seconds.item(row)),
                excluded=decision.excluded[row],
            )
        )
    return shown_rows


def _guard_move(decision: Decision, places: dict[int, int]) -> GuardMove | None:
    guarded = decision.guarded
    if guarded is None:
        return None
    waits, picked, cheapest = guarded.waits, decision.order[0], guarded.cheapest
    return GuardMove(
        places[cheapest],
        waits.margin_tokens,
        waits.least_requests,
        waits.least_tokens,
        waits.requests.item(cheapest),
        waits.tokens.item(cheapest),
        waits.requests.item(picked),
        waits.tokens.item(picked),
    )


def finite(number: float) -> float | None:
    """The number, or None where JSON can't have it (NaN, infinity)."""
    return number if isfinite(number) else None
