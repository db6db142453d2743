"""When a core of the machine ran nothing: python -m tests.chaos.machine --core 0

A virtual machine's host takes cores away, for milliseconds or for many seconds; the processes that
ran there stop in the middle of whatever they do, while those on other cores go on. This process
sleeps on one core, comes before the others there, and notes each time that it woke late. It ends
with its standard input, and then says what it noted: [[from_s, to_s], ...].
"""

import argparse
import asyncio
import os
import select
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from tests.chaos.records import Cause, Trouble

BEAT_S = 0.02
STALL_S = 0.1
"""Late by so much is no matter of the other processes: the kernel lets one that slept run first."""
_NICE = -10
_SAYS_S = 20.0


def stalls(beat: Callable[[], bool], clock: Callable[[], float]) -> list[tuple[float, float]]:
    """Each time between two beats that was longer by STALL_S. beat: sleeps; False: that is all."""
    found = []
    before_s, goes_on = clock(), True
    while goes_on:
        goes_on = beat()
        now_s = clock()
        if now_s - before_s > BEAT_S + STALL_S:
            found.append((before_s + BEAT_S, now_s))
        before_s = now_s
    return found


@asynccontextmanager
async def watched(troubles: list[Trouble]) -> AsyncIterator[None]:
    """Watches every core; adds what was noted to the troubles, at the end."""
    watchers = [await _watcher(core) for core in sorted(os.sched_getaffinity(0))]
    try:
        yield
    finally:
        for watcher in watchers:
            async with asyncio.timeout(_SAYS_S):
                said, _ = await watcher.communicate(b"")  # ends its input
            for from_s, to_s in msgspec.json.decode(said, type=list[tuple[float, float]]):
                troubles.append(Trouble(cause=Cause.MACHINE, from_s=from_s, to_s=to_s))


async def _watcher(core: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.machine", "--core", str(core)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.machine", description=__doc__)
    parser.add_argument("--core", type=int, required=True)
    asked = parser.parse_args(words)
    os.sched_setaffinity(0, {asked.core})
    with suppress(PermissionError):  # as others then, which a core that is there still lets run
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)

    def beat() -> bool:
        return not select.select([sys.stdin], [], [], BEAT_S)[0]

    sys.stdout.write(msgspec.json.encode(stalls(beat, time.monotonic)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
