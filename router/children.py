"""Child processes that never outlive us."""

import asyncio
import ctypes
import signal
from collections.abc import Sequence
from typing import IO

STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # before any fork: a child must not load anything


async def start(command: Sequence[str], output: IO[bytes] | None) -> asyncio.subprocess.Process:
    """Starts a child that Linux ends when we die, even of SIGKILL.

    It has a session of its own, so that Ctrl-C and signals to our group reach us alone, and
    we end our children in order. output: where it writes; None: where we do.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def end(process: asyncio.subprocess.Process) -> None:
    """Asks a process to leave, and makes it after a while."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
