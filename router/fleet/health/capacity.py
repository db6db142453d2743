"""Workers' capacity where no setting names it: learned from samples of load, and from how
requests end. Pure.

    estimated slots = the most requests that samples showed running, once AGREEING samples had that
                      number running while others waited; until then the largest estimate of a
                      worker that is configured alike. Picks may exceed it by one request, which
                      shows an estimate that is too low
    block share     = share of a worker's KV blocks that picks may promise: lower with each request
                      that the engine preempts, higher with each that it serves to its end

Neither is certain, so that both only put a worker *over its estimate*: it gets no requests while
another worker of its pool has room. When none has, requests wait, and at the end of their wait go
to such a worker; those that may not wait go at once. None is refused by a learned bound.

The block share is like Chitu's kvcache_block_threshold, but moves in small steps where Chitu halves
it and restores it at once: a router sees preemptions a second late, and several at once.

Laws:
- estimated slots are never fewer than requests were seen running at once in that epoch;
- no estimate before two samples agree, of the worker or of one that is configured alike, and none
  for a worker whose slots are known;
- the block share is BLOCK_PERCENT_MIN to 100 percent, and 100 where no request was preempted;
- what was learned of a worker is forgotten with the worker, and when its epoch ends.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import nan
from operator import attrgetter
from typing import NamedTuple

from events.plane.facts import Epoch, Heartbeat
from indexer.identity import WorkerKey
from router.config.settings.health_settings import CapacitySettings

AGREEING = 2
"""Samples that must show the same number of running requests while others wait."""
BLOCK_PERCENT_MAX = 90
"""Percentage of a worker's KV blocks in use, from which on waiting requests may wait for blocks and
not for slots. A prompt mostly needs a few percent of a cache; a larger one that waits for blocks
makes a wrong estimate, which the next request corrects."""
PREEMPTION_PERCENT = 5.0
"""Percentage of a worker's KV blocks by which a preempted request lowers what picks promise."""
SERVED_PERCENT = 1.0
"""Percentage by which each request that is served to its end raises the share that picks promise: a
worker that preempts less than one request in five is used in full, and ten preemptions at once
reach the bound."""
BLOCK_PERCENT_MIN = 50
"""Percentage of a worker's KV blocks that picks promise however many requests it preempts. Chitu's
first step, half of the cache; Chitu goes on halving, but decides about running requests, too."""


class Room(NamedTuple):
    """The part of a worker that picks may use. NaN: unknown."""

    slots: float
    """Requests that the worker may have at once: slots_known, or one more than the estimate."""
    slots_known: float
    """Requests that the worker can run at once, as its engine or the configuration says."""
    blocks: float
    """Canonical KV blocks that picks may promise."""
    prefill_tokens: float
    """Bound on prompt tokens that wait to be computed: a worker at the bound has no room. NaN: no
    bound."""
    prefills: float
    """Bound on requests of this router whose prompts the worker still computes. NaN: no bound."""
    decodes: float
    """Bound on requests of this router whose prompts are computed. NaN: no bound."""


class Kind(NamedTuple):
    """Fields of a heartbeat: workers for which all of them are equal count as configured alike."""

    model: str
    engine: str
    engine_version: str
    max_model_len: int
    block_size: int
    total_blocks: int | None
    role: str

    @classmethod
    def of(cls, heartbeat: Heartbeat) -> "Kind":
        return cls(*_OF_HEARTBEAT(heartbeat))


_OF_HEARTBEAT = attrgetter(*Kind._fields)


@dataclass(slots=True)
class _Learned:
    """Capacity learned of one worker in one epoch."""

    epoch: Epoch
    kind: Kind
    preemptions: int
    """Requests preempted since the engine's start, by its last sample."""
    sampled_at_s: float | None = None
    """Time of the last sample, on the relay's clock."""
    running_max: int = 0
    agreeing: int = 0
    """Samples with running_max requests running while others wait for a slot; AGREEING at most."""
    block_share: float = 1.0

    @property
    def slots(self) -> int | None:
        return self.running_max if self.agreeing >= AGREEING else None

    def on_sample(self, heartbeat: Heartbeat) -> None:
        """Learns from a heartbeat's sample of load; a sample seen before changes nothing."""
        if heartbeat.sampled_at_s == self.sampled_at_s:
            return
        self.sampled_at_s = heartbeat.sampled_at_s
        preempted = max(0, heartbeat.preemptions - self.preemptions)
        self.preemptions = heartbeat.preemptions
        fallen = self.block_share - preempted * PREEMPTION_PERCENT / 100
        self.block_share = max(BLOCK_PERCENT_MIN / 100, min(1.0, fallen))
        if heartbeat.running > self.running_max:
            self.running_max, self.agreeing = heartbeat.running, 0
        if heartbeat.running == self.running_max and not preempted and _waits_for_slots(heartbeat):
            self.agreeing = min(AGREEING, self.agreeing + 1)


class Capacities:
    """The learned capacities of all workers."""

    def __init__(
        self, settings: CapacitySettings, on_kind: Callable[[], None] = lambda: None
    ) -> None:
        """on_kind: called when the largest estimate of a Kind has changed, and with it the capacity
        of those of its workers that lack an own estimate."""
        self._settings = settings
        self._on_kind = on_kind
        self._learned: dict[WorkerKey, _Learned] = {}
        self._of_kind: dict[Kind, int] = {}
        """Kind -> the largest estimate of slots of its workers."""
        self.preempted: set[WorkerKey] = set()
        """Workers whose block share is below 1: `on_served` must be called for each request that
        they serve."""

    def __len__(self) -> int:
        return len(self._learned)

    def reconfigure(self, settings: CapacitySettings) -> None:
        """Puts other settings in force."""
        self._settings = settings

    @property
    def bounds_phases(self) -> bool:
        """Whether settings bound the requests of a worker that are in prefill or in decode."""
        settings = self._settings
        return bool(
            settings.prefill_tokens_max
            or settings.prefill_requests_max
            or settings.decode_requests_max
        )

    def on_heartbeat(self, key: WorkerKey, heartbeat: Heartbeat) -> bool:
        """Learns from a heartbeat. Returns whether the worker's capacity may have changed."""
        if heartbeat.sampled_at_s is None:
            return False
        known, kind = self._learned.get(key), Kind.of(heartbeat)
        if known is None or known.epoch != heartbeat.epoch:
            # Earlier preemptions say nothing of the present.
            self.on_forgotten([key])
            known = self._learned[key] = _Learned(heartbeat.epoch, kind, heartbeat.preemptions)
        before = known.kind, known.slots, known.running_max, known.block_share
        known.kind = kind  # an engine's samples may come before what it says of itself
        known.on_sample(heartbeat)
        if known.block_share < 1.0:
            self.preempted.add(key)
        if (kind, known.slots) != before[:2] and (known.slots or before[1]):
            for changed in dict.fromkeys((before[0], kind)):
                self._weigh(changed)
        return before != (kind, known.slots, known.running_max, known.block_share)

    def on_served(self, key: WorkerKey) -> bool:
        """Learns from a request that was served to its end. Returns whether the worker's capacity
        changed.
        """
        known = self._learned.get(key)
        if known is None or known.block_share >= 1.0:
            self.preempted.discard(key)
            return False
        risen = known.block_share + SERVED_PERCENT / 100
        known.block_share = min(1.0, risen)
        return True

    def on_forgotten(self, workers: Iterable[WorkerKey]) -> None:
        """Forgets workers that left the fleet view."""
        for key in workers:
            self.preempted.discard(key)
            known = self._learned.pop(key, None)
            if known is not None and known.slots is not None:
                self._weigh(known.kind)

    def slots(self, key: WorkerKey, heartbeat: Heartbeat) -> int | None:
        """Estimated slots of a worker; None: its slots are configured or reported, or can't be
        estimated yet.

        A worker without an estimate of its own has the largest of workers configured alike, so that
        it is not preferred to them as if it had no queue.
        """
        known = self._of(key, heartbeat)
        if known is None or heartbeat.total_slots:
            return None
        if known.slots is None:
            of_kind = self._of_kind.get(known.kind, 0)
            return of_kind if of_kind and known.running_max <= of_kind else None
        return known.slots

    def block_share(self, key: WorkerKey, heartbeat: Heartbeat) -> float:
        """Share of a worker's KV blocks that picks may reserve, BLOCK_PERCENT_MIN / 100 to 1."""
        known = self._of(key, heartbeat)
        return 1.0 if known is None else known.block_share

    def room(self, key: WorkerKey, heartbeat: Heartbeat) -> Room:
        """Slots and blocks of a worker that picks may use."""
        slots_known = heartbeat.total_slots or nan
        estimated = self.slots(key, heartbeat)
        return Room(
            # Without the one more, nothing could show that an estimate is too low.
            slots_known if estimated is None else estimated + 1,
            slots_known,
            (heartbeat.total_blocks or nan) * self.block_share(key, heartbeat),
            self._settings.prefill_tokens_max or nan,
            self._settings.prefill_requests_max or nan,
            self._settings.decode_requests_max or nan,
        )

    def _weigh(self, kind: Kind) -> None:
        """Finds the largest estimate of a kind again, after that of one of its workers changed."""
        slots = [known.slots for known in self._learned.values() if known.kind == kind]
        largest = max((count for count in slots if count is not None), default=0)
        if largest != self._of_kind.get(kind, 0):
            if largest:
                self._of_kind[kind] = largest
            else:
                del self._of_kind[kind]
            self._on_kind()

    def _of(self, key: WorkerKey, heartbeat: Heartbeat) -> _Learned | None:
        known = self._learned.get(key)
        return known if known is not None and known.epoch == heartbeat.epoch else None


def _waits_for_slots(heartbeat: Heartbeat) -> bool:
    """Whether a sample's waiting requests wait for slots, as far as it shows: not for KV blocks,
    and not for a KV cache that another worker has to send."""
    if not (heartbeat.running and heartbeat.waiting and heartbeat.total_blocks):
        return False
    if heartbeat.used_blocks is None or heartbeat.role != "both" or heartbeat.kv_connector:
        return False
    return heartbeat.used_blocks < heartbeat.total_blocks * BLOCK_PERCENT_MAX / 100
