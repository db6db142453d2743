"""kvroute's gateway beside other routers, on the same stand-in engines.

    python -m tests.bench.gateways_compared [--mixes shared,agents] [--proxies kvroute,robin]
        [--loads 60,90] [--fleets even,uneven] [--seeds 3] [--again kvroute]

Each proxy gets each mix of chats with engines of its own, started anew: ENGINES stand-ins in a
process, with the step times of a 70B model in real time, and a token a byte. In an uneven fleet
half of them need twice as long for each step.

A load is a percentage of the engines' capacity: chats arrive at random times (Poisson), the same
for each proxy, whatever becomes of earlier ones; only a turn of a chat waits for the answer before
it. The capacity of a mix is what a round robin serves to SATURATED times as many clients as it has
sessions, one chat after the other; an uneven fleet counts for three quarters of it. The load
`closed` has as many clients as the mix has sessions, each of which sends one chat after the other:
clients of a slower proxy send less.

The proxy of --again is measured twice in each cell, the second time as `NAME again`: the difference
is the noise of that cell. CPU is that of the proxy's process and its children: of kvroute, the
router, its relays and its NATS server are among them. A run takes about half a minute. Prints
medians over the seeds, and writes each run to build/gateways-compared.json. Not in `make bench`.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
from grpc import ssl_channel_credentials
from rich.console import Console
from rich.table import Table

from kvroute.client import KvRouteClient
from simulator.cli.gateway import workers_ready
from tests.bench.environments import BUILD, python_of
from tests.bench.gateways_compared_side import MODEL
from tests.bench.processes import cpu_s, started
from tests.stage.certificates import Authority, written
from tests.stage.keys import identity, write_keys
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
SATURATED = 3
"""Times as many sessions as a mix has, which keep the engines busy while its capacity is
measured."""
LEAST_BYTES, MOST_BYTES = 500, 8000
"""Of a prompt of `nothing-shared`."""
CLOSED = "closed"
FLEETS = {"even": 0, "uneven": ENGINES // 2}
"""Engines of a fleet that need twice as long for each step."""
ROBIN = "round robin (aiohttp)"
READY_S = 60.0
PROXIED = ("gateways_compared", "sglang-router==0.3.2", "vllm-router==0.1.17")
BALANCED = ("--balance-abs-threshold", "2", "--balance-rel-threshold", "1.5")
"""Of cache_aware. Its default, 64 requests more on one worker than on another, is more than all
clients here: it sends every chat of a shared system prompt to one engine."""
SIDE = Path(__file__).with_name("gateways_compared_side.py")
RESULTS = BUILD / "gateways-compared.json"
_LETTERS = "abcdefghijklmnopqrstuvwxyz     "

Sessions = list[list[dict[str, Any]]]


class Engine(NamedTuple):
    """A stand-in, or a real engine."""

    url: str
    events: str
    replay: str
    settings: dict[str, Any]
    """Of its relay; without slots, which an ordinary vLLM does not tell."""
    tokenizer: str = ""
    """The folder of its tokenizer; empty: a token a byte."""


class Port(NamedTuple):
    """Where a proxy listens, and its process."""

    port: int
    pid: int
    ca_file: str = ""
    """PEM file of the CA of its certificate; empty: it speaks plain HTTP."""
    token: str = ""
    """Key that its clients send; empty: none."""
    metrics: int = 0
    """Port of its /metrics; 0: none is read."""


class Cell(NamedTuple):
    """What all proxies are measured with, one after the other."""

    mix: str
    fleet: str
    load: str
    """Per cent of the capacity, or CLOSED."""


class Result(NamedTuple):
    """One proxy's numbers in one cell, with one seed."""

    cell: Cell
    proxy: str
    seed: int
    requests: int
    ttft_ms: float
    """Mean, as the clients see it."""
    p50_ms: float
    p99_ms: float
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
    system = text_of(rng, SYSTEM_BYTES)
    return [[_question(rng, system) for _ in range(CHATS)] for _ in range(CLIENTS)]


def two_applications(rng: random.Random) -> Sessions:
    """Two system prompts, in turn."""
    systems = [text_of(rng, SYSTEM_BYTES) for _ in range(2)]
    return [
        [_question(rng, systems[(number + turn) % 2]) for turn in range(CHATS)]
        for number in range(CLIENTS)
    ]


def agents(rng: random.Random) -> Sessions:
    """Chats that grow by each turn; all have the same tools' text."""
    system = text_of(rng, SYSTEM_BYTES // 2)
    sessions = []
    for _ in range(CLIENTS):
        turns = [_question(rng, system)]
        for _ in range(CHATS - 1):
            content = text_of(rng, STEP_BYTES)
            turns.append(_turn([{"role": "user", "content": content}]))
        sessions.append(turns)
    return sessions


def even(rng: random.Random) -> Sessions:
    """Prompts that have nothing in common, all as long."""
    return [
        [_question(rng, text_of(rng, SYSTEM_BYTES)) for _ in range(CHATS)] for _ in range(CLIENTS)
    ]


def nothing_shared(rng: random.Random) -> Sessions:
    """Prompts that have nothing in common, short and long ones."""
    return [
        [
            _turn([{"role": "user", "content": text_of(rng, rng.randint(LEAST_BYTES, MOST_BYTES))}])
            | {"anew": True}
            for _ in range(CHATS)
        ]
        for _ in range(CLIENTS)
    ]


MIXES: dict[str, Callable[[random.Random], Sessions]] = {
    "shared": shared,
    "agents": agents,
    "two-applications": two_applications,
    "nothing-shared": nothing_shared,
    "even": even,
}


def arriving(sessions: Sessions, rate: float, rng: random.Random) -> Sessions:
    """The same turns with the times at which they are sent, `rate` a second in the mean: the first
    turns of all sessions, in an order drawn at random, then the second ones. A turn that begins a
    chat of its own is a session of its own."""
    at_s, timed = 0.0, [list[dict[str, Any]]() for _ in sessions]
    for number in range(max(map(len, sessions))):
        for place in rng.sample(range(len(sessions)), len(sessions)):
            if number < len(sessions[place]):
                at_s += rng.expovariate(rate)
                timed[place].append(sessions[place][number] | {"at_s": at_s})
    chats: Sessions = []
    for turns in timed:
        for turn in turns:
            if turn.get("anew") or turn is turns[0]:
                chats.append([])
            chats[-1].append(turn)
    return chats


def _question(rng: random.Random, system: str) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": text_of(rng, QUESTION_BYTES)},
    ]
    return _turn(messages) | {"anew": True}


def _turn(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": ANSWER_TOKENS}


def text_of(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(_LETTERS, k=size))


def poisson(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Times of arrivals, `rate` a second in the mean."""
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(rate)


# Proxies: each starts its process


async def kvroute(stack: AsyncExitStack, engines: list[Engine]) -> Port:
    """`kvroute serve` with its gateway, relays and NATS server inside."""
    port, metrics = free_port(), free_port()
    ports = {"gateway": {"listen": f"127.0.0.1:{port}"}}
    ports["metrics"] = {"listen": f"127.0.0.1:{metrics}"}
    pid, _ = await started_router(stack, engines, **ports)
    return Port(port, pid, metrics=metrics)


async def kvroute_locked(stack: AsyncExitStack, engines: list[Engine]) -> Port:
    """The same with TLS and keys on every port."""
    room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
    port, authority = free_port(), Authority()
    tls = written(room, authority.issue())
    (ca_file := room / "ca.pem").write_bytes(authority.pem)
    pid, _ = await started_router(
        stack,
        engines,
        Port(port, 0, str(ca_file), "client-token"),
        gateway={"listen": f"127.0.0.1:{port}"},
        tls={
            "certificate_file": tls.certificate_file or "",
            "key_file": tls.key_file or "",
        },
        keys={"file": write_keys(room, identity("client", rights=("route", "report", "observe")))},
    )
    return Port(port, pid, str(ca_file), "client-token")


async def kvroute_gateway(stack: AsyncExitStack, engines: list[Engine]) -> Port:
    """`kvroute gateway` before a `kvroute serve` whose CPU does not count."""
    port = free_port()
    _, router = await started_router(stack, engines)
    command = ["-m", "router.app.main", "gateway", "--router", f"127.0.0.1:{router}"]
    command += ["--listen", f"127.0.0.1:{port}", "--log-level", "error"]
    process = await started(stack, sys.executable, *command)
    await _serves(port)
    return Port(port, process.pid)


async def started_router(
    stack: AsyncExitStack, engines: list[Engine], lock: Port | None = None, **more: dict[str, Any]
) -> tuple[int, int]:
    """A router with relays inside; its pid and its port. lock: the CA and the key of its callers;
    None: it needs none."""
    room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
    grpc = free_port()
    folder = engines[0].tokenizer or str(make_folder(room / "model"))
    config = {
        "grpc": {"listen": f"127.0.0.1:{grpc}"},
        "metrics": {"listen": ""},
        "models": [{"name": MODEL, "prompts": {"folder": folder}}],
        "workers": [engine.settings for engine in engines],
        **more,
    }
    (room / "kvroute.json").write_text(json.dumps(config))
    command = ["-m", "router.app.main", "serve", "-c", str(room / "kvroute.json")]
    process = await started(stack, sys.executable, *command, "--log-level", "error")
    credentials = token = None
    if lock is not None:
        ca = await asyncio.to_thread(Path(lock.ca_file).read_bytes)
        credentials, token = ssl_channel_credentials(ca), lock.token
    async with KvRouteClient(f"127.0.0.1:{grpc}", credentials=credentials, token=token) as client:
        await workers_ready(client, len(engines))
    return process.pid, grpc


async def robin(stack: AsyncExitStack, engines: list[Engine]) -> Port:
    """A plain round robin on aiohttp."""
    return await in_turn(stack, [engine.url for engine in engines])


async def in_turn(stack: AsyncExitStack, urls: list[str], mirror: str = "") -> Port:
    """A round robin over URLs. mirror: URL that gets a copy of each request; empty: none."""
    process = await started(stack, sys.executable, str(SIDE), "robin", mirror, *urls, reads=True)
    assert process.stdout is not None
    return Port(int(await process.stdout.readline()), process.pid)


async def sglang_router(stack: AsyncExitStack, engines: list[Engine]) -> Port:
    """By its default policy, which is cache_aware."""
    return await _proxy(stack, engines, "sglang-router", "launch", *BALANCED)


async def vllm_router(stack: AsyncExitStack, engines: list[Engine]) -> Port:
    """By its default policy, which is cache_aware."""
    return await _proxy(stack, engines, "vllm-router", *BALANCED)


async def vllm_router_kv(stack: AsyncExitStack, engines: list[Engine]) -> Port:
    """By KV events, from the engines' own sockets."""
    flags = ["--policy", "kv_aware", "--kv-event-model", MODEL]
    for engine in engines:
        flags += ["--kv-event-source", f"{engine.url}={engine.events}"]
        flags += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
    return await _proxy(stack, engines, "vllm-router", *flags)


PROXIES = {
    "kvroute": kvroute,
    "kvroute gateway alone": kvroute_gateway,
    "kvroute keys TLS": kvroute_locked,
    "sglang-router": sglang_router,
    "vllm-router": vllm_router,
    "vllm-router kv_aware": vllm_router_kv,
    ROBIN: robin,
}
AGAIN = " again"
"""Ends the name of a proxy's second run."""


async def _proxy(stack: AsyncExitStack, engines: list[Engine], name: str, *flags: str) -> Port:
    port, metrics = free_port(), free_port()
    program = python_of(*PROXIED).with_name(name)
    process = await started(
        stack,
        *(str(program), *flags, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
        *("--log-level", "error", "--worker-urls", *(engine.url for engine in engines)),
    )
    await _serves(port)
    return Port(port, process.pid)


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


async def capacity(mix: str) -> float:
    """Chats a second that an even fleet serves of a mix behind a round robin, when engines are
    never idle."""
    sessions = [
        turns
        for number in range(SATURATED)
        for turns in MIXES[mix](random.Random(f"capacity {number} {mix}"))
    ]
    async with AsyncExitStack() as stack:
        engines = await started_engines(stack, FLEETS["even"])
        done = await clients(await robin(stack, engines), sessions)
    return len(done["answers"]) / float(done["took_s"])


async def measured(cell: Cell, proxy: str, seed: int, rate: float) -> Result:
    """One proxy in one cell. rate: chats a second, where the load is open."""
    rng = random.Random(f"{seed} {cell.mix}")
    sessions = MIXES[cell.mix](rng)
    if cell.load != CLOSED:
        sessions = arriving(sessions, rate, rng)
    async with AsyncExitStack() as stack:
        engines = await started_engines(stack, FLEETS[cell.fleet])
        port = await PROXIES[proxy.removesuffix(AGAIN)](stack, engines)
        await clients(port, [[_question(random.Random(0), "warm")]])
        before_s, began_s = cpu_s(port.pid), await first_token_s(engines)
        done = await clients(port, sessions)
        spent_s = cpu_s(port.pid) - before_s
        engine_s = await first_token_s(engines) - began_s
    return result_of(cell, proxy, seed, done, engine_s, spent_s)


def result_of(
    cell: Cell, proxy: str, seed: int, done: Any, engine_s: float, spent_s: float
) -> Result:
    """done: of clients(). engine_s: the engines' times to first tokens; spent_s: CPU of the proxy;
    both in sum."""
    answers = done["answers"]
    return Result(
        cell,
        proxy,
        seed,
        len(answers),
        *first_tokens_ms(answers),
        round(engine_s * 1e3 / len(answers), 1),
        round(len(answers) / done["took_s"], 2),
        cached_share(answers),
        round(spent_s * 1e3 / len(answers), 2),
    )


def first_tokens_ms(answers: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Mean, median and 99th percentile of the clients' time to the first token."""
    ttft_ms = sorted(answer["ttft_s"] * 1e3 for answer in answers)
    p99_ms = ttft_ms[ceil(0.99 * len(ttft_ms)) - 1]
    return round(fmean(ttft_ms), 1), round(median(ttft_ms), 1), round(p99_ms, 1)


def cached_share(answers: Sequence[Mapping[str, Any]]) -> float:
    """Tokens that came from caches / all tokens of the prompts."""
    prompts = sum(answer["prompt_tokens"] for answer in answers)
    return round(sum(answer["cached_tokens"] for answer in answers) / prompts, 3)


async def started_engines(stack: AsyncExitStack, slow: int) -> list[Engine]:
    words = ("engines", str(ENGINES), str(slow))
    process = await started(stack, sys.executable, str(SIDE), *words, reads=True)
    assert process.stdout is not None
    engines = []
    for settings in json.loads(await process.stdout.readline()):
        del settings["slots"]
        engines.append(
            Engine(settings["address"], settings["events"], settings["replay"], settings)
        )
    return engines


async def first_token_s(engines: list[Engine]) -> float:
    """Times to the first token of all engines together, since their start."""
    name = "vllm:time_to_first_token_seconds_sum"
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for engine in engines:
            async with http.get(f"{engine.url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith(name))
    return total


async def clients(port: Port, sessions: Sessions) -> Any:
    pipe = asyncio.subprocess.PIPE
    words = ("clients", str(port.port), port.ca_file, port.token)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SIDE), *words), stdin=pipe, stdout=pipe
    )
    output, _ = await process.communicate(json.dumps(sessions).encode())
    if process.returncode:
        raise RuntimeError("a client failed")
    return json.loads(output)


def table_of(results: list[Result]) -> Table:
    """A row for each cell and proxy: medians over its seeds."""
    table = Table("mix", "fleet", "load", "proxy", title="beside other routers", box=None)
    columns = ("TTFT ms", "p50", "p99", "at the engine", "requests/s", "cached", "CPU ms", "ratio")
    for column in columns:
        table.add_column(column, justify="right")
    runs: dict[tuple[Cell, str], list[Result]] = {}
    for one in results:
        runs.setdefault((one.cell, one.proxy), []).append(one)
    for (cell, proxy), seeds in runs.items():

        def middle(name: str, of: list[Result] = seeds) -> float:
            return median(getattr(one, name) for one in of)

        plain = runs.get((cell, ROBIN))
        ratio = f"{middle('cpu_ms') / middle('cpu_ms', plain):.2f}" if plain else ""
        times = [f"{middle(name):,.0f}" for name in ("ttft_ms", "p50_ms", "p99_ms")]
        table.add_row(
            *(*cell, proxy, *times, f"{middle('ttft_engine_ms'):,.0f}", f"{middle('rps'):.1f}"),
            *(f"{middle('cached_share'):.1%}", f"{middle('cpu_ms'):.1f}", ratio),
        )
    return table


async def run(
    cells: list[Cell], proxies: list[str], again: str, seeds: int, console: Console
) -> None:
    results: list[Result] = []
    rates: dict[str, float] = {}
    if again in proxies:
        proxies = [*proxies, again + AGAIN]
    for cell in cells:
        if cell.load != CLOSED and cell.mix not in rates:
            with console.status(f"{cell.mix}: capacity"):
                rates[cell.mix] = await capacity(cell.mix)
            console.print(f"{cell.mix}: an even fleet serves {rates[cell.mix]:.1f} chats a second")
        for seed in range(1, seeds + 1):
            for proxy in proxies:
                rate = 0.0
                if cell.load != CLOSED:
                    share = 1.0 - FLEETS[cell.fleet] / ENGINES / 2
                    rate = rates[cell.mix] * share * int(cell.load) / 100
                with console.status(f"{' '.join(cell)}: {proxy}"):
                    results.append(await measured(cell, proxy, seed, rate))
                console.print(table_of(results[-1:]))
    console.print(table_of(results))
    kept = [one._asdict() | {"cell": one.cell._asdict()} for one in results]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateways_compared")
    parser.add_argument("--mixes", default=",".join(MIXES), help="some of %(default)s")
    parser.add_argument("--proxies", default=",".join(PROXIES), help="some of %(default)s")
    parser.add_argument("--fleets", default="even", help="some of even,uneven")
    parser.add_argument("--loads", default="60,90", help="per cent of the capacity, or closed")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each proxy in each cell")
    parser.add_argument("--again", default="kvroute", help="proxy that is measured twice")
    given = parser.parse_args()
    named = (given.mixes, given.fleets, given.loads)
    cells = [Cell(*one) for one in product(*(names.split(",") for names in named))]
    console = Console(width=140)
    asyncio.run(run(cells, given.proxies.split(","), given.again, given.seeds, console))


if __name__ == "__main__":
    main()
