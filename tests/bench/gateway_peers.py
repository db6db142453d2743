"""kvroute's gateway beside other routers, on the same stand-in engines.

    python -m tests.bench.gateway_peers [--mixes shared,agents] [--proxies kvroute,robin]

Each proxy gets each mix of chats with engines of its own, started anew: ENGINES stand-ins in a
process, with the step times of a 70B model in real time, and a token a byte. As many clients as a
mix has sessions send one chat after the other. CPU is that of the proxy's process and its children:
of kvroute, the router, its relays and its NATS server are among them. Takes about ten minutes;
prints a table, and writes build/gateway-peers.json. No part of `make bench`.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from kvroute.client import KvRouteClient
from simulator.cli.gateway import workers_ready
from tests.bench.environments import BUILD, python_of
from tests.bench.gateway_peers_side import MODEL
from tests.bench.processes import cpu_s, started
from tests.stage.prompts.byte_tokenizer import make_folder
from tests.stage.waiting import free_port

ENGINES = 4
CLIENTS = 12
CHATS = 12
"""Of each client."""
ANSWER_TOKENS = 32
SYSTEM_BYTES = 3000
QUESTION_BYTES = 600
STEP_BYTES = 500
"""What an agent's turn adds to its chat, besides the answer."""
SEED = 1
READY_S = 60.0
PEERS = ("gateway_peers", "sglang-router==0.3.2", "vllm-router==0.1.17")
BALANCED = ("--balance-abs-threshold", "2", "--balance-rel-threshold", "1.5")
"""Of cache_aware. Its default, 64 requests more on one worker than on another, is more than all
clients here: it sends every chat of a shared system prompt to one engine."""
SIDE = Path(__file__).with_name("gateway_peers_side.py")
RESULTS = BUILD / "gateway-peers.json"
_LETTERS = "abcdefghijklmnopqrstuvwxyz     "

Sessions = list[list[dict[str, Any]]]


class Engine(NamedTuple):
    """A stand-in."""

    url: str
    events: str
    replay: str
    settings: dict[str, Any]


class Result(NamedTuple):
    """One proxy's numbers in one mix."""

    mix: str
    proxy: str
    requests: int
    ttft_ms: float
    """Mean, as the clients see it."""
    ttft_engine_ms: float
    """Mean, from the arrival at the engine, in its own time: what the picks are worth, whatever
    else the machine does."""
    rps: float
    cached_share: float
    cpu_ms: float
    """A request."""


# Mixes of chats


def shared(rng: random.Random) -> Sessions:
    """One system prompt, and a question that is asked once."""
    system = _text(rng, SYSTEM_BYTES)
    return [[_question(rng, system) for _ in range(CHATS)] for _ in range(CLIENTS)]


def two_applications(rng: random.Random) -> Sessions:
    """Two system prompts, in turn."""
    systems = [_text(rng, SYSTEM_BYTES) for _ in range(2)]
    return [
        [_question(rng, systems[(number + turn) % 2]) for turn in range(CHATS)]
        for number in range(CLIENTS)
    ]


def agents(rng: random.Random) -> Sessions:
    """Chats that grow by each turn; all have the same tools' text."""
    system = _text(rng, SYSTEM_BYTES // 2)
    sessions = []
    for _ in range(CLIENTS):
        turns = [_question(rng, system)]
        for _ in range(CHATS - 1):
            content = _text(rng, STEP_BYTES)
            turns.append(_turn([{"role": "user", "content": content}]))
        sessions.append(turns)
    return sessions


def nothing_shared(rng: random.Random) -> Sessions:
    """Prompts that have nothing in common."""
    return [
        [_question(rng, _text(rng, SYSTEM_BYTES)) for _ in range(CHATS)] for _ in range(CLIENTS)
    ]


MIXES: dict[str, Callable[[random.Random], Sessions]] = {
    "shared": shared,
    "agents": agents,
    "two-applications": two_applications,
    "nothing-shared": nothing_shared,
}


def _question(rng: random.Random, system: str) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": _text(rng, QUESTION_BYTES)},
    ]
    return _turn(messages) | {"anew": True}


def _turn(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": ANSWER_TOKENS}


def _text(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(_LETTERS, k=size))


# Proxies: each starts its process, and returns its port and its pid


async def kvroute(stack: AsyncExitStack, engines: list[Engine]) -> tuple[int, int]:
    """`kvroute serve` with its gateway, relays and NATS server inside."""
    port = free_port()
    pid, _ = await _router(stack, engines, gateway={"listen": f"127.0.0.1:{port}"})
    return port, pid


async def kvroute_gateway(stack: AsyncExitStack, engines: list[Engine]) -> tuple[int, int]:
    """`kvroute gateway` before a `kvroute serve` whose CPU does not count."""
    port = free_port()
    _, router = await _router(stack, engines)
    command = ["-m", "router.app.main", "gateway", "--router", f"127.0.0.1:{router}"]
    command += ["--listen", f"127.0.0.1:{port}", "--log-level", "error"]
    process = await started(stack, sys.executable, *command)
    await _serves(port)
    return port, process.pid


async def _router(
    stack: AsyncExitStack, engines: list[Engine], **more: dict[str, str]
) -> tuple[int, int]:
    """A router with relays inside; its pid and its port."""
    room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
    grpc = free_port()
    config = {
        "grpc": {"listen": f"127.0.0.1:{grpc}"},
        "metrics": {"listen": ""},
        "models": [{"name": MODEL, "prompts": {"folder": str(make_folder(room / "model"))}}],
        "workers": [engine.settings for engine in engines],
        **more,
    }
    (room / "kvroute.json").write_text(json.dumps(config))
    command = ["-m", "router.app.main", "serve", "-c", str(room / "kvroute.json")]
    process = await started(stack, sys.executable, *command, "--log-level", "error")
    async with KvRouteClient(f"127.0.0.1:{grpc}") as client:
        await workers_ready(client, len(engines))
    return process.pid, grpc


async def robin(stack: AsyncExitStack, engines: list[Engine]) -> tuple[int, int]:
    """A plain round robin on aiohttp."""
    urls = [engine.url for engine in engines]
    process = await started(stack, sys.executable, str(SIDE), "robin", *urls, reads=True)
    assert process.stdout is not None
    return int(await process.stdout.readline()), process.pid


async def sglang_router(stack: AsyncExitStack, engines: list[Engine]) -> tuple[int, int]:
    """By its default policy, which is cache_aware."""
    return await _peer(stack, engines, "sglang-router", "launch", *BALANCED)


async def vllm_router(stack: AsyncExitStack, engines: list[Engine]) -> tuple[int, int]:
    """By its default policy, which is cache_aware."""
    return await _peer(stack, engines, "vllm-router", *BALANCED)


async def vllm_router_kv(stack: AsyncExitStack, engines: list[Engine]) -> tuple[int, int]:
    """By KV events, from the engines' own sockets."""
    flags = ["--policy", "kv_aware", "--kv-event-model", MODEL]
    for engine in engines:
        flags += ["--kv-event-source", f"{engine.url}={engine.events}"]
        flags += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
    return await _peer(stack, engines, "vllm-router", *flags)


PROXIES = {
    "kvroute": kvroute,
    "kvroute gateway alone": kvroute_gateway,
    "sglang-router": sglang_router,
    "vllm-router": vllm_router,
    "vllm-router kv_aware": vllm_router_kv,
    "round robin (aiohttp)": robin,
}


async def _peer(
    stack: AsyncExitStack, engines: list[Engine], name: str, *flags: str
) -> tuple[int, int]:
    port, metrics = free_port(), free_port()
    program = python_of(*PEERS).with_name(name)
    process = await started(
        stack,
        *(str(program), *flags, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
        *("--log-level", "error", "--worker-urls", *(engine.url for engine in engines)),
    )
    await _serves(port)
    return port, process.pid


async def _serves(port: int) -> None:
    """Waits until a chat is answered."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    async with aiohttp.ClientSession() as http, asyncio.timeout(READY_S):
        while True:
            try:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                async with http.post(url, json=body) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


# A run


async def measured(mix: str, proxy: str) -> Result:
    """One proxy in one mix."""
    sessions = MIXES[mix](random.Random(f"{SEED} {mix}"))
    async with AsyncExitStack() as stack:
        engines = await _engines(stack)
        port, pid = await PROXIES[proxy](stack, engines)
        await _clients(port, [[_question(random.Random(0), "warm")]])
        before_s, first_s = cpu_s(pid), await _first_s(engines)
        done = await _clients(port, sessions)
        spent_s = cpu_s(pid) - before_s
        engine_s = await _first_s(engines) - first_s
    answers = done["answers"]
    ttft_ms = [answer["ttft_s"] * 1e3 for answer in answers]
    prompts = sum(answer["prompt_tokens"] for answer in answers)
    return Result(
        mix,
        proxy,
        len(answers),
        round(fmean(ttft_ms), 1),
        round(engine_s * 1e3 / len(answers), 1),
        round(len(answers) / done["took_s"], 2),
        round(sum(answer["cached_tokens"] for answer in answers) / prompts, 3),
        round(spent_s * 1e3 / len(answers), 2),
    )


async def _engines(stack: AsyncExitStack) -> list[Engine]:
    process = await started(stack, sys.executable, str(SIDE), "engines", str(ENGINES), reads=True)
    assert process.stdout is not None
    return [
        Engine(one["address"], one["events"], one["replay"], one)
        for one in json.loads(await process.stdout.readline())
    ]


async def _first_s(engines: list[Engine]) -> float:
    """Times to the first token of all engines together, since their start."""
    name = "vllm:time_to_first_token_seconds_sum"
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for engine in engines:
            async with http.get(f"{engine.url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith(name))
    return total


async def _clients(port: int, sessions: Sessions) -> Any:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SIDE), "clients", str(port)), stdin=pipe, stdout=pipe
    )
    output, _ = await process.communicate(json.dumps(sessions).encode())
    if process.returncode:
        raise RuntimeError("a client failed")
    return json.loads(output)


def table_of(results: list[Result]) -> Table:
    table = Table("mix", "proxy", title="beside other routers", box=None)
    columns = ("TTFT ms", "at the engine", "requests/s", "cached", "CPU ms a request", "ratio")
    for column in columns:
        table.add_column(column, justify="right")
    plain = {one.mix: one.cpu_ms for one in results if one.proxy == "round robin (aiohttp)"}
    for one in results:
        ratio = f"{one.cpu_ms / plain[one.mix]:.2f}" if one.mix in plain else ""
        table.add_row(
            *(one.mix, one.proxy, f"{one.ttft_ms:,.0f}", f"{one.ttft_engine_ms:,.0f}"),
            *(f"{one.rps:.1f}", f"{one.cached_share:.1%}", f"{one.cpu_ms:.1f}", ratio),
        )
    return table


async def run(mixes: list[str], proxies: list[str], console: Console) -> None:
    results = []
    for mix in mixes:
        for proxy in proxies:
            with console.status(f"{mix}: {proxy}"):
                results.append(await measured(mix, proxy))
            console.print(table_of(results[-1:]))
    console.print(table_of(results))
    RESULTS.write_text(json.dumps([one._asdict() for one in results], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway_peers")
    parser.add_argument("--mixes", default=",".join(MIXES), help="some of %(default)s")
    parser.add_argument("--proxies", default=",".join(PROXIES), help="some of %(default)s")
    given = parser.parse_args()
    asyncio.run(run(given.mixes.split(","), given.proxies.split(","), Console(width=120)))


if __name__ == "__main__":
    main()
