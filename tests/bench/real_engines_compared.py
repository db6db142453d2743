"""kvroute's gateway beside other routers, before two real vLLM engines on the CPU.

    python -m tests.bench.real_engines_compared [--mixes shared,agents,even] [--load 60]
        [--proxies kvroute,sglang-router] [--seeds 3] [--rounds 8]

Mixes, clients and the table are those of gateways_compared.py, with TURNS of each session. The
engines serve a tiny model with random weights; their caches are emptied before each run. Engines
and proxies share the machine's cores, as they would not elsewhere. After each run kvroute's times
to first tokens and between tokens, as predicted at the pick, are held against the measured ones
(`kvroute_prediction_ratio`). Needs what `make real-engines` installs;
`build/real-engines-compared.json` gets the results.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.bench.environments import BUILD
from tests.bench.gateways_compared import (
    AGAIN,
    MIXES,
    PROXIES,
    ROBIN,
    SATURATED,
    Cell,
    Engine,
    Result,
    Sessions,
    arriving,
    clients,
    first_token_s,
    result_of,
    table_of,
)
from tests.bench.gateways_compared_side import MODEL
from tests.bench.processes import cpu_s
from tests.real_engines.chat_model import make_room
from tests.real_engines.engines import Vllm
from tests.stage.prompts.captures import TEMPLATES

ENGINES = 2
BLOCKS = 1024
"""Of a cache, 32 tokens each: fewer than the prompts of any mix."""
CONTEXT = 16384
TURNS = 6
"""Of each session, the first ones."""
ENGINES_READY_S = 600.0
INSTALLED = BUILD / "real-engines"
RESULTS = BUILD / "real-engines-compared.json"
PREDICTIONS = "kvroute_prediction_ratio"


@asynccontextmanager
async def real_engines() -> AsyncIterator[list[tuple[Engine, Vllm]]]:
    """Two vLLM engines that serve the model of gateways_compared.py."""
    async with AsyncExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-")))
        folder = make_room(INSTALLED, room / "room", TEMPLATES["chatml"])
        session = await stack.enter_async_context(aiohttp.ClientSession())
        flags = ("--max-model-len", str(CONTEXT), "--served-model-name", MODEL)
        started = []
        for number in range(ENGINES):
            where = (room / "room", room, room, session)
            engine = Vllm(f"w{number}", *where, blocks=BLOCKS, flags=flags)
            stack.push_async_callback(engine.child.stop)
            await engine.child.start()
            settings = {
                "id": engine.worker_id,
                "engine": engine.name,
                "address": engine.address,
                "events": engine.events,
                "replay": engine.replay_of(0),
                "topic": "kv-events",
            }
            about = (engine.address, engine.events, engine.replay_of(0), settings, str(folder))
            started.append((Engine(*about), engine))
        async with asyncio.timeout(ENGINES_READY_S):
            for _, engine in started:
                while not await engine.answers():
                    if not engine.child.running:
                        raise RuntimeError(engine.child.last_words())
                    await asyncio.sleep(0.5)
        yield started


def sessions_of(mix: str, seed: object, rounds: int = 1) -> Sessions:
    rng = random.Random(f"{seed} {mix}")
    return [turns[:TURNS] for _ in range(rounds) for turns in MIXES[mix](rng)]


async def capacity(mix: str, engines: list[tuple[Engine, Vllm]]) -> float:
    """Chats a second of a mix behind a round robin, when the engines are never idle."""
    sessions = sessions_of(mix, "capacity", SATURATED)
    async with AsyncExitStack() as stack:
        done = await clients(await PROXIES[ROBIN](stack, [one for one, _ in engines]), sessions)
    return len(done["answers"]) / float(done["took_s"])


async def measured(
    engines: list[tuple[Engine, Vllm]],
    cell: Cell,
    proxy: str,
    seed: int,
    rate: float,
    rounds: int,
    console: Console,
) -> Result:
    sessions = arriving(
        sessions_of(cell.mix, seed, rounds), rate, random.Random(f"{seed} {cell.mix}")
    )
    ours = [one for one, _ in engines]
    async with AsyncExitStack() as stack:
        for _, engine in engines:
            await engine.reset()
        port = await PROXIES[proxy.removesuffix(AGAIN)](stack, ours)
        before_s, began_s = cpu_s(port.pid), await first_token_s(ours)
        done = await clients(port, sessions)
        spent_s, engine_s = cpu_s(port.pid) - before_s, await first_token_s(ours) - began_s
        if port.metrics:
            console.print(await predictions(port.metrics))
    return result_of(cell, proxy, seed, done, engine_s, spent_s)


async def predictions(port: int) -> str:
    """How measured times compare with those predicted at the pick, from a router's /metrics."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        text = await answer.text()
    samples = {
        (sample.name, sample.labels.get("of"), float(sample.labels.get("le", "nan"))): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == PREDICTIONS
        for sample in family.samples
    }
    sums = {of: value for (name, of, _), value in samples.items() if name.endswith("_sum")}
    said = []
    for of, total in sums.items():
        upto = {le: value for (_, each, le), value in samples.items() if each == of}
        if count := upto[inf]:
            exact, near = (upto[high] - upto[low] for low, high in ((0.9, 1.1), (0.75, 1.33)))
            said.append(
                f"{of}: measured / predicted {total / count:.2f} in the mean of {count:.0f},"
                f" {exact / count:.0%} within 0.9 to 1.1, {near / count:.0%} within 0.75 to 1.33"
            )
    return "; ".join(said)


async def run(
    mixes: Sequence[str],
    proxies: Sequence[str],
    load: int,
    seeds: int,
    rounds: int,
    console: Console,
) -> None:
    results: list[Result] = []
    async with real_engines() as engines:
        for mix in mixes:
            rate = await capacity(mix, engines)
            console.print(f"{mix}: two engines serve {rate:.2f} chats a second")
            cell = Cell(mix, "real vLLM", str(load))
            for seed in range(1, seeds + 1):
                for proxy in [*proxies, proxies[0] + AGAIN]:
                    share = rate * load / 100
                    results.append(
                        await measured(engines, cell, proxy, seed, share, rounds, console)
                    )
                    console.print(table_of(results[-1:]))
    console.print(table_of(results))
    kept = [one._asdict() | {"cell": one.cell._asdict()} for one in results]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.real_engines_compared")
    parser.add_argument("--mixes", default="shared,agents,even", help="some of " + ",".join(MIXES))
    parser.add_argument("--proxies", default=f"kvroute,sglang-router,{ROBIN}")
    parser.add_argument("--load", type=int, default=60, help="per cent of the engines' capacity")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each proxy with each mix")
    parser.add_argument("--rounds", type=int, default=1, help="sessions of this many mixes at once")
    given = parser.parse_args()
    if not INSTALLED.exists():
        sys.exit("make real-engines installs the engines")
    about = (
        given.mixes.split(","),
        given.proxies.split(","),
        given.load,
        given.seeds,
        given.rounds,
    )
    asyncio.run(run(*about, Console(width=140)))


if __name__ == "__main__":
    main()
