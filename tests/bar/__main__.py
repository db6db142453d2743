"""Plays the cases by every policy, and prints which of the bar's bounds are broken.

python -m tests.bar [--only tuning | held-out | WORDS] [--guard TOKENS/MARGIN] [--seeds 5]

Each run is kept in build/bar.json under its case, policy, seed and guard, so that an interrupted
call goes on where it stopped; --again forgets them.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from router.config import GuardSettings
from simulator.results import share
from simulator.reuse import reuse_ceiling
from simulator.trace import Trace
from simulator.world import World
from tests.bar.cases import CASES, TUNING
from tests.router.story import Player, run_options

KEPT = Path("build/bar.json")
OTHERS = (
    "round-robin",
    "least-loaded",
    "power-of-two",
    "session-sticky",
    "dynamo-blocks",
    "conductor",
    "dynamo-unguarded",
)
GUARDED = ("dynamo-adaptive", "ttft")
DEFAULT = "dynamo-adaptive"
MOST = 1.10
"""Of a guarded policy's mean TTFT to the best of the others."""
MOST_OF_DEFAULT = 1.05
"""Of a guarded policy's mean TTFT to the default's."""
FITTING = "all fit"
"""Sessions whose blocks all fit."""
LEAST_OF_CEILING = 0.98
"""Of what one cache that never forgets would have reused of such sessions."""
BLOCK_SIZE = 64
"""Of the engines in tests/router/story.py."""


class Run(NamedTuple):
    """One seed of a case by a policy."""

    case: str
    policy: str
    seed: int
    guard: str
    """request_tokens/margin; empty for policies that are not guarded."""

    @property
    def key(self) -> str:
        return "|".join(map(str, self))


class Numbers(NamedTuple):
    """What came of a run."""

    ttft_ms: float
    p99_ms: float
    hit: float
    moved: float
    """Share of the picks that the guard moved."""


class Judged(NamedTuple):
    """A case."""

    ratio: float
    """The default's mean TTFT to the best of the others."""
    broken: int
    told: str
    """A line about it."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bar", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--guard", default="", help="request_tokens/margin; else the defaults")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args(arguments)
    default = GuardSettings()
    guard = asked.guard or f"{default.request_tokens:g}/{default.margin:g}"
    names = [name for name in CASES if _wanted(name, asked.only)]
    kept: dict[str, list[float]] = {}
    if KEPT.exists() and not asked.again:
        kept = json.loads(KEPT.read_text())
    wanted = [run for name in names for run in _runs(name, asked.seeds, guard)]
    missing = [run for run in wanted if run.key not in kept]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(play, run): run for run in missing}
        for future in as_completed(futures):
            kept[futures[future].key] = list(future.result())
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept))
    judged = [_judged(name, asked.seeds, guard, kept) for name in names]
    sys.stdout.writelines(f"{case.told}\n" for case in judged)
    worst = max(case.ratio for case in judged)
    broken = sum(case.broken for case in judged)
    sys.stdout.write(f"guard {guard}: worst {worst:.3f} of {MOST:.2f}, {broken} bounds broken\n")
    return 1 if broken else 0


def play(run: Run) -> Numbers:
    """One run, in virtual time."""
    player = Player()
    for line in CASES[run.case]:
        player.play(line)
        if line.startswith("fleet"):
            player.story.rng = random.Random(f"{run.case} {run.seed}")
    options = run_options(player.story.options, run.policy, [])
    routing = options.routing
    if run.guard:
        tokens, margin = map(float, run.guard.split("/"))
        guard = GuardSettings(request_tokens=tokens, margin=margin)
        routing = msgspec.structs.replace(routing, guard=guard)
    requests = sorted(player.story.requests, key=lambda request: request.arrival_s)
    world = World(replace(options, seed=run.seed, routing=routing), Trace("bar", requests))
    result = world.run()
    moved = sum(router.core.guarded for router in world.fleet.routers)
    return Numbers(
        1e3 * float(np.nanmean(result.ttft_s)),
        1e3 * float(np.nanpercentile(result.ttft_s, 99)),
        share(result.cached_tokens, result.prompt_tokens),
        moved / len(requests),
    )


def _wanted(name: str, only: str) -> bool:
    if only in ("tuning", "held-out"):
        return (name in TUNING) == (only == "tuning")
    return only in name


def _runs(case: str, seeds: int, guard: str) -> Iterator[Run]:
    for seed in range(seeds):
        for policy in OTHERS:
            yield Run(case, policy, seed, "")
        for policy in GUARDED:
            yield Run(case, policy, seed, guard)


def _judged(case: str, seeds: int, guard: str, kept: dict[str, list[float]]) -> Judged:
    def of(policy: str, about: str = "") -> Numbers:
        runs = [Numbers(*kept[Run(case, policy, seed, about).key]) for seed in range(seeds)]
        return Numbers(*(median(column) for column in zip(*runs, strict=True)))

    others = {policy: of(policy) for policy in OTHERS}
    best = min(others, key=lambda policy: others[policy].ttft_ms)
    least_ms = others[best].ttft_ms
    guarded = {policy: of(policy, guard) for policy in GUARDED}
    default = guarded[DEFAULT]
    broken = []
    parts = [f"{case:54} best {best} {least_ms:.0f}"]
    for policy, ours in guarded.items():
        ratio = ours.ttft_ms / least_ms
        if ratio > MOST:
            broken.append(f"{policy} {ratio:.2f} of the best")
        if ours.ttft_ms > MOST_OF_DEFAULT * default.ttft_ms:
            broken.append(f"{policy} {ours.ttft_ms / default.ttft_ms:.2f} of the default")
        if case.endswith(FITTING):
            sticky_ms = others["session-sticky"].p99_ms
            ceiling = _ceiling(case)
            if ours.hit < LEAST_OF_CEILING * ceiling:
                broken.append(f"{policy} hit {ours.hit:.3f} of {ceiling:.3f}")
            if ours.p99_ms > sticky_ms:
                broken.append(f"{policy} p99 {ours.p99_ms:.0f} of session-sticky's {sticky_ms:.0f}")
        parts.append(f"{policy} {ours.ttft_ms:.0f} ({ratio:.2f}; moved {ours.moved:.0%})")
    parts.append(f"unguarded {others['dynamo-unguarded'].ttft_ms:.0f}")
    parts += [f"BROKEN: {one}" for one in broken]
    return Judged(default.ttft_ms / least_ms, len(broken), " | ".join(parts))


def _ceiling(case: str) -> float:
    """The hit rate of one cache that never forgets."""
    player = Player()
    for line in CASES[case]:
        player.play(line)
    return reuse_ceiling(player.story.requests, BLOCK_SIZE).tokens


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
