"""Performs the effects of discovery in a router: relays to run, and workers to give no requests."""

from collections.abc import Callable, Collection

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
from router.request.refusal import Refusal


class DiscoveredWorkers:
    """Performs discovery's effects on the core, and answers its questions about workers.

    A drain by command is an operator's: a worker that was held back since its pod was not ready
    gets requests again only where no such drain is in force.
    """

    def __init__(
        self,
        core: RouterCore,
        relays: OwnRelays,
        commands: FleetCommands,
        *,
        clock: Callable[[], float],
        broker: Callable[[], Broker | None],
        completed: Callable[[EngineSettings], EngineSettings],
        on_change: Callable[[], None],
    ) -> None:
        """completed: adds settings from the model's configuration. on_change: called when room may
        have changed.
        """
        self._core = core
        self._relays = relays
        self._commands = commands
        self._clock = clock
        self._broker = broker
        self._completed = completed
        self._on_change = on_change
        self._mine: set[str] = set()
        """Workers whose relays discovery has started, and not left."""
        self._held: frozenset[str] = frozenset()
        self._beating: dict[str, Epoch] = {}
        """Highest epoch of relays that beat, by worker id and by address."""

    def knows(self, worker_id: str) -> bool:
        """Whether a worker's heartbeats come."""
        return worker_id in self._beating or self._commands.removed(worker_id)

    def look(self) -> None:
        self._beating.clear()
        for source in self._core.fleet.view.sources.values():
            heartbeat = source.heartbeat
            if heartbeat is None or not _beats(source):
                continue
            for name in (source.key.worker_id, heartbeat.address):
                self._beating[name] = max(self._beating.get(name, heartbeat.epoch), heartbeat.epoch)

    def running(self, worker_id: str) -> bool:
        return worker_id in self._mine and worker_id in self._relays

    def elsewhere(self, worker_id: str, address: str) -> bool:
        epochs = [self._beating[name] for name in (worker_id, address) if name in self._beating]
        if not self.running(worker_id):
            return bool(epochs) or self._relays.follows(worker_id, address)
        own = self._relays.epoch(worker_id)
        # Its state may be a second old: a higher epoch with its nonce is its own, too.
        return own is not None and any(epoch > own and epoch.nonce != own.nonce for epoch in epochs)

    def others(self) -> Collection[str]:
        return self._core.fleet.replicas.ages_s(self._clock()).keys()

    def removed(self, worker_id: str) -> bool:
        return self._commands.removed(worker_id)

    def access(self, worker_id: str, address: str) -> EngineAccess:
        return self._relays.accesses.of_worker(worker_id, address)

    def start(self, settings: EngineSettings) -> str:
        broker = self._broker()
        if broker is None or not broker.connected:
            return "NATS is away"
        try:
            self._relays.check_room(settings.id)
        except Refusal as error:
            return str(error)
        self._core.fleet.view.pardon(settings.id)  # a pod of a StatefulSet that came back
        self._relays.start(self._completed(settings), registered=False)
        self._mine.add(settings.id)
        return ""

    def leave(self, worker_id: str, reason: str) -> None:
        if self.running(worker_id):
            self._relays.leave(worker_id, reason)
        self._mine.discard(worker_id)

    def forget(self, worker_id: str) -> None:
        self.leave(worker_id, "pod_gone")
        if not self._commands.removed(worker_id):
            self._core.remove(worker_id, TOMBSTONE_S, self._clock())
            self._on_change()

    def hold(self, held: frozenset[str]) -> None:
        drained = self._core.fleet.drained
        stopped = [worker_id for worker_id in held if worker_id not in drained]
        freed = [name for name in self._held - held if not self._commands.drained(name)]
        self._held = held
        for worker_id in stopped:
            self._core.drain(worker_id)
        for worker_id in freed:
            self._core.undrain(worker_id)
        if stopped or freed:
            self._on_change()


def _beats(source: Source) -> bool:
    return source.stream.state is not StreamState.SILENT and not source.heartbeat_overdue
