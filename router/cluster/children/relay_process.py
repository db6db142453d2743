"""The child process that runs a router's relays, as the router sees it."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import msgspec
from typing_extensions import override

from events.plane.settings import EngineSettings
from router.cluster.children.process import Child, end, spawn
from router.cluster.children.relay_messages import (
    COUNTS,
    NO_COUNTS,
    REPORTS,
    BrokerStatus,
    Command,
    Ended,
    Opening,
    RelayState,
    RelayStatus,
    Report,
    Start,
    Status,
    framed,
    read,
)

SILENT_S = 60.0
"""Time without a status after which a child counts as hung, and is killed: several times that of
the longest batch of an engine (`make bench ARGS=engine_batch`), during which it sends none."""
END_S = 2.0
"""Longest wait for a child whose relays have ended, before it is killed."""

log = logging.getLogger("kvroute")


class RelayProcess:
    """One child process, from its start to its end."""

    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.states: dict[int, RelayState] = {}
        """States of the running relays by the number of their start, in the child's last status."""
        self.broker: BrokerStatus | None = None
        """State of the child's connection to NATS; None before the child's first status."""
        self._child = child
        self._writer = writer
        self._counts = NO_COUNTS
        self._ends: dict[int, asyncio.Future[str]] = {}
        """Ends of the relays that have not ended, by the number of their start."""
        self._reading = asyncio.create_task(self._read(reader), name="reports of relays")

    @override
    def __repr__(self) -> str:
        return f"<RelayProcess {self._child!r}: {len(self._ends)} relays>"

    @classmethod
    async def start(cls, command: Sequence[str], opening: Opening) -> Self:
        """Starts the child process; raises OSError when it can't be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = spawn(command, None, theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()  # ends a child that was started
            raise
        process = cls(child, reader, writer)
        process.send(opening)
        log.info("relays run in a child process (pid %d)", child.pid)
        return process

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended(self) -> bool:
        return self._reading.done()

    def relays(self) -> list[RelayStatus]:
        """Counts of the relays that run, in the child's last status."""
        return COUNTS.decode(self._counts)

    def begin(self, number: int, settings: EngineSettings) -> "asyncio.Future[str]":
        """Starts a relay. The returned future ends with the relay or the child: its result is an
        error, or an empty string.
        """
        ended = self._ends[number] = asyncio.get_running_loop().create_future()
        self.send(Start(number, settings))
        return ended

    def send(self, command: Command) -> None:
        """Sends a command to the child, unless it is gone."""
        if not self._writer.is_closing():
            self._writer.write(framed(command))

    async def stop(self) -> None:
        """Ends the child, within END_S."""
        await end(self._child, END_S)
        await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Reads reports until the child's end, which ends all its relays."""
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    async with asyncio.timeout(SILENT_S):
                        report = await read(reader, REPORTS)
                    self._on_report(report)
        except TimeoutError:
            log.error("the process of the relays sent nothing for %g s, and is killed", SILENT_S)
            self._child.kill()
        except Exception:  # ours: there will be another process
            log.exception("a message of the relays' process can't be read; the process is killed")
            self._child.kill()
        finally:
            self._writer.close()
            code = await self._left()
            self.states, self._counts = {}, NO_COUNTS
            if self.broker is not None:
                self.broker = msgspec.structs.replace(self.broker, connected=False)
            for ended in self._ends.values():
                ended.set_result(f"the process of this router's relays ended with code {code}")
            self._ends.clear()

    def _on_report(self, report: Report) -> None:
        match report:
            case Status(relays, broker, counts):
                self.states = {state.number: state for state in relays}
                self.broker = broker
                self._counts = bytes(counts)
            case Ended(number, error):
                self.states.pop(number, None)
                if (ended := self._ends.pop(number, None)) is not None:
                    ended.set_result(error)

    async def _left(self) -> int:
        """The exit code of a child that has closed its end of the socket."""
        try:
            async with asyncio.timeout(END_S):
                return await self._child.wait()
        except TimeoutError:
            self._child.kill()
            return await self._child.wait()
