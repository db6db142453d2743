"""What pages that watch cost a router: CPU, memory, and the time of decisions.

Workers change every second, all of them; viewers are a process of their own (viewers_side.py), with
deaf ones, which read nothing, and such that come and vanish. CPU is this process's, less what it
takes without viewers.
"""

import asyncio
import gc
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from indexer.kernel import NativeIndex
from router.decide.core.counts import Counts
from router.decide.core.progress import Pick, Progress, ProgressState
from tests.bench.timing import row
from tests.stage.console import Served, served
from tests.stage.fleet import Fleet, prompt
from tests.stage.processes import resident_bytes

SECONDS = 12.0
RATE = 200
"""Decisions a second."""
SIDE = Path(__file__).with_name("viewers_side.py")


class Run(NamedTuple):
    """One measurement."""

    cpu: float
    """Seconds of CPU a second."""
    p99_us: float
    """Of decisions, measured at each."""
    late_ms: float
    """p99 of how late the event loop came to a decision that was due."""
    kib: float
    """Growth of resident memory."""
    ended: dict[str, int]


def rows() -> list[dict[str, Any]]:
    made = []
    for workers in (64, 1000):
        quiet = asyncio.run(_measured(workers, 0, 0, 0))
        ten = asyncio.run(_measured(workers, 10, 0, 0))
        name = f"console_w{workers}"
        made += [
            row(f"{name}_quiet_cpu_percent", round(100 * quiet.cpu, 2), "%", "less", "no viewer"),
            row(f"{name}_cpu_percent", round(100 * (ten.cpu - quiet.cpu), 2), "%", "less"),
            row(f"{name}_decision_p99_us", round(ten.p99_us, 1), "us", "less",
                f"without viewers {quiet.p99_us:.1f}"),
            row(f"{name}_late_p99_ms", round(ten.late_ms, 2), "ms", "less",
                f"without viewers {quiet.late_ms:.2f}"),
        ]  # fmt: skip
    rough = asyncio.run(_measured(64, 10, 5, 5, 3 * SECONDS))
    made.append(
        row("console_rough_kib", round(rough.kib), "KiB", "less",
            f"10 viewers, 5 deaf, 5 that vanish each second; ended: {rough.ended}")
    )  # fmt: skip
    return made


async def _measured(
    workers: int, viewers: int, deaf: int, fickle: int, seconds: float = SECONDS
) -> Run:
    fleet = Fleet(index=NativeIndex())
    for i in range(workers):
        fleet.add(f"w{i:04}", address=f"http://10.0.{i // 256}.{i % 256}:8000")
    async with served(fleet) as stage:
        console = asyncio.create_task(stage.console.run())
        changing = asyncio.create_task(_change(fleet))
        port = stage.url.rsplit(":", 1)[1]
        counts = [str(each) for each in (viewers, deaf, fickle)]
        side = await asyncio.create_subprocess_exec(sys.executable, SIDE, port, *counts)
        try:
            await asyncio.sleep(3.0)
            return await _decide(stage, seconds)
        finally:
            with suppress(ProcessLookupError):  # without viewers it has nothing to do, and ends
                side.kill()
            await side.wait()
            for task in (console, changing):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _change(fleet: Fleet) -> None:
    """Every worker beats and reports another load, once a second."""
    for turn in range(1_000_000):
        fleet.now_s += 1.0
        for number, key in enumerate(list(fleet.relays)):
            fleet.beat(key)
            fleet.say(key, running=turn % 50, used_blocks=float(turn % 500))
            if number % 16 == 15:
                await asyncio.sleep(0)
        await asyncio.sleep(1.0)


async def _decide(stage: Served, seconds: float) -> Run:
    """Decisions at RATE, for a while."""
    took, late = [], []
    fleet, loop = stage.fleet, asyncio.get_running_loop()
    counts = Counts(stage.tally)
    gc.collect()
    began_bytes, began_cpu = resident_bytes(), time.process_time()
    began = loop.time()
    count = int(RATE * seconds)
    for number in range(count):
        due = began + number / RATE
        await asyncio.sleep(max(0.0, due - loop.time()))
        late.append(loop.time() - due)
        started = time.perf_counter()
        due_watch = stage.watchers.watch.take()
        request = fleet.request(prompt(1024, first=64 * (number % 50)))
        counts.begin()
        pick = fleet.core.route(request, fleet.now_s, watch=due_watch)
        took.append(time.perf_counter() - started)
        assert isinstance(pick, Pick)
        counts.picked(pick)
        done = Progress(pick.reservation.id, ProgressState.FINISHED)
        fleet.core.report(done, fleet.now_s)
    elapsed = loop.time() - began
    cpu = (time.process_time() - began_cpu) / elapsed
    gc.collect()
    return Run(
        cpu,
        1e6 * float(np.percentile(took, 99)),
        1e3 * float(np.percentile(late, 99)),
        (resident_bytes() - began_bytes) / 1024,
        dict(stage.console.viewers.ended),
    )
