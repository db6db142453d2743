"""Performs what the discovery of pods decides in a router: runs relays, and keeps requests from
workers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from events.engines.access import EngineAccess
from events.feed.fleet_view import Source
from events.feed.stream import StreamState
from events.plane.broker import Broker
from events.plane.facts import Epoch
from events.plane.settings import EngineSettings
from router.cluster.children.own_relays import OwnRelays
from router.cluster.discovery.followed import TOMBSTONE_S
from router.cluster.replicas.fleet_commands import FleetCommands
from router.decide.core.core import RouterCore


@dataclass(kw_only=True, eq=False)
class DiscoveredWorkers:
    """Performs discovery's effects on the core, and answers its questions about workers.

    A worker that got no requests while its pod was not ready gets requests again when it is, unless
    an operator's drain of the worker is in force.
    """

    core: RouterCore
    relays: OwnRelays
    commands: FleetCommands
    clock: Callable[[], float]
    broker: Callable[[], Broker | None]
    completed: Callable[[EngineSettings], EngineSettings]
    """Adds settings from the model's configuration."""
    on_change: Callable[[], None]
    """Called when a worker may have room that it had not before."""
    _mine: set[str] = field(default_factory=set)
    """Workers whose relays discovery has started, and not left."""
    _held: frozenset[str] = frozenset()
    _beating: dict[str, Epoch] = field(default_factory=dict)
    """Highest epoch of relays that beat, by worker id and by address."""

    def knows(self, worker_id: str) -> bool:
        """Whether a worker's heartbeats come, or an operator has removed the worker."""
        return worker_id in self._beating or self.commands.removed(worker_id)

    def look(self) -> None:
        self._beating.clear()
        for source in self.core.fleet.view.sources.values():
            heartbeat = source.heartbeat
            if heartbeat is None or not _beats(source):
                continue
            for name in (source.key.worker_id, heartbeat.address):
                self._beating[name] = max(self._beating.get(name, heartbeat.epoch), heartbeat.epoch)

    def running(self, worker_id: str) -> bool:
        return worker_id in self._mine and worker_id in self.relays

    def elsewhere(self, worker_id: str, address: str) -> bool:
        epochs = [self._beating[name] for name in (worker_id, address) if name in self._beating]
        if not self.running(worker_id):
            return bool(epochs) or self.relays.follows(worker_id, address)
        own = self.relays.epoch(worker_id)
        # Its state may be a second old: a higher epoch with its nonce is its own, too.
        return own is not None and any(epoch > own and epoch.nonce != own.nonce for epoch in epochs)

    def others(self) -> Collection[str]:
        return self.core.fleet.replicas.ages_s(self.clock()).keys()

    def removed(self, worker_id: str) -> bool:
        return self.commands.removed(worker_id)

    def access(self, worker_id: str, address: str) -> EngineAccess:
        return self.relays.accesses.of_worker(worker_id, address)

    def start(self, settings: EngineSettings) -> str:
        broker = self.broker()
        if broker is None or not broker.connected:
            return "NATS is away"
        self.relays.check_room(settings.id)
        self.core.fleet.view.pardon(settings.id)  # a pod of a StatefulSet that came back
        self.relays.start(self.completed(settings), registered=False)
        self._mine.add(settings.id)
        return ""

    def leave(self, worker_id: str, reason: str) -> None:
        if self.running(worker_id):
            self.relays.leave(worker_id, reason)
        self._mine.discard(worker_id)

    def forget(self, worker_id: str) -> None:
        self.leave(worker_id, "pod_gone")
        if not self.commands.removed(worker_id):
            self.core.remove(worker_id, TOMBSTONE_S, self.clock())
            self.on_change()

    def hold(self, held: frozenset[str]) -> None:
        drained = self.core.fleet.drained
        stopped = [worker_id for worker_id in held if worker_id not in drained]
        freed = [name for name in self._held - held if not self.commands.drained(name)]
        self._held = held
        for worker_id in stopped:
            self.core.drain(worker_id)
        for worker_id in freed:
            self.core.undrain(worker_id)
        if stopped or freed:
            self.on_change()


def _beats(source: Source) -> bool:
    return source.stream.state is not StreamState.SILENT and not source.heartbeat_overdue
