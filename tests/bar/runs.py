"""One run of a case by a policy, in virtual time; in a module that other processes can import."""

import random
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest

from simulator.traffic.results import share
from simulator.traffic.trace import Trace
from simulator.world.world import World
from tests.bar.cases import CASES
from tests.stage.code_digest import code_digest
from tests.stage.guards import TunedGuard
from tests.stage.story import Player, run_options

code_now = cache(code_digest)


class Run(NamedTuple):
    """One seed of a case by a policy."""

    case: str
    policy: str
    seed: int
    guard: str
    """request_tokens/margin; empty for policies that are not guarded."""

    @property
    def key(self) -> str:
        """Also of the case's lines and of the code, so that another case under an old name, and
        another version, are played again."""
        lines = xxh3_64_hexdigest("\n".join(CASES[self.case]).encode())
        return "|".join(map(str, (*self, lines, code_now())))


class Numbers(NamedTuple):
    """What came of a run."""

    ttft_ms: float
    p99_ms: float
    hit: float
    moved: float
    """Share of the picks that the guard moved."""


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
        guard = TunedGuard(request_tokens=tokens, margin=margin)
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
