"""Plays the cases by every policy, and prints which of the bar's bounds are broken.

python -m tests.bar [--only tuning | held-out | WORDS] [--guard TOKENS/MARGIN] [--choose]

Each run is kept in build/bar.json under its case, policy, seed and guard, so that an interrupted
call goes on where it stopped; --again forgets them.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

from router.config import GuardSettings
from simulator.reuse import reuse_ceiling
from tests.bar.cases import CASES, TUNING
from tests.bar.runs import Numbers, Run, play
from tests.router.story import Player

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
REQUEST_TOKENS = (300, 500, 1000)
"""30, 100 and 200 break a bound of tests/router/scenarios."""
MARGINS = (0, 0.05, 0.1)
FITTING = "all fit"
"""Sessions whose blocks all fit."""
LEAST_OF_CEILING = 0.98
"""Of what one cache that never forgets would have reused of such sessions."""
BLOCK_SIZE = 64
"""Of the engines in tests/router/story.py."""


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
    parser.add_argument("--choose", action="store_true", help="the guard's numbers, by README.md")
    asked = parser.parse_args(arguments)
    kept: dict[str, list[float]] = {}
    if KEPT.exists() and not asked.again:
        kept = json.loads(KEPT.read_text())
    if asked.choose:
        return _choose(asked.seeds, asked.jobs, kept)
    default = GuardSettings()
    guard = asked.guard or f"{default.request_tokens:g}/{default.margin:g}"
    names = [name for name in CASES if _wanted(name, asked.only)]
    _play_all((run for name in names for run in _runs(name, asked.seeds, guard)), asked.jobs, kept)
    judged = [_judged(name, asked.seeds, guard, kept) for name in names]
    sys.stdout.writelines(f"{case.told}\n" for case in judged)
    worst = max(case.ratio for case in judged)
    broken = sum(case.broken for case in judged)
    sys.stdout.write(f"guard {guard}: worst {worst:.3f} of {MOST:.2f}, {broken} bounds broken\n")
    return 1 if broken else 0


def _play_all(runs: Iterable[Run], jobs: int, kept: dict[str, list[float]]) -> None:
    """Those that aren't kept; each is kept as soon as it is done."""
    missing = [run for run in runs if run.key not in kept]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(play, run): run for run in missing}
        for future in as_completed(futures):
            kept[futures[future].key] = list(future.result())
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept))


def _choose(seeds: int, jobs: int, kept: dict[str, list[float]]) -> int:
    """The default's worst ratio over the tuning half, for each pair of the guard's numbers."""
    names = sorted(TUNING)
    others = (
        Run(name, policy, seed, "") for name in names for policy in OTHERS for seed in range(seeds)
    )
    _play_all(others, jobs, kept)

    def worst(guard: str) -> float:
        of = {name: [Run(name, DEFAULT, seed, guard) for seed in range(seeds)] for name in names}
        _play_all((run for runs in of.values() for run in runs), jobs, kept)
        ratios = {
            name: _median(kept, runs).ttft_ms
            / min(
                _median(kept, [Run(name, policy, seed, "") for seed in range(seeds)]).ttft_ms
                for policy in OTHERS
            )
            for name, runs in of.items()
        }
        name = max(ratios, key=lambda case: ratios[case])
        sys.stdout.write(f"{guard:>9}: {ratios[name]:.3f} ({name})\n")
        sys.stdout.flush()
        return ratios[name]

    tokens = _least({tokens: worst(f"{tokens}/{MARGINS[1]}") for tokens in REQUEST_TOKENS})
    margin = _least({margin: worst(f"{tokens}/{margin}") for margin in MARGINS})
    sys.stdout.write(f"request_tokens {tokens}, margin {margin}\n")
    return 0


def _least(ratios: dict[float, float]) -> float:
    """The largest number whose worst ratio is within 0.01 of the least one."""
    return max(number for number, ratio in ratios.items() if ratio <= min(ratios.values()) + 0.01)


def _median(kept: dict[str, list[float]], runs: Sequence[Run]) -> Numbers:
    columns = zip(*(Numbers(*kept[run.key]) for run in runs), strict=True)
    return Numbers(*(median(column) for column in columns))


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
        return _median(kept, [Run(case, policy, seed, about) for seed in range(seeds)])

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
