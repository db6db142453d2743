"""Processes that the run starts: each logs to a file, and is ended by its id."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from router.cluster.children.process import Child as Started
from router.cluster.children.process import start

STOP_S = 15.0


class Child:
    """A process, started as often as one likes. It leads a session of its own, so its children
    are ended with it, and the kernel ends it when we die."""

    def __init__(
        self, name: str, command: Sequence[str], logs: Path, variables: Mapping[str, str] = {}
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._command = ["env", *(f"{key}={value}" for key, value in variables.items()), *command]
        self._process: Started | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts it, or starts it again; its log goes on."""
        with self.log.open("ab") as output:
            self._process = await start(self._command, output)

    async def kill(self) -> None:
        """SIGKILL, for it and its children."""
        if self._process is not None:
            self._signal_all(signal.SIGKILL)
            await self._process.wait()

    async def stop(self) -> None:
        """Asks it to leave, and makes it after a while; then whatever it left behind."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
        self._signal_all(signal.SIGKILL)
        await self._process.wait()

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        told = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(told[-lines:])

    def _signal_all(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
