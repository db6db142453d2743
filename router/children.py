"""Child processes that never outlive us."""

import asyncio
import ctypes
import signal

STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For preexec_fn: Linux ends the child when its parent dies, even of SIGKILL.

    Ctrl-C on the terminal is left to the parent, which ends its children in order.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
