"""The network between relays and routers: delayed and lost messages, and recoveries.

relay -> facts, beats, heartbeats -> routers
router -> Pull -> relay's ring or snapshot -> router
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from events.feed.fleet_view import Pull
from indexer.identity import WorkerKey
from simulator.world.options import RunOptions
from simulator.world.timeline import Timeline
from simulator.world.virtual_relay import VirtualRelay
from simulator.world.virtual_router import Plane, VirtualRouter

TELL_S = 0.02
"""Seconds between a replica's messages to others, as in router/cluster/replicas/replica_link.py."""
LOOK_S = 0.05
"""Seconds between turns of requests that wait, as in router/app/processes/router_clock.py."""
_PULL_JITTER_S = 0.2
"""Jitter of pulls, seconds, as in the feed, so that routers' requests don't come all at once."""
_PULL_TIMEOUT_S = 2.0


class VirtualNetwork:
    """Delivers messages to every router. relay_of: the relay of a worker, None while it is down."""

    def __init__(
        self,
        timeline: Timeline,
        options: RunOptions,
        counters: Counter[str],
        relay_of: Callable[[WorkerKey], VirtualRelay | None],
    ) -> None:
        self.loss = options.event_loss
        self.routers = [
            VirtualRouter(number, options, self.ask, lambda: timeline.now_s)
            for number in range(options.replicas)
        ]
        self._timeline = timeline
        self._delay_s = options.event_delay_s
        self._jitter_s = options.event_jitter_s
        self._counters = counters
        self._relay_of = relay_of
        self._rng = random.Random(f"{options.seed}/network")
        self._tells = options.inflight and options.replicas > 1
        self._telling: set[int] = set()
        """Routers that send a message to other replicas at the end of this TELL_S."""
        self._looking: set[int] = set()
        """Routers whose waiting requests have their turns at the end of this LOOK_S."""
        self._pulls: dict[tuple[int, WorkerKey], Pull] = {}
        """(router, worker) -> the recovery under way"""

    def delay_s(self) -> float:
        """Seconds of the next message's delay, drawn if there is a jitter."""
        if not self._jitter_s:
            return self._delay_s
        return self._delay_s + self._rng.uniform(-self._jitter_s, self._jitter_s)

    def send(self, key: WorkerKey, plane: Plane, messages: Iterable[bytes], delay_s: float) -> None:
        """Publishes a relay's messages to all routers; each router loses some of them by chance."""
        sent = list(messages)
        for router in self.routers:
            arrived = sent
            if self.loss:
                arrived = [message for message in sent if self._rng.random() >= self.loss]
                self._counters["messages_lost"] += len(sent) - len(arrived)
            if arrived:
                router.send(plane, key, arrived, self._timeline.now_s + delay_s)

    def reserved(self, router: VirtualRouter) -> None:
        """Plans a router's message to the other replicas, since its reservations or its waiting
        requests may have changed."""
        if self._tells and router.number not in self._telling:
            self._telling.add(router.number)
            when_s = (self._timeline.now_s // TELL_S + 1) * TELL_S
            self._timeline.at(when_s, partial(self._tell, router))

    def restart(self, number: int) -> None:
        """Restarts a router; its recoveries under way are dropped."""
        self.routers[number].restart()
        for pull in [pull for pull in self._pulls if pull[0] == number]:
            del self._pulls[pull]

    def ask(self, router: VirtualRouter, pulls: Iterable[Pull]) -> None:
        """Sends a router's recovery requests, at most one a worker at a time."""
        for pull in pulls:
            self._pulls[router.number, pull.worker] = pull
            self._counters["recoveries_asked"] += 1
            wait_s = self._rng.random() * _PULL_JITTER_S
            self._timeline.at(self._timeline.now_s + wait_s, partial(self._answer, router, pull))

    def _tell(self, router: VirtualRouter) -> None:
        now_s = self._timeline.now_s
        self._telling.discard(router.number)
        demand = router.admission.fleet_turns.demand(now_s)
        if demand and router.number not in self._looking:
            self._looking.add(router.number)
            self._timeline.at(now_s + LOOK_S, partial(self._look, router))
        message = router.teller.message(router.core.fleet.loads, now_s, demand=demand)
        if message is None:
            return
        for replica in self.routers:
            if replica is not router and (not self.loss or self._rng.random() >= self.loss):
                key, when_s = WorkerKey(router.core.replica, 0), now_s + self.delay_s()
                replica.send(Plane.INFLIGHT, key, [message], when_s)
                if len(replica.admission):
                    self._timeline.at(when_s, partial(self._heard, replica))

    def _look(self, router: VirtualRouter) -> None:
        """Gives a router's waiting requests their turns every LOOK_S: room that the other replicas
        leave may have been there for long enough."""
        self._looking.discard(router.number)
        if len(router.admission):
            self._looking.add(router.number)
            self._timeline.at(self._timeline.now_s + LOOK_S, partial(self._look, router))
            self._heard(router)

    def _heard(self, router: VirtualRouter) -> None:
        """Reads the messages that have arrived at a router, and gives its waiting requests their
        turns."""
        router.hear(self._timeline.now_s)
        router.dispatch()

    def _answer(self, router: VirtualRouter, pull: Pull) -> None:
        relay, now_s = self._relay_of(pull.worker), self._timeline.now_s
        if relay is None or self._rng.random() < self.loss:
            then = partial(router.view.on_pull_failed, pull, "no answer")
            self._timeline.at(now_s + _PULL_TIMEOUT_S, partial(self._end, router, pull, then))
            return
        then = partial(router.view.on_pull_failed, pull, "ring too short")
        if pull.from_seq is None:
            then = partial(router.view.on_snapshot, pull.worker, *relay.snapshot())
        elif (messages := relay.ring(pull.from_seq)) is not None:
            then = partial(router.view.on_ring, pull.worker, relay.outbox.epoch, messages)
        self._timeline.at(now_s + self.delay_s(), partial(self._end, router, pull, then))

    def _end(self, router: VirtualRouter, pull: Pull, then: Callable[[float], list[Pull]]) -> None:
        now_s = self._timeline.now_s
        router.hear(now_s)
        if self._pulls.get((router.number, pull.worker)) is pull:  # no newer recovery
            del self._pulls[router.number, pull.worker]
            self.ask(router, then(now_s))
