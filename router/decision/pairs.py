"""Pairs: one worker computes the prompt, another one takes its KV cache over and decodes.

    who can hand over                           -> cost by cache and queue -> the prefill worker
    who can take over from it, or serve alone   -> cost by room and way    -> the pick

The pick computes the prompt itself when hardly anything of it is new to it: what it would fetch, or
wait for in another queue, costs more than it saves. And when nobody can hand over, one worker that
can serve alone does all, by the policy of whole requests.

Who can do what depends on the engine, too. vLLM's decode workers compute prompts as all others do;
SGLang's don't, and its workers without a role know no hand-over. A vLLM worker without a role takes
part in pairs if it names its KV connector. Both halves are of the same engine and block size.

Pure, like the core that it is a part of.

Laws:
- the prefill worker of a pair hands over to nobody but its decode worker, which is another one;
- thresholds of 0 leave nothing local that is not cached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from events.feed.fleet_view import Source
from events.plane.facts import Heartbeat
from router.decision.decision import Decision, Prefill
from router.decision.handover import can_be_found
from router.fleet.on_demand import Further
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.table import COLUMNS, Column, Flags
from router.policies.configured import PolicySettings
from router.policies.policy import Policy
from router.request.request import Request, Role

HANDS_NOTHING_OVER = "hands nothing over"
NOBODY_TAKES_OVER = "nobody can take over from it"
DECODES_ONLY = "can't compute prompts"
FETCHES_FROM_OTHERS = "can't take over from the prefill worker"

_FULL = COLUMNS.index("full")
_TRUST = COLUMNS.index("trust")


class Matched(NamedTuple):
    """A request, and what the workers of its pool hold of the prompt."""

    request: Request
    pool: Pool
    not_live: list[tuple[Source, str]]
    table: npt.NDArray[np.float64]
    overlaps: npt.NDArray[np.int32]
    now_s: float
    settings: PolicySettings
    """What the request is decided by."""
    policy: Policy
    """The request's, or the one of the settings."""
    last: Sequence[str] = ()
    """Why each worker is a last resort, which is picked only where no other may be; empty for one
    that answers. Without any entry, all of the pool answer."""


class Stages(NamedTuple):
    """The policies of a pair."""

    prefill: Policy
    decode: Policy
    alone: Policy
    """Of one worker that does both, for want of another."""
    local_tokens: int
    """A prompt of which no more is new stays where it is decoded,"""
    local_share: float
    """and one of which no larger part is."""


class Judge(Protocol):
    """Scores and orders candidates; eligible: a reason for each that can't be picked."""

    def __call__(
        self,
        matched: Matched,
        policy: Policy,
        eligible: Sequence[str],
        kv_distance: Column | None = None,
    ) -> Decision: ...


Eligible = Callable[[Request, Pool], Sequence[str]]
"""Why workers can't take a request with their role, labels and so on; empty where they can."""


def hands_over(heartbeat: Heartbeat) -> bool:
    """Whether a worker can compute a prompt for another one."""
    connected = heartbeat.role == Role.PREFILL or (
        heartbeat.role == Role.BOTH and _connected(heartbeat)
    )
    return connected and can_be_found(heartbeat)


def takes_over(heartbeat: Heartbeat) -> bool:
    """Whether a worker can go on with a prompt that another one has computed."""
    return heartbeat.role == Role.DECODE or (heartbeat.role == Role.BOTH and _connected(heartbeat))


def serves_alone(heartbeat: Heartbeat) -> bool:
    """Whether a worker can compute a prompt and go on with it."""
    return heartbeat.role == Role.BOTH or (
        heartbeat.role == Role.DECODE and heartbeat.engine != "sglang"
    )


def _connected(heartbeat: Heartbeat) -> bool:
    return bool(heartbeat.kv_connector) and heartbeat.engine != "sglang"


@dataclass(frozen=True, slots=True)
class _Halves:
    """What each worker of a pool can be."""

    hands_over: Flags
    takes_over: Flags
    alone: Flags
    kind: npt.NDArray[np.intp]
    """The same number: the same engine and block size, so that one can take over from another."""

    @classmethod
    def of(cls, pool: Pool) -> "_Halves":
        told = [heartbeat_of(source) for source in pool.sources]
        kinds: dict[tuple[str, int], int] = {}
        return cls(
            np.array([hands_over(one) for one in told], np.bool_),
            np.array([takes_over(one) for one in told], np.bool_),
            np.array([serves_alone(one) for one in told], np.bool_),
            np.array(
                [kinds.setdefault((one.engine, one.block_size), len(kinds)) for one in told],
                np.intp,
            ),
        )


class Pairs:
    """Decides about pairs."""

    def __init__(self, further: Further) -> None:
        self._further = further
        self._known: tuple[Pool, _Halves] | None = None
        """Of the pool that was asked last."""

    def decide(self, asked: Matched, stages: Stages, judge: Judge, eligible: Eligible) -> Decision:
        """The decision about who decodes, which tells the one about who computes the prompt."""
        request, pool = asked.request, asked.pool
        halves = self._halves_of(pool)
        decodes = eligible(replace(request, role=Role.DECODE), pool)
        room = asked.table[_FULL] == 0
        takes = halves.takes_over & room & _can(decodes)
        mates = np.bincount(halves.kind[takes], minlength=len(pool))[halves.kind] > 0
        prefills = eligible(replace(request, role=Role.PREFILL, expected_output_tokens=1), pool)
        prefills = _narrowed(prefills, halves.hands_over, HANDS_NOTHING_OVER)
        prefill = judge(asked, stages.prefill, _narrowed(prefills, mates, NOBODY_TAKES_OVER))
        if not prefill.order:
            # Who is full would take it later, which a refusal should tell.
            can = halves.alone | (halves.takes_over & ~room)
            decision = judge(asked, stages.alone, _narrowed(decodes, can, DECODES_ONLY))
            decision.prefill, decision.how = prefill, Prefill.ABSENT
            return decision
        source = prefill.order[0]
        local = _local(asked, halves, stages)
        local[source] = halves.alone[source]  # it would hand over to itself
        fetches = halves.takes_over & (halves.kind == halves.kind[source])
        here = np.zeros(len(pool), np.bool_)
        here[source] = True
        distance = np.where(local, 0.0, self._further.mean_distance(pool, here))
        reasons = _narrowed(decodes, local | fetches, FETCHES_FROM_OTHERS)
        decision = judge(asked, stages.decode, reasons, distance)
        stays = bool(decision.order) and bool(local[decision.order[0]])
        decision.prefill, decision.how = prefill, Prefill.LOCAL if stays else Prefill.REMOTE
        # Whoever comes next must be able to do what the pick was to do.
        able = halves.alone if stays else fetches
        decision.order = [row for row in decision.order if able[row]]
        return decision

    def _halves_of(self, pool: Pool) -> _Halves:
        if self._known is None or self._known[0] is not pool:
            self._known = pool, _Halves.of(pool)
        return self._known[1]


def _local(asked: Matched, halves: _Halves, stages: Stages) -> Flags:
    """Where hardly anything of the prompt would have to be computed."""
    tokens = asked.request.prompt.token_count
    new = tokens - asked.table[_TRUST] * asked.overlaps[1]
    few: Flags = new <= max(stages.local_tokens, stages.local_share * tokens)
    return halves.alone & few


def _can(reasons: Sequence[str]) -> Flags:
    return np.array([not reason for reason in reasons], np.bool_)


def _narrowed(reasons: Sequence[str], can: Flags, otherwise: str) -> list[str]:
    """Reasons, and one more for those that had none and can't."""
    return [
        reason or ("" if able else otherwise)
        for reason, able in zip(reasons, can.tolist(), strict=True)
    ]
