"""What a pick costs the router, and how many a client gets: one by one, and over the stream.

A real `kvroute serve` with eight stand-in engines behind relays, and a client in another process.
Prompts have 8,192 tokens, or their 512 block hashes, or four times as many; each is held whole by
one engine. CPU is that of the server's process for each decision, by the kernel's account,
everything in it included. `key`: a second such server takes callers with keys alone; theirs has a
tenant with a quota, and its requests name a LoRA and a label.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import yaml

from kvroute.client import KvRouteClient
from kvroute.client.messages.options import route_request
from router.cluster.children.process import end, start
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from tests.bench import c_client
from tests.bench.stream_client import BLOCK_SIZE, LABELS, LORA, TOKEN, forms, long_prompts, prompts
from tests.bench.timing import row
from tests.stage.keys import identity, write_keys
from tests.stage.loopback import a_broker, a_nats, a_relay
from tests.stage.programs import KVROUTE, running
from tests.stage.waiting import free_port

ENGINES = 8
CALLERS = 32
CALLERS_MANY = 64
"""As many as keep client and router at work at the same time."""
READY_TIMEOUT_S = 60.0


def _case(
    form: str, *, stream: bool, requests: int, callers: int = CALLERS, key: bool = False
) -> dict[str, Any]:
    """A line for stream_client.py."""
    return {"form": form, "stream": stream, "key": key, "callers": callers, "requests": requests}


CASES: dict[str, dict[str, Any]] = {
    "tokens, one by one": _case("tokens", stream=False, requests=1600),
    "tokens, stream": _case("tokens", stream=True, requests=3200),
    "hashes, one by one": _case("hashes", stream=False, requests=1600),
    "hashes, stream": _case("hashes", stream=True, requests=3200),
    "tokens, many": _case("tokens", stream=True, requests=6400, callers=CALLERS_MANY),
    "hashes, many": _case("hashes", stream=True, requests=6400, callers=CALLERS_MANY),
    "long tokens, one by one": _case("tokens, long", stream=False, requests=480),
    "long tokens, stream": _case("tokens, long", stream=True, requests=960),
    "long hashes, one by one": _case("hashes, long", stream=False, requests=480),
    "long hashes, stream": _case("hashes, long", stream=True, requests=960),
    "long hashes, many": _case("hashes, long", stream=True, requests=3200, callers=CALLERS_MANY),
    "alone": _case("tokens", stream=False, requests=500, callers=1),
    "alone, stream": _case("tokens", stream=True, requests=500, callers=1),
}
KEY_CASES = {
    f"{name}, key": CASES[name] | {"key": True}
    for name in ("tokens, one by one", "tokens, stream", "hashes, one by one", "hashes, stream")
}
ROWS = [
    ("cpu_tokens_unary_us", "tokens, one by one", "cpu_us", "us", "less"),
    ("cpu_tokens_stream_us", "tokens, stream", "cpu_us", "us", "less"),
    ("cpu_hashes_unary_us", "hashes, one by one", "cpu_us", "us", "less"),
    ("cpu_hashes_stream_us", "hashes, stream", "cpu_us", "us", "less"),
    ("cpu_tokens_key_unary_us", "tokens, one by one, key", "cpu_us", "us", "less"),
    ("cpu_tokens_key_stream_us", "tokens, stream, key", "cpu_us", "us", "less"),
    ("cpu_hashes_key_unary_us", "hashes, one by one, key", "cpu_us", "us", "less"),
    ("cpu_hashes_key_stream_us", "hashes, stream, key", "cpu_us", "us", "less"),
    ("route_unary_8192_p50_us", "tokens by C", "p50_us", "us", "less"),
    ("route_unary_hashes_p50_us", "hashes by C", "p50_us", "us", "less"),
    ("route_client_8192_p50_us", "alone", "p50_us", "us", "less"),
    ("route_stream_8192_p50_us", "alone, stream", "p50_us", "us", "less"),
    ("cpu_tokens_32k_unary_us", "long tokens, one by one", "cpu_us", "us", "less"),
    ("cpu_tokens_32k_stream_us", "long tokens, stream", "cpu_us", "us", "less"),
    ("cpu_hashes_2048_unary_us", "long hashes, one by one", "cpu_us", "us", "less"),
    ("cpu_hashes_2048_stream_us", "long hashes, stream", "cpu_us", "us", "less"),
    ("client_tokens_rps", "tokens, many", "rps", "picks/s", "more"),
    ("client_hashes_rps", "hashes, many", "rps", "picks/s", "more"),
    ("client_hashes_2048_rps", "long hashes, many", "rps", "picks/s", "more"),
]
"""Name, the case it is taken from, what of it, unit, which is better."""


def rows() -> list[dict[str, Any]]:
    found = asyncio.run(_measured())
    return [
        row(name, round(found[case][what], 1), unit, better, _cores(found[case], what))
        for name, case, what, unit, better in ROWS
        if case in found
    ]


def _cores(found: dict[str, float], what: str) -> str:
    """Of a rate: what took the cores."""
    if what != "rps":
        return ""
    router, client = (found[cpu] * found["rps"] / 1e6 for cpu in ("cpu_us", "client_cpu_us"))
    return f"our router {router:.2f} cores, our client {client:.2f}"


@dataclass(frozen=True)
class Served:
    """A router to measure."""

    target: str
    pid: int
    engines: dict[str, StandIn]
    """By their addresses."""


async def _measured() -> dict[str, dict[str, float]]:
    """What the clients found, case by case."""
    async with served() as router:
        found = await _by_client(router.target, router.pid, CASES)
        for form in ("tokens", "hashes"):
            request = route_request(**forms()[form][0])
            if (p50_us := await c_client.p50_us(router.target, request)) is not None:
                found[f"{form} by C"] = {"p50_us": p50_us}
    async with served(key=True) as router:
        return found | await _by_client(router.target, router.pid, KEY_CASES)


async def _by_client(
    target: str, pid: int, cases: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    command = (sys.executable, "-m", "tests.bench.stream_client", target, str(pid))
    async with running(*command, stdin=PIPE, stdout=PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        found = {}
        for name, case in cases.items():
            client.stdin.write(json.dumps(case).encode() + b"\n")
            found[name] = json.loads(await client.stdout.readline())
        return found


@asynccontextmanager
async def served(*, key: bool = False) -> AsyncIterator[Served]:
    """A router that knows its fleet: every prompt is in one engine's cache, and in the index. key:
    it takes callers with keys alone, and caches hold the prompts as of a LoRA."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
        nats = await stack.enter_async_context(a_nats())
        lora = LORA if key else ""
        scheduler = SchedulerConfig(
            block_count=8192, block_size=BLOCK_SIZE, lora_names=(lora,) if key else ()
        )
        engines = await stack.enter_async_context(
            stand_ins(
                [EngineConfig(f"worker-{i}", scheduler) for i in range(ENGINES)],
                ScaledClock(100.0),
            )
        )
        target = f"127.0.0.1:{free_port()}"
        config: dict[str, dict[str, Any]] = {
            "nats": {"url": nats.url},
            "grpc": {"listen": target},
            "metrics": {"listen": ""},
            "log": {"level": "warning"},
        }
        if key:
            config |= {
                "keys": {"file": write_keys(folder, identity("team", tenant="team"))},
                "queue": {"tenants": {"default": {"in_flight_max": 1_000_000}}},
            }
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        router = await start([*KVROUTE, "serve", "--config", str(file)], None)
        stack.push_async_callback(end, router)
        broker = await stack.enter_async_context(a_broker(nats.url))
        for engine in engines:
            # Slots for all that a window reserves: what is measured is picks, not refusals.
            await stack.enter_async_context(a_relay(engine, broker, slots=1_000_000, labels=LABELS))
        token = TOKEN if key else None
        async with KvRouteClient(target, token=token) as client, asyncio.timeout(READY_TIMEOUT_S):
            await client.wait_ready(READY_TIMEOUT_S)
            known = [*prompts(), *long_prompts()]
            for i, prompt in enumerate(known):
                await engines[i % ENGINES].engine.complete(prompt.tolist(), 1, lora_name=lora)
            blocks = sum(map(len, known)) // BLOCK_SIZE
            while (await client.index_stats()).blocks < blocks:  # noqa: ASYNC110  # elsewhere
                await asyncio.sleep(0.05)
        yield Served(target, router.pid, {one.address: one for one in engines})
