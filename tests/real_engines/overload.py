"""Twice the load that two real vLLM engines have slots for: with the router's queue, and without.

usage: python -m tests.real_engines.overload [--seconds 40] [--seed N]
Ends with one JSON line on standard output. Needs what install.sh made.

Each caller sends one request after the other, and again after a refusal. Half of the callers are in
a band of priority 100, half in the lowest. The engines' caches hold fewer running requests than
their slots allow, so that an engine which takes all that it has slots for preempts.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from typing_extensions import override

from kvroute.client import Overloaded
from tests.real_engines.engines import MODEL, SLOTS, Engine, Prompt, Vllm
from tests.real_engines.stage import Ground, Stage, StageBroken, a_stage, to_the_end

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "real-engines"
BLOCKS = 48
"""Of 32 tokens, an engine: five of the requests below fit whole, of eight slots."""
PROMPT_TOKENS = 96
OUTPUT_TOKENS = 160
CALLERS = 2 * 2 * SLOTS
"""Twice the slots of two engines."""
URGENT = 100
ROUTE_LIMIT_S = 120.0
QUEUE = {
    "with": {
        "timeout_s": 100.0,
        "bands": [
            {"name": "batch", "from_priority": 0, "weight": 1},
            {"name": "urgent", "from_priority": URGENT, "weight": 4},
        ],
    },
    "without": {"max_waiting": 0},
}
RETRY_S = 0.5
PREEMPTIONS_MAX = 0.05
"""Of a request, with the queue."""
PREEMPTIONS_WITHOUT_MIN = 0.2
"""Of a request, without: else the load shows nothing."""

log = logging.getLogger("real_engines")


class SlotsUnknown(Vllm):
    """An engine whose relay is given no slots, so that a router without a queue refuses nothing."""

    @override
    def relay_flags(self) -> Sequence[str]:
        flags = list(super().relay_flags())
        place = flags.index("--slots")
        return flags[:place] + flags[place + 2 :]


def with_slots(ground: Ground) -> list[Engine]:
    """Two engines of known slots."""
    return [ground.vllm(name, blocks=BLOCKS) for name in ("vllm-one", "vllm-two")]


def without_slots(ground: Ground) -> list[Engine]:
    """Two engines of unknown slots."""
    where = (ground.build, ground.logs, ground.sockets, ground.session)
    return [SlotsUnknown(name, *where, blocks=BLOCKS) for name in ("vllm-one", "vllm-two")]


@dataclass
class Band:
    """What the callers of one priority measured."""

    first_token_s: list[float] = field(default_factory=list)
    refused: int = 0

    def share_s(self, share: float) -> float:
        """The time to the first token that this share of the requests had at most."""
        times = sorted(self.first_token_s)
        return round(times[int(share * (len(times) - 1))], 2) if times else float("inf")


@dataclass
class Measured:
    """What one run came to."""

    queue: str
    preemptions: float
    urgent: Band
    batch: Band

    @property
    def requests(self) -> int:
        return len(self.urgent.first_token_s) + len(self.batch.first_token_s)

    def shown(self) -> dict[str, object]:
        """The run in the last line of the output."""
        return {
            "queue": self.queue,
            "requests": self.requests,
            "preemptions": self.preemptions,
            "urgent_first_token_s": [self.urgent.share_s(share) for share in (0.5, 0.99)],
            "refused": self.urgent.refused + self.batch.refused,
            "batch_first_token_s": [self.batch.share_s(share) for share in (0.5, 0.99)],
        }


@dataclass
class Load:
    """Callers that keep the fleet at twice its slots."""

    stage: Stage
    session: aiohttp.ClientSession
    """Without kept connections: an engine closes one that was idle, and its next request fails."""
    rng: random.Random
    ends_s: float
    bands: dict[int, Band] = field(default_factory=lambda: {0: Band(), URGENT: Band()})

    async def run(self) -> None:
        async with asyncio.TaskGroup() as callers:
            for number in range(CALLERS):
                callers.create_task(self.caller(URGENT if number % 2 else 0))

    async def caller(self, priority: int) -> None:
        while time.monotonic() < self.ends_s:
            tokens = self.rng.choices(range(3, 1000), k=PROMPT_TOKENS)
            try:
                await self.one(tokens, priority)
            except Overloaded as error:
                self.bands[priority].refused += 1
                await asyncio.sleep(error.retry_after_s or RETRY_S)

    async def one(self, tokens: Sequence[int], priority: int) -> None:
        """A request from the call of the router to the last token."""
        since_s = time.monotonic()
        async with self.stage.client.request(
            token_ids=tokens,
            model=MODEL,
            priority=priority,
            expected_output_tokens=OUTPUT_TOKENS,
            timeout_s=ROUTE_LIMIT_S,
        ) as request:
            engine = self.stage.engines[request.pick.worker_id]
            body = {
                "model": MODEL,
                "prompt": list(tokens),
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            url = f"{engine.address}/v1/completions"
            first = False
            async with self.session.post(url, json=body, headers=request.pick.headers) as got:
                got.raise_for_status()
                async for chunk in got.content.iter_any():
                    if not first and b"data: {" in chunk:
                        first = True
                        self.bands[priority].first_token_s.append(time.monotonic() - since_s)
                        await request.prefill_done()
            request.output_tokens = OUTPUT_TOKENS


async def preemptions(stage: Stage) -> float:
    """What the engines have preempted so far."""
    sums = 0.0
    for engine in stage.engines.values():
        counted = [
            count
            for name, count in (await engine.metrics()).items()
            if name.startswith("vllm:num_preemptions_total")
        ]
        if not counted:
            raise StageBroken(f"{engine.worker_id} counts no preemptions")
        sums += sum(counted)
    return sums


async def run(kind: str, seconds: float, seed: int) -> Measured:
    """One run; what was measured."""
    logs = BUILD / "logs" / f"overload-{kind}"
    logs.mkdir(parents=True, exist_ok=True)
    config = logs / "router.yaml"
    config.write_text(json.dumps({"queue": QUEUE[kind]}))
    fleet = with_slots if kind == "with" else without_slots
    async with a_stage(BUILD, logs, fleet, ("--config", str(config))) as stage:
        for engine in stage.engines.values():  # the first request loads code
            await engine.ask(Prompt(tuple(range(3, 40)), 4, salt="warm"), {})
        before = await preemptions(stage)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            load = Load(stage, session, random.Random(seed), time.monotonic() + seconds)
            await load.run()
        preempted = await preemptions(stage) - before
        stage.check_alive()
    return Measured(kind, preempted, load.bands[URGENT], load.bands[0])


def faults_of(with_queue: Measured, without: Measured) -> list[str]:
    """What did not come out as it must."""
    faults = []
    urgent_s, batch_s = with_queue.urgent.share_s(0.5), with_queue.batch.share_s(0.5)
    if not urgent_s < 0.5 * batch_s:
        faults.append(f"bands: urgent requests wait {urgent_s} s, the others {batch_s} s")
    if with_queue.preemptions > PREEMPTIONS_MAX * with_queue.requests:
        faults.append(f"{with_queue.preemptions:.0f} preemptions with the queue")
    if without.preemptions < PREEMPTIONS_WITHOUT_MIN * without.requests:
        faults.append(f"only {without.preemptions:.0f} preemptions without the queue")
    return faults


async def run_all(seconds: float, seed: int) -> int:
    """Both runs; returns the exit code."""
    runs = {}
    for kind in QUEUE:
        runs[kind] = await run(kind, seconds, seed)
        log.info("%s", json.dumps(runs[kind].shown()))
    faults = faults_of(runs["with"], runs["without"])
    line = {"overload": [one.shown() for one in runs.values()], "faults": faults}
    sys.stdout.write(json.dumps(line) + "\n")
    return int(bool(faults))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines.overload")
    parser.add_argument("--seconds", type=float, default=40.0, help="of load, each run")
    parser.add_argument("--seed", type=int, default=1, help="of prompts")
    given = parser.parse_args()
    sys.exit(to_the_end(run_all(given.seconds, given.seed)))


if __name__ == "__main__":
    main()
