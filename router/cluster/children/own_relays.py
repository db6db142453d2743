"""The relays of this router, in one child process: for configured workers, and for registered ones.

Laws:
- an error of a relay ends that relay alone: it is counted, shown as a warning of its worker, and
  the relay is started again after a back-off;
- the end of the child process is such an error of each relay in it; the first relay that is started
  again starts the next child;
- a removal of a worker stops its relay here; a command given before the relay began does not;
- a registered relay whose engine has never answered for UNHEARD_S is stopped, so that mistyped
  addresses don't fill the room for relays for good.
"""

import asyncio
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from typing_extensions import override

from events.plane.facts import Epoch
from events.plane.settings import EngineSettings, shared_socket
from events.plane.supervisor import Supervisor
from router.cluster.children.relay_messages import (
    BrokerStatus,
    LookAtModels,
    Opening,
    RelayState,
    RelayStatus,
    Stop,
)
from router.cluster.children.relay_process import RelayProcess
from router.net.keys.engine_accesses import EngineAccesses
from router.request.refusal import Reason, Refusal

RELAYS_MAX = 256
"""Relays of one router; larger fleets run them beside their engines."""
UNHEARD_S = 1800.0
"""Seconds after which the relay of a registered engine that never answered is stopped; a large
model is loaded in less."""
STOP_S = 5.0
"""Longest wait for relays when the router stops; a relay left then ends with its process. A relay
that can end does so in a turn or two of the event loop."""
PROGRAM: tuple[str, ...] = (sys.executable, "-m", "router.app.programs.relay_child")

log = logging.getLogger("kvroute")


class RelayFailed(RuntimeError):
    """A relay, or the process in which it ran, ended without a command."""


@dataclass(eq=False, slots=True)
class _Kept:
    """One worker's relay, through all its starts."""

    settings: EngineSettings
    registered: bool
    """Whether a call registered the worker; False: configuration or discovery names it."""
    began_at_s: float
    supervisor: Supervisor
    number: int | None = None
    """Number of the start of the relay that runs; None between two relays."""
    answered: bool = False
    """Whether its engine has ever answered."""


class OwnRelays:
    """The relays of one router process."""

    def __init__(
        self,
        opening: Callable[[], Opening],
        *,
        clock: Callable[[], float],
        rng: random.Random,
        accesses: EngineAccesses | None = None,
    ) -> None:
        """opening: first message to the child process. accesses: credentials for engines; None:
        they need none.
        """
        self.accesses = accesses or EngineAccesses()
        self._opening = opening
        self._clock = clock
        self._rng = rng
        self._process: RelayProcess | None = None
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._lost: BrokerStatus | None = None
        """Sums of the NATS counts of children that have ended; None: no child has ended."""
        self._kept: dict[str, _Kept] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        """Relays on their way out, by worker id."""
        self.ended: Counter[str] = Counter()
        """Relays stopped for good before the router was, by reason."""
        self.failures = 0
        """Times that a relay failed and was, or will be, started again."""

    @override
    def __repr__(self) -> str:
        return f"<OwnRelays {', '.join(sorted(self._kept)) or 'none'}>"

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._kept

    @property
    def pid(self) -> int | None:
        """Process id of the child; None: none was started yet."""
        return self._process.pid if self._process is not None else None

    @property
    def broker(self) -> BrokerStatus | None:
        """The relays' connection to NATS, with sums since this router's start; None: there was none
        yet.
        """
        current = self._process.broker if self._process is not None else None
        if current is None or self._lost is None:
            return current or self._lost
        return current.added_to(self._lost)

    def follows(self, worker_id: str, address: str) -> bool:
        """Whether a worker id, or the engine at its address by another id, has a relay here."""
        addresses = (kept.settings.address for kept in self._kept.values())
        return worker_id in self._kept or address in addresses

    def running(self) -> list[RelayStatus]:
        """Counts of the relays that run, at most a second old."""
        return self._process.relays() if self._process is not None else []

    def trouble(self, worker_id: str) -> str:
        """Sentence that says why a worker's relay failed lately; empty when it did not."""
        kept = self._kept.get(worker_id)
        errors = "; ".join(kept.supervisor.troubles().values()) if kept is not None else ""
        return f"its relay in this router failed and starts again: {errors}" if errors else ""

    def check_room(self, worker_id: str) -> None:
        """Raises Refusal when a relay for a worker can't be added."""
        if worker_id in self._kept:
            raise Refusal(
                Reason.WORKER_EXISTS, f"a relay for worker {worker_id!r} runs here already"
            )
        if len(self._kept) >= RELAYS_MAX:
            raise Refusal(
                Reason.INVALID_FIELD,
                f"{RELAYS_MAX} relays run in this router, which is its bound; run `kvroute relay`"
                " beside the engine",
            )

    def check_sockets(self, settings: EngineSettings) -> None:
        """Raises Refusal for an engine that shares a socket with one that has a relay here."""
        running = [kept.settings for kept in self._kept.values()]
        if (twice := shared_socket([*running, settings])) and twice[0] == len(running):
            field, _, _ = twice[1].partition(": ")
            raise Refusal(Reason.INVALID_FIELD, twice[1], metadata={"field": field})

    def start(self, settings: EngineSettings, *, registered: bool) -> None:
        """Runs a relay from now on, restarted after failures; the connection to NATS must have been
        opened.
        """
        supervisor = Supervisor(f"worker {settings.id}", self._rng, on_trouble=self._failed)
        kept = _Kept(settings, registered, self._clock(), supervisor)
        self._kept[settings.id] = kept
        _ = supervisor.keep(lambda: self._run(kept), "relay")

    def on_removed(self, worker_id: str, at_s: float) -> None:
        """Stops the relay of a worker that a command given at at_s removed."""
        kept = self._kept.get(worker_id)
        if kept is not None and kept.began_at_s <= at_s:
            self._end(kept, "removed")

    def epoch(self, worker_id: str) -> Epoch | None:
        """Epoch in which a worker's relay publishes, at most a second old; None: no relay of it
        runs.
        """
        kept = self._kept.get(worker_id)
        state = self._state(kept) if kept is not None else None
        return state.epoch if state is not None else None

    def look_at_models(self, worker_id: str) -> None:
        """Has a worker's relay read its engine's list of models again, since the engine lacked a
        model that it had listed.
        """
        kept = self._kept.get(worker_id)
        if kept is not None and kept.number is not None and self._process is not None:
            self._process.send(LookAtModels(kept.number))

    def leave(self, worker_id: str, reason: str) -> None:
        """Stops a worker's relay for good, if one runs."""
        if (kept := self._kept.get(worker_id)) is not None:
            self._end(kept, reason)

    def tick(self) -> None:
        """Stops registered relays of engines that never answered."""
        now_s = self._clock()
        for kept in list(self._kept.values()):
            state = self._state(kept)
            kept.answered |= state is not None and state.answered
            if kept.registered and not kept.answered and now_s - kept.began_at_s >= UNHEARD_S:
                log.warning(
                    "the relay for worker %s is stopped: its engine has not answered since it was"
                    " registered, %.0f s ago; register it again once it runs",
                    kept.settings.id,
                    now_s - kept.began_at_s,
                )
                self._end(kept, "never_answered")

    async def stop(self) -> None:
        """Stops all relays, within STOP_S, and then their process."""
        ends = set(self._closing.values())
        for kept in self._kept.values():
            name = f"end of relay {kept.settings.id}"
            ends.add(asyncio.create_task(kept.supervisor.close(), name=name))
        self._kept.clear()
        if ends:
            _, late = await asyncio.wait(ends, timeout=STOP_S)
            for task in late:
                log.error("%s: not within %g s; its process is ended", task.get_name(), STOP_S)
        if self._process is not None:
            await self._process.stop()
        await asyncio.gather(*ends)

    def _end(self, kept: _Kept, reason: str) -> None:
        """Stops a relay for good; its worker id is free at once."""
        worker_id = kept.settings.id
        del self._kept[worker_id]
        self.ended[reason] += 1
        self.accesses.forget(worker_id)
        log.info("the relay for worker %s is stopped: %s", worker_id, reason.replace("_", " "))
        closing = _closed_after(self._closing.get(worker_id), kept.supervisor)
        task = asyncio.create_task(closing, name=f"end of relay {worker_id}")
        self._closing[worker_id] = task
        task.add_done_callback(lambda done: self._closed(worker_id, done))

    def _closed(self, worker_id: str, task: asyncio.Task[None]) -> None:
        if self._closing.get(worker_id) is task:
            del self._closing[worker_id]

    async def _run(self, kept: _Kept) -> None:
        """Runs a relay until it is cancelled; raises the error by which the relay ended."""
        settings = kept.settings
        if (closing := self._closing.get(settings.id)) is not None:
            await asyncio.wait([closing])  # two relays would speak for one engine
        self.accesses.of_engine(settings)  # raises for files that can't be used
        process = await self._up()
        number = kept.number = next(self._numbers)
        ended = process.begin(number, settings)
        try:
            error = await asyncio.shield(ended)
        except asyncio.CancelledError:
            process.send(Stop(number))
            if error := await asyncio.shield(ended):  # its worker's next one begins again
                self.failures += 1
                log.warning("the relay for worker %s failed at its end: %s", settings.id, error)
            raise
        finally:
            kept.number = None
        raise RelayFailed(error or "the relay ended")

    async def _up(self) -> RelayProcess:
        """The child process, started if none runs; raises OSError when it can't be started."""
        async with self._starting:
            if self._process is None or self._process.ended:
                process = await RelayProcess.start(PROGRAM, self._opening())
                self._process, self._lost = process, self.broker
            return self._process

    def _state(self, kept: _Kept) -> RelayState | None:
        """State of the relay that runs; None between two of them, and until its first status."""
        if kept.number is None or self._process is None:
            return None
        return self._process.states.get(kept.number)

    def _failed(self, _name: str, _error: Exception) -> None:
        self.failures += 1


async def _closed_after(earlier: asyncio.Task[None] | None, supervisor: Supervisor) -> None:
    """Ends a relay that may not have begun, since an earlier one of its worker is still ending."""
    await supervisor.close()
    if earlier is not None:
        await asyncio.wait([earlier])
