"""A chunk of an answer through the endpoint picker: CPU of its process, beside grpc.aio.

STREAMS streams of one connection, whose requests have their pick, get CHUNKS chunks of 220 bytes
each. `picker_chunk_cpu_us`: a chunk of every stream in one write, as a busy Envoy sends them.
`picker_single_chunk_cpu_us`: one chunk a write, as an idle one does. Beside each: the same request
machine behind grpc.aio's generic handler, with messages as bytes. CPU is the serving process's own,
rounds of the two take turns, and the medians stand.

`picker_request_cpu_ms`: a request of 8 KB, from its headers to the end of an answer of one chunk,
with its pick by a router in another process. `picker_pick_added_p50_ms`: from the last byte of such
a request to the endpoint, one request at a time. `..._in_router`: with the router in the picker's
process, as `kvroute serve --picker-listen` has it.
"""

import asyncio
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.picker_side import a_router
from tests.bench.timing import beside, row

STREAMS = 20
CHUNKS = 200
SINGLES = 1000
REQUESTS = 300
REPEATS = 7
SIDE = Path(__file__).with_name("picker_side.py")


def rows() -> list[dict[str, Any]]:
    return asyncio.run(_rows())


async def _rows() -> list[dict[str, Any]]:
    async with a_router() as router:
        target = f"127.0.0.1:{router.server.port}"
        ours = await _started("ours", target)
        local = await _started("local", target)
        other = await _started("grpc", target)
        try:
            return await _measured(ours, local, other)
        finally:
            for side in (ours, local, other):
                side.kill()
                await side.wait()


async def _measured(
    ours: asyncio.subprocess.Process,
    local: asyncio.subprocess.Process,
    other: asyncio.subprocess.Process,
) -> list[dict[str, Any]]:
    rows = []
    for name, what, unit, side, twin in (
        ("picker_chunk_cpu_us", f"chunks {STREAMS} {CHUNKS}", "us", ours, other),
        ("picker_single_chunk_cpu_us", f"chunks 1 {SINGLES}", "us", ours, other),
        ("picker_request_cpu_ms", f"requests {REQUESTS}", "ms", ours, None),
        ("picker_pick_added_p50_ms", f"picks {REQUESTS}", "ms", ours, None),
        ("picker_request_cpu_ms_in_router", f"requests {REQUESTS}", "ms", local, None),
        ("picker_pick_added_p50_ms_in_router", f"picks {REQUESTS}", "ms", local, None),
    ):
        mine, other = [], []
        for _ in range(REPEATS):
            mine.append(await _say(side, what))
            if twin is not None:
                other.append(await _say(twin, what))
        found = row(name, round(median(mine), 2), unit, "less")
        rows.append(beside(found, median(other) if other else None))
    return rows


async def _started(kind: str, target: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, str(SIDE), kind, target, stdin=pipe, stdout=pipe
    )


async def _say(side: asyncio.subprocess.Process, what: str) -> float:
    assert side.stdin is not None
    assert side.stdout is not None
    side.stdin.write(f"{what}\n".encode())
    await side.stdin.drain()
    return float(await side.stdout.readline())
