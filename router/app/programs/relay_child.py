"""The child process that runs a router's relays: `python -m router.app.programs.relay_child`, which
only a router starts, with its socket as descriptor 0.

It ends with the router: by SIGTERM, which Linux sends when the router dies, or by the end of the
socket. Messages: router/cluster/children/relay_messages.py.
"""

import asyncio
import logging
import random
import signal
import socket
from contextlib import suppress
from functools import partial

from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.settings import EngineSettings
from events.plane.together import together
from events.relay.relay import Relay
from router.app.cli.run import run
from router.app.processes.logs import set_up
from router.cluster.children.relay_messages import (
    COMMANDS,
    BrokerStatus,
    Ended,
    LookAtModels,
    Opening,
    RelayState,
    Start,
    Status,
    Stop,
    encoded_counts,
    framed,
    read,
)
from router.net.keys.engine_accesses import EngineAccesses
from router.net.keys.followed import Followed

STATUS_S = 1.0
RELAY_STOP_S = 10.0
"""Longest time in seconds for the end of one relay; one that takes longer counts as failed."""

log = logging.getLogger("kvroute")


class RelayChild:
    """Runs the relays of one router, in a child process of it."""

    def __init__(self, opening: Opening, writer: asyncio.StreamWriter) -> None:
        self._fleet = opening.fleet
        self._writer = writer
        self._broker = Broker(opening.nats, opening.url, opening.name)
        self._connected = asyncio.Event()
        self._accesses = EngineAccesses(opening.engines)
        self._own_numbers = opening.engines.numbers
        self._followed = Followed()
        self._followed.add("engine_key", self._accesses)
        self._rng = random.Random()
        self._relays: dict[int, Relay] = {}
        """Running relays, by the number of their Start message."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Obeys the router's commands until the router closes its end of the socket. Raises errors
        that are a fault of this process, which ends then."""
        try:
            await together(
                self._obey(reader), self._connect(), self._followed.run(), self._report()
            )
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._broker.close()

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                match await read(reader, COMMANDS):
                    case Start(number, settings) as start:
                        task = asyncio.create_task(self._run(settings, number), name=settings.id)
                        self._tasks[number] = task
                        # Not in the task, which may be cancelled before its first step.
                        task.add_done_callback(partial(self._ended, start))
                    case Stop(number) if number in self._tasks:
                        self._tasks[number].cancel()
                    case LookAtModels(number) if number in self._relays:
                        self._relays[number].look_at_models()

    async def _connect(self) -> None:
        await self._broker.connect()
        self._connected.set()
        await asyncio.Event().wait()  # it looks after its own connection

    async def _run(self, settings: EngineSettings, number: int) -> None:
        """Runs one relay until it is cancelled, or can't start."""
        await self._connected.wait()
        relay = Relay(
            settings,
            self._broker,
            fleet=self._fleet,
            clock=unix_now,
            rng=self._rng,
            access=self._accesses.of_engine(settings),
            own_numbers=self._own_numbers,
        )
        try:
            self._relays[number] = relay
            await relay.start()
            self._send_status()
            await asyncio.Event().wait()  # it looks after its own work
        finally:
            del self._relays[number]
            async with asyncio.timeout(RELAY_STOP_S):
                await relay.stop()

    def _ended(self, start: Start, task: asyncio.Task[None]) -> None:
        """Reports to the router that a relay has ended, with its error unless it was to end."""
        error, failure = "", None if task.cancelled() else task.exception()
        if failure is not None:  # of one relay: the router starts it again
            log.warning("the relay for worker %s failed", start.settings.id, exc_info=failure)
            error = f"{type(failure).__name__}: {failure}"
        del self._tasks[start.number]
        self._accesses.forget(start.settings.id)
        self._writer.write(framed(Ended(start.number, error)))

    async def _report(self) -> None:
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(STATUS_S)
                self._send_status()
                await self._writer.drain()

    def _send_status(self) -> None:
        states = [
            RelayState(number, relay.heard, max(rank.outbox.epoch for _, rank in relay.ranks))
            for number, relay in self._relays.items()
        ]
        broker = self._broker
        connection = BrokerStatus(broker.connected, dict(broker.counts), broker.unreadable)
        counts = encoded_counts(self._relays.values())
        self._writer.write(framed(Status(states, connection, counts)))


async def serve(connection: socket.socket) -> None:
    """Serves the router at the other end of a socket, until SIGTERM or the socket's end."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        opening = await read(reader, COMMANDS)
    except asyncio.IncompleteReadError:
        return  # the router has ended meanwhile
    if not isinstance(opening, Opening):
        raise TypeError(f"the first message is {opening}, where an Opening is expected")
    set_up(opening.log)
    serving = asyncio.create_task(RelayChild(opening, writer).serve(reader))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


def main() -> None:
    run(serve(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
