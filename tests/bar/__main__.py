"""Plays the cases by every policy, and prints which of the bar's bounds are broken.

python -m tests.bar [--only tuning | held-out | WORDS] [--guard TOKENS/MARGIN] [--choose]

Each run is kept in build/bar.json under its case, policy, seed and guard, so that an interrupted
call goes on where it stopped; --again forgets them, and so does a change of the code.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from router.config.settings.routing_settings import GuardSettings
from tests.bar.cases import CASES, TUNING
from tests.bar.judge import (
    CHOICE_SEEDS,
    DEFAULT,
    GUARDED,
    MOST,
    OTHERS,
    breaches,
    judged,
    median_of,
)
from tests.bar.runs import Numbers, Run, code_now, play

KEPT = Path("build/bar.json")
REQUEST_TOKENS = (300, 500, 1000)
"""30, 100 and 200 break a bound of tests/router/scenarios."""
MARGINS = (0, 0.05, 0.1)


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
        runs = json.loads(KEPT.read_text())
        kept = {key: runs[key] for key in runs if key.endswith(code_now())}
    if asked.choose:
        return _choose(asked.seeds, asked.jobs, kept)
    default = GuardSettings()
    guard = asked.guard or f"{default.request_tokens:g}/{default.margin:g}"
    names = [name for name in CASES if _wanted(name, asked.only)]
    seeds = asked.seeds + CHOICE_SEEDS
    _play_all((run for name in names for run in _runs(name, seeds, guard)), asked.jobs, kept)
    broken = 0
    worst = 0.0
    for name in names:
        numbers, best = judged(name, asked.seeds, guard, kept)
        found = breaches(name, numbers, best)
        broken += len(found)
        worst = max(worst, numbers[DEFAULT].ttft_ms / numbers[best].ttft_ms)
        sys.stdout.write(_line(name, numbers, best, found))
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
    runs = {
        (name, policy): [Run(name, policy, seed, "") for seed in range(seeds)]
        for name in names
        for policy in OTHERS
    }
    _play_all((run for of_one in runs.values() for run in of_one), jobs, kept)
    best = {
        name: min(median_of(runs[name, policy], kept).ttft_ms for policy in OTHERS)
        for name in names
    }

    def worst(guard: str) -> float:
        of = {name: [Run(name, DEFAULT, seed, guard) for seed in range(seeds)] for name in names}
        _play_all((run for runs in of.values() for run in runs), jobs, kept)
        ratios = {name: median_of(runs, kept).ttft_ms / best[name] for name, runs in of.items()}
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


def _line(case: str, numbers: Mapping[str, Numbers], best: str, found: Sequence[str]) -> str:
    best_ms = numbers[best].ttft_ms
    parts = [f"{case:54} best {best} {best_ms:.0f}"]
    for policy in GUARDED:
        ours = numbers[policy]
        ratio = ours.ttft_ms / best_ms
        parts.append(f"{policy} {ours.ttft_ms:.0f} ({ratio:.2f}; moved {ours.moved:.0%})")
    parts.append(f"unguarded {numbers['dynamo-unguarded'].ttft_ms:.0f}")
    parts += [f"BROKEN: {one}" for one in found]
    return " | ".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
