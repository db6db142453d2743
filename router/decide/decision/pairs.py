"""Pairs: one worker computes the prompt, another one takes its KV cache over and decodes.

    workers that can hand over                        -> cost by cache and queue -> prefill worker
    workers that can take over from it or serve alone -> cost by room, distance  -> pick

The pick computes the prompt itself when hardly any of its tokens are new there: a transfer, or a
wait in another queue, would cost more than it saves. When no worker can hand over, a worker that
can serve alone does all, by the policy of whole requests.

The parts that a worker can take depend on the engine, too. vLLM's decode workers compute prompts as
all others do; SGLang's don't, and its workers without a role know no hand-over. A vLLM worker
without a role takes part in pairs if it names its KV connector. Both halves are of one kind: of the
same engine, block size and values of `routing.pair_labels`, such as the revision of a rollout.

Pure, like the core that it is a part of.

Laws:
- the prefill worker of a pair hands over only to its decode worker, which is another worker of its
  kind;
- with routing.local_prefill_tokens 0, only the worker picked for prefill computes new tokens, if
  some worker can hand over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from events.engines.engine import HandOver
from events.engines.table import engine_of
from events.feed.fleet_view import Source
from events.plane.facts import Heartbeat
from router.decide.decision.decision import Decision, Prefill
from router.decide.decision.handover import is_reachable
from router.decide.policies.configured import PolicySettings
from router.decide.policies.policy import Policy
from router.fleet.eligibility import Barred
from router.fleet.on_demand import Further
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.table import COLUMNS, Column, Flags
from router.request.request import Request, Role

HANDS_NOTHING_OVER = "hands nothing over"
NONE_TAKES_OVER = "no worker can take over from it"
DECODES_ONLY = "can't compute prompts"
FETCHES_FROM_OTHERS = "can't take over from the prefill worker"

_FULL = COLUMNS.index("full")
_TRUST = COLUMNS.index("trust")


class Matched(NamedTuple):
    """A request, and the overlap of each worker of its pool."""

    request: Request
    pool: Pool
    not_live: list[tuple[Source, str]]
    table: npt.NDArray[np.float64]
    overlaps: npt.NDArray[np.int32]
    now_s: float
    settings: PolicySettings
    """The settings of the request's decision."""
    policy: Policy
    """The policy that the request names, else the default of the settings."""
    last: Sequence[str] = ()
    """Reason, by row, why a worker is a last resort; empty for a worker that answers. An empty
    sequence: all workers of the pool answer."""


LOCAL_SHARE = 0.05
"""Share of a prompt up to which new tokens are computed by the decode worker: sending the KV cache
of the whole prompt takes longer than computing so little of it."""


class Stages(NamedTuple):
    """The policies of a pair's two halves."""

    prefill: Policy
    decode: Policy
    alone: Policy
    """Policy for one worker that computes prompt and answer, where no pair can."""
    local_tokens: int
    """A prompt with at most so many new tokens, or with at most LOCAL_SHARE of its tokens new, is
    computed by the decode worker; 0: only a prompt without new tokens."""


class Judge(Protocol):
    """Interface: scores and orders candidates."""

    def __call__(
        self,
        matched: Matched,
        policy: Policy,
        eligible: Barred,
        kv_distance: Column | None = None,
        *,
        is_alone: bool = False,
    ) -> Decision:
        """Returns the decision about a pool. eligible: its barred rows. kv_distance: of each row to
        the source of the KV cache; None: nothing has to come. is_alone: whether the worker computes
        prompt and answer, though a pair is wanted.
        """


Eligible = Callable[[Request, Pool], Barred]
"""Function that returns the rows of a pool barred for a request by role, labels and so on."""


def hands_over(heartbeat: Heartbeat) -> bool:
    """Whether a worker can compute a prompt for another one."""
    return _does(Role.PREFILL, heartbeat) and is_reachable(heartbeat)


def takes_over(heartbeat: Heartbeat) -> bool:
    """Whether a worker can go on with a prompt that another one has computed."""
    return _does(Role.DECODE, heartbeat)


def serves_alone(heartbeat: Heartbeat) -> bool:
    """Whether a worker can compute a prompt and go on with it."""
    if heartbeat.role == Role.DECODE:
        return engine_of(heartbeat.engine).hand_over is not HandOver.AT_ONCE
    return heartbeat.role == Role.BOTH


def _does(half: Role, heartbeat: Heartbeat) -> bool:
    """Whether a worker takes a half of a pair."""
    hand_over = engine_of(heartbeat.engine).hand_over
    if heartbeat.role == Role.BOTH:
        return hand_over is HandOver.IN_TURN and bool(heartbeat.kv_connector)
    return hand_over is not None and heartbeat.role == half


@dataclass(frozen=True, slots=True)
class _Halves:
    """The parts that each worker of a pool can take."""

    hands_over: Flags
    takes_over: Flags
    alone: Flags
    kind: npt.NDArray[np.intp]
    """Workers with the same number are of one kind: they can take over from one another."""
    one_kind: bool
    """Whether all workers are of one kind."""

    def with_mates(self, takers: Flags) -> Flags:
        """True for each worker that is of one kind with some worker that is True in `takers`."""
        if self.one_kind:
            return np.full(len(takers), takers.any())
        return np.bincount(self.kind[takers], minlength=len(takers))[self.kind] > 0

    def fetching(self, row: int) -> Flags:
        """True for each worker that can take over from the worker of a row."""
        return self.takes_over if self.one_kind else self.takes_over & (self.kind == self.kind[row])

    @classmethod
    def of(cls, pool: Pool, labels: Sequence[str]) -> "_Halves":
        """labels: names of the worker labels whose values tell kinds apart."""
        heartbeats = [heartbeat_of(source) for source in pool.sources]
        kinds: dict[tuple[object, ...], int] = {}
        kind_of = [_kind(heartbeat, labels) for heartbeat in heartbeats]
        return cls(
            np.array([hands_over(heartbeat) for heartbeat in heartbeats], np.bool_),
            np.array([takes_over(heartbeat) for heartbeat in heartbeats], np.bool_),
            np.array([serves_alone(heartbeat) for heartbeat in heartbeats], np.bool_),
            np.array([kinds.setdefault(kind, len(kinds)) for kind in kind_of], np.intp),
            len(kinds) < 2,
        )


def _kind(heartbeat: Heartbeat, labels: Sequence[str]) -> tuple[object, ...]:
    values = (heartbeat.labels.get(name, "") for name in labels)
    return heartbeat.engine, heartbeat.block_size, *values


def of_kind(pool: Pool, rows: Flags, labels: Sequence[str]) -> Flags:
    """True for each worker that is of one kind with some worker that is True in `rows`."""
    return pool.made(_Halves.of, labels).with_mates(rows)


class Pairs:
    """Decides about requests for a pair of workers."""

    def __init__(self, further: Further) -> None:
        self._further = further

    def decide(
        self, matched: Matched, stages: Stages, judge: Judge, eligible: Eligible
    ) -> Decision:
        """The decision about the decode worker; its `prefill` is that about the prefill worker."""
        request, pool = matched.request, matched.pool
        halves = pool.made(_Halves.of, matched.settings.routing.pair_labels)
        decodes = eligible(replace(request, role=Role.DECODE), pool)
        room = matched.table[_FULL] == 0
        takes = halves.takes_over & room & decodes.can(len(pool))
        mates = halves.with_mates(takes)
        prefills = eligible(replace(request, role=Role.PREFILL, expected_output_tokens=1), pool)
        prefills = prefills.narrowed(halves.hands_over, HANDS_NOTHING_OVER)
        prefill = judge(matched, stages.prefill, prefills.narrowed(mates, NONE_TAKES_OVER))
        if not prefill.order:
            # A full worker would take it later: the refusal then says that all are full.
            can = halves.alone | (halves.takes_over & ~room)
            decodes = decodes.narrowed(can, DECODES_ONLY)
            decision = judge(matched, stages.alone, decodes, is_alone=True)
            decision.prefill, decision.how = prefill, Prefill.ABSENT
            return decision
        source = prefill.order[0]
        local = _local(matched, halves, stages)
        local[source] = halves.alone[source]  # it would hand over to itself
        fetches = halves.fetching(source)
        distance = self._further.topology(pool).distances_to(source)
        distance[local] = 0.0
        decodes = decodes.narrowed(local | fetches, FETCHES_FROM_OTHERS)
        decision = judge(matched, stages.decode, decodes, distance)
        stays = bool(decision.order) and bool(local[decision.order[0]])
        decision.prefill, decision.how = prefill, Prefill.LOCAL if stays else Prefill.REMOTE
        # The alternatives must be able to take the pick's part.
        able = halves.alone if stays else fetches
        decision.order = [row for row in decision.order if able[row]]
        return decision


def _local(matched: Matched, halves: _Halves, stages: Stages) -> Flags:
    """True for each worker that serves alone and to which hardly any of the prompt is new."""
    tokens = matched.request.prompt.token_count
    new = tokens - matched.table[_TRUST] * matched.overlaps[1]
    share = LOCAL_SHARE if stages.local_tokens else 0.0
    few: Flags = new <= max(stages.local_tokens, share * tokens)
    return halves.alone & few
