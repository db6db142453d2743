"""One router replica in virtual time: the real decision core, view and index, and its inbox.

Messages arrive in the order of their times, those of a worker in the order in which they were sent.
They are handled when the replica next decides or ticks, with the same result as at their arrival.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from enum import IntEnum

import msgspec
from typing_extensions import override

from events.feed.fleet_view import FleetView, Pull
from events.feed.replicas import Teller
from events.plane.facts import Epoch
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.config.settings.fleet_settings import FleetSettings, IndexSettings
from router.decide.copies.hot_prefixes import HotPrefixes, Means, carried
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.request.refusal import Reason, Refusal
from simulator.engines.cost_model import Distance, PrefillChunk
from simulator.world.options import RunOptions

OnPulls = Callable[["VirtualRouter", list[Pull]], None]


def copy_means(options: RunOptions) -> Means:
    """The times of copies between engines, from their cost model."""
    cost = options.scheduler.cost
    return carried(
        lambda tokens: cost.step_s([PrefillChunk(tokens, 0)]),
        lambda tokens, distance: cost.transfer_s(tokens, Distance(distance)),
    )


class Plane(IntEnum):
    """The subject of a message to a router."""

    FACTS = 0
    LOAD = 1
    INFLIGHT = 2


class VirtualRouter:
    """A router replica. on_pulls: called with the recoveries to perform. now_s: the run's clock."""

    def __init__(
        self, number: int, options: RunOptions, on_pulls: OnPulls, now_s: Callable[[], float]
    ) -> None:
        self.number = number
        self._now_s = now_s
        self.rng = random.Random(f"{options.seed}/ties of {number}")
        self._options = options
        self._on_pulls = on_pulls
        self._life = 0
        self._sent = 0
        self._begin()

    def restart(self) -> None:
        """Restarts the router as a new process, without workers and reservations; waiting requests
        are refused."""
        waiting, self._life = self.admission, self._life + 1
        self._begin()
        waiting.close(Refusal(Reason.DRAINING, "the router restarts"), self._now_s())

    def _begin(self) -> None:
        fleet, index, routing = FleetSettings(), IndexSettings(), self._options.routing
        self.view = FleetView(
            NativeIndex(index.bytes_max(), index.blocks_max()),
            workers_max=fleet.workers_max,
            predicted_ttl_s=self._options.predicted_ttl_s,
            approximate_ttl_s=routing.approximate_ttl_s,
        )
        replica = f"replica-{self.number}.{self._life}"
        copies = msgspec.structs.replace(routing.hot_prefixes, enabled=self._options.hot_prefixes)
        self.core = RouterCore(
            self.view,
            msgspec.structs.replace(
                routing,
                policy=self._options.policy,
                policy_per_request=True,
                hot_prefixes=copies,
            ),
            replica=replica,
            rng=self.rng,
            random_bytes=random.Random(replica).randbytes,
        )
        self.hot = HotPrefixes(self.core.fleet, copies, copy_means(self._options))
        self.core.observe_picks(self.hot, self.hot.enabled)
        rng = random.Random(f"{replica}/queue")
        self.admission = Admission(self.core, self._options.queue, rng)
        self.teller = Teller(self.core.replica, Epoch(self._life, self.number))
        """Writes the messages about reservations to the other replicas."""
        self._inbox: list[tuple[float, int, Plane, WorkerKey, bytes]] = []
        self._last_s: dict[WorkerKey, float] = {}
        """Worker or replica -> arrival of its last message"""

    @override
    def __repr__(self) -> str:
        return f"<VirtualRouter {self.number} {self.view!r}, {len(self._inbox)} messages under way>"

    def send(self, plane: Plane, key: WorkerKey, messages: Sequence[bytes], when_s: float) -> None:
        """Adds messages that arrive at when_s, but not before the same sender's earlier messages.
        key: the worker that sends them, or any fixed key for a replica."""
        when_s = self._last_s[key] = max(when_s, self._last_s.get(key, 0.0))
        for message in messages:
            self._sent += 1
            heapq.heappush(self._inbox, (when_s, self._sent, plane, key, message))

    def dispatch(self) -> None:
        """Gives the waiting requests their turns, as far as workers have room now."""
        while len(self.admission) and self.admission.dispatch(self._now_s()):
            pass

    def hear(self, now_s: float) -> None:
        """Handles all messages that have arrived by now."""
        inbox = self._inbox
        while inbox and inbox[0][0] <= now_s:
            when_s, _, plane, key, message = heapq.heappop(inbox)
            match plane:
                case Plane.FACTS:
                    pulls = self.view.on_stream(key, message, when_s)
                    if pulls:
                        self._on_pulls(self, pulls)
                case Plane.LOAD:
                    if self.view.on_heartbeat(key, message, when_s) is not None:
                        self.core.on_heartbeat(key, when_s)
                case Plane.INFLIGHT:
                    self.core.on_inflight(message, when_s)

    def tick(self, now_s: float) -> None:
        """Does a router's periodic work, once a second: that of its feed and of its service."""
        self.hear(now_s)
        forgotten = self.view.tick(now_s)
        if forgotten:
            self.core.on_forgotten(forgotten, now_s)
        effects = self.core.on_time(now_s)
        while self.core.behind(now_s):
            self.core.catch_up(now_s)
        if effects.resyncs:
            self._on_pulls(self, effects.resyncs)
        self.dispatch()
