"""Two real vLLM nodes of one data-parallel group under hybrid load balancing, two ranks each.

usage: python -m tests.real_engines.ranks [--count 48] [--seed N]
Ends with one JSON line on standard output. Needs what install.sh made.

vLLM numbers the ranks through the group in its events, their ports and its metrics, and within a
node in the header X-data-parallel-rank. With a rank that is another one, predictions are wrong.
"""

import argparse
import json
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.real_engines.drive import Driver
from tests.real_engines.engines import Engine, EngineRefused, Prompt
from tests.real_engines.stage import Ground, Stage, a_stage, to_the_end
from tests.real_engines.verdicts import Judge
from tests.stage.waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "real-engines"
NODES = ("first", "second")
RANKS = 2
"""Of each node: vLLM makes a node of one rank an external load balancer's."""
BLOCKS = 64

log = logging.getLogger("real_engines")


def group(ground: Ground) -> list[Engine]:
    """The two nodes; the first one has the group's coordinator."""
    port = str(free_port())

    def node(number: int) -> Engine:
        first = number * RANKS
        flags = (
            *("--data-parallel-size", str(len(NODES) * RANKS)),
            *("--data-parallel-size-local", str(RANKS), "--data-parallel-start-rank", str(first)),
            *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port),
            "--data-parallel-hybrid-lb",
        )
        return ground.vllm(NODES[number], blocks=BLOCKS, ranks=RANKS, first_rank=first, flags=flags)

    return [node(number) for number in range(len(NODES))]


async def answered(engine: Engine, rank: int) -> int | None:
    """The engine's number of the rank that answers a request for this rank of its node; None: none
    does."""
    before = await _answers(engine)
    try:
        await engine.ask(Prompt((3, 4, 5), 1), {"X-data-parallel-rank": str(rank)})
    except EngineRefused:
        return None
    grown = await _answers(engine)
    grown.subtract(before)
    (number,) = (number for number, count in grown.items() if count)
    return number


async def _answers(engine: Engine) -> Counter[int]:
    """Requests that each rank has answered, by the engine's number of the rank."""
    counts = Counter[int]()
    for line, count in (await engine.metrics()).items():
        if line.startswith("vllm:request_success_total{"):
            counts[int(re.findall(r'engine="(\d+)"', line)[0])] += int(count)
    return counts


async def faults_of(stage: Stage, judge: Judge) -> list[str]:
    """What did not come out as it must."""
    faults = [f"{one.worker}: {one.verdict}" for one in judge.unexplained(quiet=True)]
    used = Counter(one.worker for one in judge.samples)
    places = {(name, rank) for name in NODES for rank in range(RANKS)}
    if set(used) != places:
        faults.append(f"requests went to {sorted(used)}")
    for status in await stage.workers():
        faults += [f"{status.worker_id}/{status.dp_rank}: {text}" for text in status.warnings]
    for name, engine in stage.engines.items():
        numbers = [await answered(engine, rank) for rank in range(RANKS + 1)]
        log.info("%s: ranks 0 to %d of the header are the engine's %s", name, RANKS, numbers)
        if numbers != [engine.first_rank + rank for rank in range(RANKS)] + [None]:
            faults.append(f"{name}: the header's ranks are the engine's {numbers}")
    return faults


async def run(count: int, seed: int) -> int:
    """The whole run; returns the exit code."""
    judge = Judge()
    async with a_stage(BUILD, BUILD / "logs" / "ranks", group) as stage:
        driver = Driver(stage, judge, random.Random(seed))
        await driver.quiet(count)
        texts: Sequence[tuple[int, ...]] = [driver.tokens(size) for size in (64, 130)]
        await driver.check("ranks", texts)
        faults = await faults_of(stage, judge)
        stage.check_alive()
    verdicts = Counter(one.verdict for one in judge.samples)
    served = Counter(f"{name}/{rank}" for name, rank in (one.worker for one in judge.samples))
    line = {"ranks": {"requests": len(judge.samples), **verdicts, "served": served}}
    sys.stdout.write(json.dumps(line | {"faults": faults}) + "\n")
    return int(bool(faults))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines.ranks")
    parser.add_argument("--count", type=int, default=48, help="requests, before the last check")
    parser.add_argument("--seed", type=int, default=1, help="of prompts")
    given = parser.parse_args()
    sys.exit(to_the_end(run(given.count, given.seed)))


if __name__ == "__main__":
    main()
