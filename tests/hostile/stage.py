"""The processes of a run: a server, one attack at a time, and the good client in this process."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc.aio
import msgspec

from kvroute.client import KvRouteClient
from tests.hostile.attacks import Ports
from tests.hostile.good import Calls, GoodClient

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
END_S = 60.0
NICE = "10"
"""Of attacks, which would have another host."""


@asynccontextmanager
async def process(*words: str, nice: str = "0") -> AsyncIterator[tuple[Ports, list[bytes]]]:
    """A Python module in a process of its own: its first line, and from its end on its others. It
    ends with its input."""
    started = await asyncio.create_subprocess_exec(
        *("nice", "-n", nice, sys.executable, "-m", *words),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if started.stdin is None or started.stdout is None:
        raise AssertionError("both are pipes")
    rest: list[bytes] = []
    try:
        async with asyncio.timeout(START_S):
            first = await started.stdout.readline()
        yield msgspec.json.decode(first), rest
        started.stdin.close()
        async with asyncio.timeout(END_S):
            rest += (await started.stdout.read()).splitlines()
            code = await started.wait()
        if code:
            raise RuntimeError(f"{words[0]} ended with {code}")
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@asynccontextmanager
async def a_server() -> AsyncIterator[tuple[Ports, GoodClient]]:
    """A server, and a good client of it."""
    async with (
        process("tests.hostile.server") as (ports, _),
        KvRouteClient(f"127.0.0.1:{ports['grpc']}") as router,
        KvRouteClient(f"127.0.0.1:{ports['fast']}") as fast,
        grpc.aio.insecure_channel(f"127.0.0.1:{ports['epp']}") as picker,
        aiohttp.ClientSession() as http,
    ):
        yield ports, GoodClient(ports, {"route": router, "route_fast": fast}, picker, http)


async def calls_for(good: GoodClient, seconds: float) -> Calls:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    return await good.calls(stop)


async def under_attack(
    ports: Ports, good: GoodClient, name: str, seed: int, seconds: float
) -> tuple[Calls, dict[str, int]]:
    """The good client's calls while an attack goes on; how many connections the attack opened."""
    words: Sequence[str] = (name, str(seed), msgspec.json.encode(ports).decode())
    async with process("tests.hostile.attacks", *words, nice=NICE) as (_, rest):
        calls = await calls_for(good, seconds)
    opened: dict[str, int] = msgspec.json.decode(rest[-1])["opened"]
    return calls, opened
