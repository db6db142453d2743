"""Decides about a request: its pool is scored by a policy, and put in order.

    Request ─> policy, pool ─> overlaps ─> rows ─> costs ─> order ─> Decision

Pure, like the core that it is a part of. Laws:
- a decision changes nothing but the state of the rng, and the counts of failed policies;
- an excluded worker, or a worker whose cost is not a number, is never first in order;
- a worker that is over its learned capacity (router/health/capacity.py) is first only where no
  worker has room;
- a worker of the last resort is first only where no answering worker may take the request at all.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from events.feed.fleet_view import Source
from indexer.index import BlockIndex
from router.config.settings.configurations import ModelSettings
from router.config.settings.routing_settings import GuardSettings, RoutingSettings
from router.decision.decision import Decision, NobodyFits, Overlap
from router.decision.guard import Guarded, Waits
from router.decision.order import cheapest
from router.decision.pairs import Matched, Pairs, Stages
from router.fleet.blocks_ahead import SIMULATED_MAX, BlocksAhead
from router.fleet.eligibility import (
    DRAINED,
    NOT_A_NUMBER,
    OUTPUT_TOKENS_MAX,
    TOO_LONG,
    answering_first,
    exclusions,
    loaded_first,
    narrows_nothing,
    only_roles,
    too_long,
)
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.state import Fleet
from router.fleet.table import COLUMNS, Column, Flags, most
from router.policies.affinity import held, with_bonus
from router.policies.candidates import Candidates
from router.policies.configured import DecisionSettings, PolicySettings
from router.policies.dynamo_adaptive import DYNAMO_ADAPTIVE
from router.policies.own import Failure, PolicyFailed
from router.policies.policy import Policy, Scores
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal
from router.request.request import Request, Role, Session

FULL_RETRY_S = 0.5
"""RetryInfo when all workers are full: about the time until a request ends."""
_FULL = "full"
_FULL_COLUMN = COLUMNS.index("full")


class Decider:
    """Decides by the configured settings, about the fleet as it is.

    Over 300 lines: the steps of one decision, over rows and scores that they share.
    """

    def __init__(
        self,
        fleet: Fleet,
        routing: RoutingSettings,
        rng: random.Random,
        models: Iterable[ModelSettings] = (),
    ) -> None:
        """models: may have settings of their own."""
        self.use(DecisionSettings.of(routing, models))
        self.looks_ahead = False
        """Whether a request that can wait needs a worker with KV blocks for all of it."""
        self.policy_failures: Counter[tuple[str, Failure]] = Counter()
        """Decisions for which a policy of the operator's failed."""
        self._policy_error = ""
        self._index: BlockIndex = fleet.view.index
        self._pools = fleet.pools
        self._further = fleet.further
        self._loads = fleet.loads
        self._pairs = Pairs(fleet.further)
        self._drained: Collection[str] = fleet.drained
        self._rng = rng
        self._of_role: dict[Role, tuple[Pool, Sequence[str]]] = {}
        """Role -> the last call's pool, and exclusions of its workers of other roles."""

    def use(self, settings: DecisionSettings) -> None:
        """Decides by other settings from now on."""
        self._of_fleet, self._of_models = settings.of_fleet, settings.of_models
        self._routing = settings.of_fleet.routing

    @property
    def policies(self) -> dict[str, Policy]:
        """By name, with their parameters; models' own apart."""
        return self._of_fleet.policies

    def settings_of(self, model: str, pool: Pool) -> PolicySettings:
        """The settings of a request that names a model, and whose workers are a pool.

        The settings are those of the model that the request names, by name or alias; else, as for a
        LoRA or a request without a model, those of the model that all workers of the pool serve.
        """
        if not self._of_models:
            return self._of_fleet
        if (own := self._of_models.get(model)) is not None:
            return own
        served = {self._of_models.get(name, self._of_fleet) for name in set(pool.models)}
        return served.pop() if len(served) == 1 else self._of_fleet

    def has_own(self, model: str, pool: Pool) -> bool:
        """Whether settings of a model, rather than the fleet's, decide such requests."""
        return self.settings_of(model, pool) is not self._of_fleet

    def decide(
        self,
        request: Request,
        ready: bool,
        now_s: float,
        mark: Callable[[str], None],
        *,
        may_strain: bool = True,
    ) -> Decision:
        """Scores the pool; raises Refusal when there is no pool to score.

        ready: see RouterCore.ready. may_strain: whether workers over their capacity may be picked
        where no other has room; False: the request can wait. The decision's `order` is empty when
        no worker can be picked, and `refuse` says why.
        """
        if request.prompt.token_count > self._routing.prompt_tokens_max:
            raise Refusal(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {request.prompt.token_count} tokens, the limit is"
                f" {self._routing.prompt_tokens_max} (routing.prompt_tokens_max)",
            )
        self._pools.refresh()
        pool, down = self._pools.live(request.model, ready)
        matched = self._matched(request, pool, down, now_s, mark)
        decision = self._with_room(matched, may_strain)
        if not decision.order and not _waits(decision):
            for last in self._pools.last_resorts(request.model, ready):
                matched = self._matched(request, last.pool, last.down, now_s, mark)
                otherwise = self._with_room(matched._replace(last=last.reasons), may_strain)
                if otherwise.order:
                    otherwise.last_resort = True
                    decision = otherwise
                    break
        mark("cost")
        return decision

    def _matched(
        self,
        request: Request,
        pool: Pool,
        down: list[tuple[Source, str]],
        now_s: float,
        mark: Callable[[str], None],
    ) -> Matched:
        """The overlaps of a pool's workers with a prompt, and the settings of its decision.

        Raises Refusal for a policy that the request can't have.
        """
        settings = self.settings_of(request.model, pool)
        policy = self._policy(request, settings)
        for size in pool.block_sizes:
            request.prompt.prefixes(size)
        mark("hash")
        overlaps = self._overlaps(request.prompt, pool)
        mark("match")
        table = self._pools.table(pool)
        return Matched(request, pool, down, table, overlaps, now_s, settings, policy)

    def _with_room(self, matched: Matched, may_strain: bool) -> Decision:
        """The decision among workers with room; where there is none, among strained ones, too."""
        decision = self._decide(matched)
        if self.looks_ahead and not may_strain and decision.order and decision.prefill is None:
            return self._with_blocks(matched, decision)
        if not decision.order and may_strain:
            table = self._pools.with_strained(matched.pool, matched.table)
            if table is not None:
                strained = self._decide(matched._replace(table=table))
                strained.strained = True
                return strained if strained.order else decision
        return decision

    def _with_blocks(self, matched: Matched, decision: Decision) -> Decision:
        """The decision, if its pick has KV blocks for the whole request; else one among the workers
        that have (router/fleet/blocks_ahead.py), and the others count as full."""
        pool, request = matched.pool, matched.request
        promised = self._pools.blocks_promised(pool)
        output_tokens = self.output_tokens(request)
        ahead = BlocksAhead(pool, self._loads, request.prompt, output_tokens, promised)
        for _ in range(SIMULATED_MAX):
            pick = decision.order[0]
            if not ahead.short[pick] and (
                not ahead.unsure[pick] or ahead.settle(pick, matched.now_s)
            ):
                return decision
            decision = self._decide_without(matched, ahead.short)
            if not decision.order:
                return decision
        return self._decide_without(matched, ahead.short | ahead.unsure)

    def _decide_without(self, matched: Matched, full: Flags) -> Decision:
        """The decision with some more workers that count as full."""
        table = matched.table.copy()
        table[_FULL_COLUMN, full] = 1.0
        return self._decide(matched._replace(table=table))

    def _decide(self, matched: Matched) -> Decision:
        request, pool, settings = matched.request, matched.pool, matched.settings
        policy = matched.policy
        routing, policies = settings.routing, settings.policies
        if request.role is Role.PAIR:
            stages = Stages(
                policy if request.policy else policies[routing.prefill_policy],
                policies[routing.decode_policy],
                policy,
                routing.local_prefill_tokens,
                routing.local_prefill_percent / 100,
            )
            return self._pairs.decide(matched, stages, self._judge, self._eligible)
        if request.resumed is not None:
            holders = self._holders(matched, request.resumed)
            stage = policy if request.policy else policies[routing.decode_policy]
            away = self._further.mean_distance(pool, holders)
            return self._judge(matched, stage, self._eligible(request, pool), away)
        return self._judge(matched, policy, self._eligible(request, pool))

    def refuse(self, decision: Decision) -> NobodyFits:
        """The refusal of a request for which no worker of a pool can be picked."""
        exclusions = sorted(decision.exclusions().items())
        counts = "(" + ", ".join(f"{reason}: {count}" for reason, count in exclusions) + ")"
        refused = partial(NobodyFits, decision=decision)
        if not len(decision.rows):
            of = f" for {decision.request.model!r}" if decision.request.model else ""
            return refused(Reason.NO_WORKER, f"no live worker{of} {counts}")
        if _FULL in decision.excluded:
            return refused(Reason.ALL_WORKERS_FULL, f"no worker has room {counts}", FULL_RETRY_S)
        may_come_back = [source for source, _ in decision.not_live]
        too_short = []
        for source, reason in zip(decision.sources, decision.excluded, strict=True):
            if reason == TOO_LONG:
                too_short.append(heartbeat_of(source).max_model_len)
            elif reason == DRAINED:
                may_come_back.append(source)
        output_tokens = self.output_tokens(decision.request)
        if too_short and all(
            too_long(decision.request, output_tokens, heartbeat_of(source))
            for source in may_come_back
        ):
            return refused(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {decision.rows.prompt_tokens} tokens and fits no worker with"
                f" its expected output; the longest takes {max(too_short)}",
            )
        if decision.prefill is not None and not decision.prefill.order:
            return self.refuse(decision.prefill)
        return refused(Reason.NO_ELIGIBLE_WORKER, f"no worker may take this request {counts}")

    def take_policy_error(self) -> str:
        """The error of the last policy that failed since the last call; empty: none did."""
        error, self._policy_error = self._policy_error, ""
        return error

    def _policy(self, request: Request, settings: PolicySettings) -> Policy:
        """The request's, or the one of the settings; raises Refusal."""
        routing, policies = settings.routing, settings.policies
        name = request.policy or routing.policy
        if name != routing.policy and not routing.policy_per_request:
            raise Refusal(
                Reason.POLICY_NOT_ALLOWED,
                "requests may not choose a policy here (routing.policy_per_request)",
            )
        if (policy := policies.get(name)) is None:
            known = ", ".join(policies)
            raise Refusal(Reason.UNKNOWN_POLICY, f"unknown policy {name!r}; there are {known}")
        return policy

    def _holders(self, matched: Matched, session: Session) -> Flags:
        """The workers that hold most of a session's KV cache; raises Refusal if nobody does.

        By the index; by where its last request went if that can't say.
        """
        pool, trust = matched.pool, matched.table[COLUMNS.index("trust")]
        held = trust * matched.overlaps[0]
        longest = held.max(initial=0.0)
        holders: Flags = held == longest
        if longest > 0:
            return holders
        was_there = np.array([key == session.worker for key in pool.workers], np.bool_)
        holders = was_there & ((trust < 1) | (not len(session.prefixes)))
        if not holders.any():
            raise Refusal(
                Reason.UNKNOWN_SESSION,
                f"nobody holds session {matched.request.session_id!r} any more",
            )
        return holders

    def _eligible(self, request: Request, pool: Pool) -> Sequence[str]:
        """A reason for each worker that can't take a request; empty where it can."""
        output_tokens = self.output_tokens(request)
        if not narrows_nothing(request, output_tokens, pool, bool(self._drained)):
            return exclusions(request, output_tokens, pool, self._drained)
        role = request.role
        if pool.roles <= {role, Role.BOTH}:
            return pool.all_eligible
        known = self._of_role.get(role)
        if known is None or known[0] is not pool:
            known = self._of_role[role] = pool, only_roles(pool, role)
        return known[1]

    def _judge(
        self,
        matched: Matched,
        policy: Policy,
        eligible: Sequence[str],
        kv_distance: Column | None = None,
    ) -> Decision:
        """Scores a pool, and puts it in order."""
        request, pool, not_live, table, overlaps, now_s, settings, _, last = matched
        eligible = answering_first(eligible, last)
        if lora_name := request.prompt.lora_name:
            eligible = loaded_first(
                eligible, lora_name, pool, table[COLUMNS.index("full")].tolist()
            )
        affinity = self._routing.affinity
        # Of a pair, the session goes on where it is decoded.
        if request.session_id and (request.role is not Role.PAIR or kv_distance is not None):
            if affinity.hard:
                of_session = self._further.of_session(pool, request.session_id)
                eligible = held(eligible, of_session, table[COLUMNS.index("full")])
            policy = with_bonus(policy, affinity.bonus.get(policy.name, 0.0))
        rows = self._rows(request, pool, table, overlaps, eligible, now_s, kv_distance)
        policy, scores = self._scored(policy, settings.policies[DYNAMO_ADAPTIVE.name], rows)
        in_turn = bool(request.session_id) and not policy.ties_at_random
        excluded, order, tied = self._order(rows, scores, in_turn)
        guard, guarded = settings.routing.guard, None
        # A decode worker of a pair doesn't wait for prompts.
        is_guarded = kv_distance is None and guard.looks_at(policy.name)
        if is_guarded and order:
            order, guarded = self._guarded(rows, scores, excluded, order, guard, in_turn)
        return Decision(
            request,
            policy,
            rows,
            pool.sources,
            overlaps,
            scores,
            excluded,
            order,
            tied,
            not_live,
            now_s,
            guard=guard if is_guarded else None,
            guarded=guarded,
        )

    def _overlaps(self, prompt: Prompt, pool: Pool) -> npt.NDArray[np.int32]:
        """Each worker's overlap with the prompt, in tokens: a row for each field of Overlap."""
        if len(pool.block_sizes) == 1:
            return self._overlaps_of(prompt, next(iter(pool.block_sizes)), pool.slots)
        tokens = np.zeros((len(Overlap._fields), len(pool)), np.int32)
        for size in pool.block_sizes:
            of_size = [heartbeat_of(source).block_size == size for source in pool.sources]
            rows = np.flatnonzero(of_size)
            tokens[:, rows] = self._overlaps_of(prompt, size, pool.slots[rows])
        return tokens

    def _overlaps_of(
        self, prompt: Prompt, size: int, slots: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.int32]:
        if not size:  # workers whose block size is unknown yet
            return np.zeros((len(Overlap._fields), len(slots)), np.int32)
        # The engine recomputes the last block of a fully cached prompt.
        usable_max = (prompt.token_count - 1) // size
        blocks = self._index.overlap(prompt.prefixes(size), usable_max, slots)
        blocks *= size
        return blocks

    def _rows(
        self,
        request: Request,
        pool: Pool,
        table: npt.NDArray[np.float64],
        overlaps: npt.NDArray[np.int32],
        excluded: Sequence[str],
        now_s: float,
        kv_distance: Column | None = None,
    ) -> Candidates:
        trust = table[COLUMNS.index("trust")]
        return Candidates(
            workers=pool.workers,
            prompt_tokens=request.prompt.token_count,
            overlap_tokens=trust * overlaps[1],
            excluded=excluded,
            table=table,
            request=request,
            tokens=overlaps,
            pool=pool,
            further=self._further,
            now_s=now_s,
            kv_distance=kv_distance,
        )

    def _scored(self, policy: Policy, default: Policy, rows: Candidates) -> tuple[Policy, Scores]:
        """Costs of rows, and the policy that made them: the default in place of a failed one."""
        if not len(rows):
            return policy, Scores(np.zeros(0))
        try:
            scores = policy.score(rows)
            if (
                scores.chances is not None
            ):  # the draw is in the receipt, so that a pick can be redone
                shared = {**scores.shared_terms, "draw": self._rng.random()}
                scores = replace(scores, shared_terms=shared)
            return policy, scores
        except PolicyFailed as failed:
            self.policy_failures[policy.name, failed.failure] += 1
            self._policy_error = f"policy {policy.name!r}: {failed}"
        return default, default.score(rows)

    def _order(
        self, rows: Candidates, scores: Scores, in_turn: bool
    ) -> tuple[Sequence[str], list[int], int]:
        """Why rows can't be picked; the pick and the rows next to it, cheapest first; how many tie.

        in_turn: see `_rotated`. Where the policy gives chances, the pick is drawn by them.
        """
        excluded, can = rows.excluded, None
        if self._pools.any_full or any(excluded) or most(rows.full):
            excluded = [
                reason or (_FULL if full else "")
                for reason, full in zip(excluded, rows.full.tolist(), strict=True)
            ]
            can = np.array([not reason for reason in excluded], np.bool_)
        wanted = 1 + max(1, self._routing.alternatives)  # receipts name the runner-up
        tied, following, bad = cheapest(scores.costs, can, wanted)
        if bad:
            excluded = list(excluded)
            for row in bad:
                excluded[row] = excluded[row] or NOT_A_NUMBER
        order = self._rotated(rows, tied, following, in_turn)[:wanted]
        if scores.chances is not None and len(order) > 1:
            drawn = _drawn(rows, scores.chances, excluded, scores.shared_terms["draw"])
            order = [drawn, *(row for row in order if row != drawn)][:wanted]
        return excluded, order, len(tied)

    def _guarded(
        self,
        rows: Candidates,
        scores: Scores,
        excluded: Sequence[str],
        order: list[int],
        guard: GuardSettings,
        in_turn: bool,
    ) -> tuple[list[int], Guarded | None]:
        """An order whose pick the guard leaves where it is (router/decision/guard.py).

        The rows that it passes over come last, so that they are no one's next choice but for want
        of others.
        """
        can = None
        if any(excluded):
            can = np.array([not reason for reason in excluded], np.bool_)
        waits = Waits.of(rows, can, guard)
        cheapest_row = order[0]
        if not waits.passes_over(cheapest_row):
            return order, None
        passed_over = waits.passed_over
        costs, wanted = scores.costs, len(order)
        stay = ~passed_over if can is None else can & ~passed_over
        tied, following, _ = cheapest(costs, stay, wanted)
        moved = self._rotated(rows, tied, following, in_turn)[:wanted]
        if len(moved) < wanted:
            others = passed_over if can is None else can & passed_over
            tied, following, _ = cheapest(costs, others, wanted - len(moved))
            moved = [*moved, *tied, *following][:wanted]
        return moved, Guarded(cheapest_row, waits)

    def _rotated(
        self, rows: Candidates, tied: list[int], following: list[int], in_turn: bool
    ) -> list[int]:
        """Rows that tie from one row on, then the following rows.

        in_turn: from the row whose worker was picked longest ago, so that sessions that begin are
        spread evenly over workers that are alike; else from a random row on, so that picks of
        several routers differ.
        """
        if len(tied) < 2:
            first = 0
        elif in_turn:
            first = int(np.argmin(rows.last_picked[tied]))
        else:
            first = self._rng.randrange(len(tied))
        return [*tied[first:], *tied[:first], *following]

    def output_tokens(self, request: Request) -> int:
        """Output tokens expected of a request."""
        expected = request.expected_output_tokens
        return min(
            self._routing.expected_output_tokens if expected is None else expected,
            OUTPUT_TOKENS_MAX,
        )


def _waits(decision: Decision) -> bool:
    """Whether an answering worker may take a request without a pick once it has room: then no
    other worker is tried in its place."""
    stages = [decision] if decision.prefill is None else [decision, decision.prefill]
    return any(_FULL in stage.excluded or NOT_A_NUMBER in stage.excluded for stage in stages)


def _drawn(
    rows: Candidates, chances: npt.NDArray[np.float64], excluded: Sequence[str], draw: float
) -> int:
    """The row that a number from 0 to 1 stands for: one that can be picked, by its chance.

    Of those, in the order of worker ids and ranks, the first whose chance and those before it are
    more than that share of all their chances.
    """
    can = sorted(
        (row for row, reason in enumerate(excluded) if not reason),
        key=rows.workers.__getitem__,
    )
    reached = np.cumsum(chances[can])
    # Rounding may bring the draw to the very end, which is the last that has a chance.
    last = np.searchsorted(reached, reached[-1])
    return can[int(min(last, np.searchsorted(reached, draw * reached[-1], "right")))]
