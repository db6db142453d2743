"""The fleet commands in force, saved in a file that this router reads after its restart.

    commands ──every change──> file ──at the start──> commands

A router with other replicas learns the commands in force from them; one that is alone has only this
file. It holds drains and removals, with the time left of each removal, but no registrations.

Laws:
- the file is whole, whenever the process or the machine ends: a new file takes the old one's place;
- a file that can't be read does not stop the router: it is counted, logged, and written again with
  the next command.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from events.plane.facts import Control
from events.relay.ledger_file import read_file, run_to_end, write_file
from router.cluster.replicas.fleet_commands import FleetCommands

VERSION = 1
RETRY_S = 5.0
"""Seconds between two attempts to write a file that can't be written."""

log = logging.getLogger("kvroute")


class _State(msgspec.Struct, frozen=True):
    version: int
    fleet: str
    commands: list[Control]


_decoder = msgspec.json.Decoder(_State)


@dataclass(eq=False)
class FleetState:
    """The file with a router's fleet commands in force."""

    path: Path
    fleet: str
    commands: FleetCommands
    counts: Counter[str] = field(default_factory=Counter)
    """Number of reads and writes of the file, by result."""
    _kept: int = 0
    """The value of commands.changes when the file was last written."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _due: asyncio.Event = field(default_factory=asyncio.Event)

    def restore(self) -> None:
        """Applies the commands in the file, and has `run` save changes from then on."""
        for control in self._read():
            self.commands.apply(control)
        self.commands.on_change(self._due.set)
        self._due.set()

    async def run(self) -> None:
        """Saves changes, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            if not await self.keep():
                await asyncio.sleep(RETRY_S)
                self._due.set()

    async def keep(self) -> bool:
        """Waits until the commands in force are in the file; returns False when it can't be
        written.
        """
        wanted = self.commands.changes
        async with self._lock:
            if self._kept >= wanted:
                return True  # by another caller's write
            writing = self.commands.changes
            state = _State(VERSION, self.fleet, self.commands.in_force())
            content = msgspec.json.encode(state)
            try:
                await run_to_end(partial(write_file, self.path, content))
            except OSError as error:
                self.counts["write_failed"] += 1
                log.error("%s: the fleet commands in force can't be saved: %s", self.path, error)
                return False
            self.counts["written"] += 1
            self._kept = writing
            return True

    def _read(self) -> list[Control]:
        try:
            content = read_file(self.path)
            if content is None:
                return []
            state = _decoder.decode(content)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self._unreadable(str(error))
        if state.version != VERSION:
            return self._unreadable(f"its version is {state.version}, not {VERSION}")
        if state.fleet != self.fleet:
            return self._unreadable(f"it is of fleet {state.fleet!r}, not {self.fleet!r}")
        self.counts["read"] += 1
        log.info("%s: %d fleet commands in force", self.path, len(state.commands))
        return state.commands

    def _unreadable(self, why: str) -> list[Control]:
        self.counts["unreadable"] += 1
        log.error(
            "%s can't be read, so earlier drains and removals are lost unless another replica"
            " sends them: %s",
            self.path,
            why,
        )
        return []
