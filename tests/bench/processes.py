"""Processes beside a benchmark: their start and end, and what they take of the machine."""

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import IO

from tests.stage.processes import resident_bytes

STOP_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


async def started(
    stack: AsyncExitStack,
    *command: str,
    reads: bool = False,
    output: IO[bytes] | None = None,
    env: dict[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """A process until the stack closes. reads: it prints where it is. output: of what it says;
    None: what it prints is dropped. env: its environment; None: that of this process."""
    dropped = output or asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE if reads else dropped,
        stderr=output,
        env=env,
    )
    stack.push_async_callback(_stopped, process)
    return process


async def _stopped(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def cpu_s(pid: int) -> float:
    """CPU of a process and of its children, theirs included."""
    return sum(ticks for _, ticks in _family(pid)) / TICKS


def rss_mib(pid: int) -> float:
    """Resident memory of the same."""
    total = 0
    for one, _ in _family(pid):
        with suppress(OSError):  # it ended
            total += resident_bytes(one)
    return total / (1 << 20)


def _family(pid: int) -> list[tuple[int, int]]:
    """A process and its children, theirs included, each with its ticks of CPU."""
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        number = int(path.parent.name)
        parents[number] = int(fields[1])
        spent[number] = int(fields[11]) + int(fields[12])
    family = {pid}
    while more := {one for one, parent in parents.items() if parent in family} - family:
        family |= more
    return [(one, spent.get(one, 0)) for one in sorted(family)]
