"""Envoy with kvroute's picker, with that of another checkout, and with least_request alone.

    python -m tests.bench.envoy_compared [--before FOLDER] [--mixes agents,nothing] [--seeds 1,2]

Each picker gets each mix with engines of its own, started anew: ENGINES stand-ins, with the step
times of a 70B model in real time, and a token a byte. Envoy is that of build/envoy (`make envoy`)
with one thread, and the configuration that the picker's own `kvroute envoy-config` prints. Pickers
take turns within a mix and seed, and get the same arrivals; a request that fails ends the run. A
run takes a minute for each picker, mix and seed. Prints a table, and writes
build/envoy-compared.json. No part of `make bench`.

Compile the modules of each checkout before (`python -m compileall -q FOLDER`), as an installed
package has them: else its memory has the compiler's rests.

--before: a checkout of kvroute with its environment in .venv, whose picker is the second column.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
import yaml
from rich.console import Console
from rich.table import Table

from tests.bench.environments import BUILD
from tests.bench.gateways_compared import (
    Port,
    Sessions,
    cached_share,
    clients,
    first_tokens_ms,
    poisson,
    text_of,
)
from tests.bench.processes import cpu_s, rss_mib, started
from tests.stage.waiting import free_port

ENGINES = 4
MODEL = "stand-in"
FLEET = (
    *("--engines", str(ENGINES), "--model", MODEL, "--profile", "llama-70b-4xh100"),
    *("--block-size", "16", "--blocks", "3072", "--engine-option", "max_num_seqs=256"),
)
"""49,152 tokens a cache: the agents' chats fit, if each stays where it was."""
ANSWER_TOKENS = 32
USERS = 32
TURNS = 8
RATES = {"system": 24.0, "nothing": 12.0}
"""Requests a second."""
READY_S = 60.0
SETTLED_S = 4.0
"""For the picker's first facts, and Envoy's first look at its health."""
TREE = Path(__file__).parents[2]
ENVOY = BUILD / "envoy" / "envoy" / "_bin" / "envoy"
RESULTS = BUILD / "envoy-compared.json"
PLAIN = "least_request"


class Result(NamedTuple):
    """One picker in one mix, with one seed."""

    mix: str
    picker: str
    seed: int
    requests: int
    ttft_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    whole_ms: float
    cached_share: float
    picker_cpu_s: float
    """Of 1,000 requests, with the picker's children; and so below."""
    envoy_cpu_s: float
    picker_rss_mib: float


# Mixes of chats


def agents(rng: random.Random, seconds: float) -> Sessions:
    """USERS chats at a time, which grow by 500 to 700 bytes and an answer a turn; a user thinks for
    1 to 3 s, and begins another chat after TURNS turns. The same 256 bytes are in front of all."""
    system = text_of(rng, 256)
    sessions = []
    for _ in range(USERS):
        turns = []
        for number in range(int(seconds)):  # more than anyone gets to
            is_first = number % TURNS == 0
            turn = _turn(text_of(rng, rng.randint(500, 700)), system if is_first else "")
            thinks_s = rng.uniform(1, 3) if number else rng.uniform(0, 3)
            turns.append(turn | {"anew": is_first, "think_s": thinks_s, "until_s": seconds})
        sessions.append(turns)
    return sessions


def system(rng: random.Random, seconds: float) -> Sessions:
    """One system prompt of 4 KiB, and a question of 80 to 200 bytes."""
    shared = text_of(rng, 4096)
    return [
        [_turn(text_of(rng, rng.randint(80, 200)), shared) | {"at_s": at_s}]
        for at_s in poisson(rng, RATES["system"], seconds)
    ]


def nothing(rng: random.Random, seconds: float) -> Sessions:
    """Prompts of 1 to 3 KB that have nothing in common."""
    return [
        [_turn(text_of(rng, rng.randint(1000, 3000))) | {"at_s": at_s}]
        for at_s in poisson(rng, RATES["nothing"], seconds)
    ]


MIXES = {"agents": agents, "system": system, "nothing": nothing}


def _turn(content: str, system: str = "") -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, "max_tokens": ANSWER_TOKENS}


# A run


async def measured(mix: str, picker: str, tree: Path | None, seed: int, seconds: float) -> Result:
    """One picker in one mix. tree: the checkout of the picker; None: there is none."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-bench-"))
        log = stack.enter_context((Path(folder) / "log").open("wb"))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = Path(folder) / "kvroute.yaml"
        command = (*_kvroute(TREE), "simulate", *FLEET, "--write-config", str(fleet))
        await started(stack, *command, output=log)
        engines = await _engines(fleet)
        port, admin, picker, metrics = (free_port() for _ in range(4))
        config = _envoy_config(tree, engines, port, admin, picker)
        pids: list[int] = []
        if tree is not None:
            serve = (*_kvroute(tree), "serve", "--config", str(fleet), "--log-level", "warning")
            serve += ("--grpc-listen", f"127.0.0.1:{free_port()}")
            serve += (
                "--metrics-listen",
                f"127.0.0.1:{metrics}",
                "--picker-listen",
                f"127.0.0.1:{picker}",
            )
            pids.append((await started(stack, *serve, output=log)).pid)
            await _answers(http, f"http://127.0.0.1:{metrics}/metrics", "kvroute_ready 1")
        (Path(folder) / "envoy.yaml").write_text(yaml.safe_dump(config))
        envoy = (str(ENVOY), "-c", str(Path(folder) / "envoy.yaml"), "--concurrency", "1")
        envoy += ("--use-dynamic-base-id", "--disable-hot-restart", "-l", "warning")
        pids.append((await started(stack, *envoy, output=log)).pid)
        await _answers(http, f"http://127.0.0.1:{admin}/ready")
        await asyncio.sleep(SETTLED_S)
        await clients(Port(port, 0), [[_turn(f"warm {number}") for number in range(3)]])
        before_s = [cpu_s(pid) for pid in pids]
        sessions = MIXES[mix](random.Random(f"{seed} {mix}"), seconds)
        answers = (await clients(Port(port, 0), sessions))["answers"]
        spent_s = [cpu_s(pid) - before for pid, before in zip(pids, before_s, strict=True)]
        rss = rss_mib(pids[0]) if tree is not None else 0.0
    return result_of(mix, picker, seed, answers, spent_s, rss)


def result_of(
    mix: str,
    picker: str,
    seed: int,
    answers: Sequence[Mapping[str, Any]],
    spent_s: Sequence[float],
    rss: float,
) -> Result:
    """spent_s: CPU of the picker, unless there is none, and of Envoy."""
    *picker_s, envoy_s = (spent * 1000 / len(answers) for spent in spent_s)
    return Result(
        *(mix, picker, seed, len(answers)),
        *first_tokens_ms(answers),
        fmean(answer["end_s"] * 1e3 for answer in answers),
        cached_share(answers),
        *(sum(picker_s), envoy_s, rss),
    )


def _kvroute(tree: Path) -> tuple[str, ...]:
    """The command of a checkout; this one's runs in the interpreter at hand."""
    if tree == TREE:
        return sys.executable, "-m", "router.app.main"
    return (str(tree / ".venv" / "bin" / "kvroute"),)


async def _engines(fleet: Path) -> list[str]:
    """Their addresses, host:port, once they serve."""
    async with asyncio.timeout(READY_S):
        while not fleet.exists():  # noqa: ASYNC110, ASYNC240  # another process makes it
            await asyncio.sleep(0.05)
    workers = yaml.safe_load(fleet.read_text())["workers"]  # noqa: ASYNC240
    return [worker["address"].removeprefix("http://") for worker in workers]


def _envoy_config(
    tree: Path | None, engines: list[str], port: int, admin: int, picker: int
) -> dict[str, Any]:
    """tree: of the command that makes it; None: Envoy balances alone."""
    command = [*_kvroute(tree or TREE), "envoy-config", "--listen", f"127.0.0.1:{port}"]
    command += ["--admin", f"127.0.0.1:{admin}", "--picker", f"127.0.0.1:{picker}"]
    for engine in engines:
        command += ["--worker", engine]
    config: dict[str, Any] = yaml.safe_load(subprocess.check_output(command))
    if tree is None:
        (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
        filters = chain["filters"][0]["typed_config"]["http_filters"]
        del filters[0]
        del config["static_resources"]["clusters"][1]
    return config


async def _answers(http: aiohttp.ClientSession, url: str, words: str = "") -> None:
    """Waits until this page is there, and has these words."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                async with http.get(url) as answer:
                    if answer.status == 200 and words in await answer.text():
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


# The report


def table_of(results: Sequence[Result]) -> Table:
    """Medians over the seeds. The last column: the picker's CPU over that of the second picker."""
    table = Table("mix", "picker", title="behind the same Envoy", box=None)
    for column in (
        *("requests", "TTFT ms", "p50", "p99", "whole ms", "cached", "picker CPU s/1,000"),
        *("Envoy's", "RSS MiB", "CPU ratio"),
    ):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.mix, one.picker), []).append(one)
    names = list(dict.fromkeys(one.picker for one in results))
    before = names[1] if len(names) > 1 and names[1] != PLAIN else ""
    for (mix, picker), runs in groups.items():
        second = groups.get((mix, before), [])
        ratio = ""
        if picker == results[0].picker and second:
            ratio = f"{_median(runs, 'picker_cpu_s') / _median(second, 'picker_cpu_s'):.2f}"
        table.add_row(
            *(mix, picker, f"{sum(one.requests for one in runs):,}"),
            *(f"{_median(runs, name):,.0f}" for name in Result._fields[4:8]),
            f"{_median(runs, 'cached_share'):.1%}",
            *(f"{_median(runs, name):.2f}" for name in ("picker_cpu_s", "envoy_cpu_s")),
            *(f"{_median(runs, 'picker_rss_mib'):.0f}", ratio),
        )
    return table


def _median(runs: Sequence[Result], field: str) -> float:
    return median(getattr(one, field) for one in runs)


async def run(
    mixes: list[str], seeds: list[int], seconds: float, pickers: dict[str, Path | None]
) -> None:
    console, results = Console(width=140), []
    for seed in seeds:
        for mix in mixes:
            for picker, tree in pickers.items():
                with console.status(f"{mix}: {picker}"):
                    results.append(await measured(mix, picker, tree, seed, seconds))
                console.print(json.dumps(results[-1]._asdict()), soft_wrap=True)
                RESULTS.write_text(json.dumps([one._asdict() for one in results], indent=1) + "\n")
    console.print(table_of(results))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.envoy_compared")
    parser.add_argument("--before", type=Path, help="a checkout of kvroute")
    parser.add_argument("--mixes", default=",".join(MIXES), help="some of %(default)s")
    parser.add_argument("--seeds", default="1,2", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    given = parser.parse_args()
    if not os.access(ENVOY, os.X_OK):
        parser.error(f"no Envoy at {ENVOY}: sh tests/envoy/install.sh")
    pickers: dict[str, Path | None] = {"kvroute": TREE}
    if given.before is not None:
        pickers[given.before.name] = given.before.resolve()
    pickers[PLAIN] = None
    seeds = [int(seed) for seed in given.seeds.split(",")]
    asyncio.run(run(given.mixes.split(","), seeds, given.seconds, pickers))


if __name__ == "__main__":
    main()
