"""A stream through `kvroute gateway`: CPU of its process, and what it adds to the first byte.

Beside each number stands a bare relay of aiohttp's server and client, which passes the same stream
on in the same run: 64 clients, 200 chunks of 220 bytes, one each 20 ms. A real router answers the
gateway over gRPC, by load. CPU is the process's own, from /proc, so that others on the machine
hardly count; rounds of gateway and relay take turns, and the medians stand.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from router.request.tokens import ModelPrompts, Source
from tests.bench.gateways_compared import Port, in_turn
from tests.bench.processes import started
from tests.bench.timing import beside, row
from tests.stage.processes import cpu_s
from tests.stage.programs import KVROUTE, ran
from tests.stage.served import served
from tests.stage.waiting import accepts, free_port, until

CLIENTS = 64
CHUNKS = 200
EVERY_S = 0.02
REPEATS = 5
FEW = 1
"""Chunks of the streams that show what a request costs beside its chunks."""
FEW_ROUNDS = 4
FIRST_BYTES = 60
"""Requests, one after the other, for the time to the first byte."""
SIDE = Path(__file__).with_name("gateway_side.py")


def rows() -> list[dict[str, Any]]:
    return asyncio.run(_rows())


async def _rows() -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        engine = await _engine(stack)
        relay = await in_turn(stack, [f"http://127.0.0.1:{engine}"])
        without = {"m": ModelPrompts(source=Source.OFF)}
        router = await stack.enter_async_context(served(models_prompts=without))
        router.fleet.add("w0", address=f"http://127.0.0.1:{engine}", total_slots=10_000)
        gateway = await _gateway(stack, router.server.port)
        long = await _cpu_ms((gateway, relay), CHUNKS, 1)
        short = await _cpu_ms((gateway, relay), FEW, FEW_ROUNDS)
        first_s = [
            [await _first_s(port) for port in (gateway.port, relay.port, engine)]
            for _ in range(REPEATS)
        ]
        added = [median(one[i] - one[2] for one in first_s) * 1e3 for i in (0, 1)]
    chunk_us = [1e3 * (a - b) / (CHUNKS - FEW) for a, b in zip(long, short, strict=True)]
    return [
        _row("gateway_stream_200_cpu_ms", "ms", long),
        _row("gateway_chunk_cpu_us", "us", chunk_us),
        _row("gateway_request_cpu_ms", "ms", short),
        _row("gateway_first_byte_added_p50_ms", "ms", added),
    ]


def _row(name: str, unit: str, values: list[float]) -> dict[str, Any]:
    ours, theirs = values
    return beside(row(name, round(ours, 2), unit, "less"), theirs)


async def _cpu_ms(proxies: tuple[Port, ...], chunks: int, rounds: int) -> list[float]:
    """CPU of a stream of so many chunks, by proxy."""
    taken: list[list[float]] = [[] for _ in proxies]
    for _ in range(REPEATS):
        for proxy, values in zip(proxies, taken, strict=True):
            before_s = cpu_s(proxy.pid)
            done = await _clients(proxy.port, CLIENTS, chunks, EVERY_S, rounds)
            values.append((cpu_s(proxy.pid) - before_s) * 1e3 / done["streams"])
    return [median(values) for values in taken]


async def _first_s(port: int) -> float:
    done = await _clients(port, 1, FEW, 0.0, FIRST_BYTES)
    return float(median(done["first_s"]))


async def _clients(*about: float) -> Any:
    code, output, err = await ran(sys.executable, SIDE, "clients", *map(str, about))
    assert code == 0, err
    return json.loads(output)


async def _engine(stack: AsyncExitStack) -> int:
    """The port of an engine."""
    process = await started(stack, sys.executable, str(SIDE), "engine", reads=True)
    assert process.stdout is not None
    return int(await process.stdout.readline())


async def _gateway(stack: AsyncExitStack, router: int) -> Port:
    port = free_port()
    process = await started(
        stack,
        *(*KVROUTE, "gateway", "--router", f"127.0.0.1:{router}"),
        *("--listen", f"127.0.0.1:{port}", "--log-level", "warning"),
    )
    await until(lambda: accepts(port), "the gateway to listen")
    return Port(port, process.pid)
