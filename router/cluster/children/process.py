"""Starts child processes that end when this process ends.

Children are spawned (posix_spawn) and not forked: a fork copies the state of gRPC's threads but not
the threads, and gRPC's handlers in a child sometimes end it with SIGSEGV before its program begins.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from typing_extensions import override

STOP_TIMEOUT_S = 10.0
_LAUNCHER = str(Path(__file__).with_name("launcher.py"))


class Child:
    """A child process; its owner must wait for it, or end it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The child's exit code, or less than 0: the number of the signal that ended it."""
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        try:
            self._loop.add_reader(self._descriptor, self._reap)
        except BaseException:
            os.close(self._descriptor)
            raise

    @override
    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"left with code {self.returncode}"
        return f"<Child {self.pid} {state}>"

    async def wait(self) -> int:
        """Waits until the process has ended; returns its exit code."""
        await self._ended.wait()
        if self.returncode is None:
            raise AssertionError("the child process ended without an exit code")
        return self.returncode

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended: another process may have its id by now."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


async def start(command: Sequence[str], output: IO[bytes] | None) -> Child:
    """Spawns a child: see `spawn`."""
    return spawn(command, output)


def spawn(
    command: Sequence[str], output: IO[bytes] | None, connection: socket.socket | None = None
) -> Child:
    """Starts a child process that Linux ends when this process ends, even by SIGKILL.

    It has a session of its own, so that Ctrl-C and signals to our process group reach this process
    alone, which ends its children in order. output: where the child writes; None: where this
    process does. connection: the child's descriptor 0; None: it reads nothing. A missing program
    ends with code 127. Raises OSError when no process can be started or watched.
    """
    files: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        if connection is None
        else (os.POSIX_SPAWN_DUP2, connection.fileno(), 0)
    ]
    if output is not None:
        files += [(os.POSIX_SPAWN_DUP2, output.fileno(), number) for number in (1, 2)]
    command = launched(command)
    pid = os.posix_spawn(
        command[0], command, os.environ, file_actions=files, setsid=True, setsigmask=()
    )
    try:
        return Child(pid)
    except BaseException:  # such as no room for a descriptor: nobody else would end the process
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def launched(command: Sequence[str]) -> list[str]:
    """Command that runs a program by launcher.py: Linux ends it with SIGTERM when the thread that
    starts it ends."""
    return [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *command]


async def end(process: Child, within_s: float = STOP_TIMEOUT_S) -> None:
    """Ends a process with SIGTERM; one that still runs after within_s, with SIGKILL."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
