"""The bar: which of its bounds a case breaks, by the medians of its runs."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from simulator.traffic.reuse import reuse_ceiling
from tests.bar.cases import CASES
from tests.bar.runs import Numbers, Run
from tests.stage.story import Player

OTHERS = (
    "round-robin",
    "least-loaded",
    "power-of-two",
    "session-sticky",
    "dynamo-blocks",
    "conductor",
    "dynamo-unguarded",
)
DEFAULT = "dynamo-adaptive"
TTFT = "ttft"
GUARDED = (DEFAULT, TTFT)
STICKY = "session-sticky"
MOST, MOST_P99 = 1.05, 1.10
"""Of the default's mean TTFT, and of its 99th percentile, to those of the best policy: that whose
mean is the least in CHOICE_SEEDS further seeds, so that no policy is the best by the luck of the
runs that are judged."""
CHOICE_SEEDS = 2
MOST_OF_TTFT = 1.10
"""Of the mean TTFT of `ttft` to that of the best of the others."""
FITTING = "all fit"
"""Ends the names of cases of sessions whose blocks all fit."""
LEAST_OF_CEILING = 0.98
"""Of what one cache that never forgets would have reused of such sessions."""
BLOCK_SIZE = 64
"""Of the engines in tests/stage/story.py."""


def medians(
    case: str, seeds: range, guard: str, kept: Mapping[str, Sequence[float]]
) -> dict[str, Numbers]:
    """Numbers of a case by policy. Raises KeyError for a run that isn't kept."""
    return {
        policy: median_of(
            [Run(case, policy, seed, guard if policy in GUARDED else "") for seed in seeds], kept
        )
        for policy in (*OTHERS, *GUARDED)
    }


def median_of(runs: Sequence[Run], kept: Mapping[str, Sequence[float]]) -> Numbers:
    """Each number's median. Raises KeyError for a run that isn't kept."""
    columns = zip(*(Numbers(*kept[run.key]) for run in runs), strict=True)
    return Numbers(*(median(column) for column in columns))


def best_of(policies: Sequence[str], numbers: Mapping[str, Numbers]) -> str:
    """The policy with the least mean TTFT."""
    return min(policies, key=lambda policy: numbers[policy].ttft_ms)


class Judged(NamedTuple):
    """What came of a case."""

    numbers: Mapping[str, Numbers]
    """By policy."""
    best: str
    """The policy that the default is compared with."""


def judged(case: str, seeds: int, guard: str, kept: Mapping[str, Sequence[float]]) -> Judged:
    """Raises KeyError for a run that isn't kept."""
    further = medians(case, range(seeds, seeds + CHOICE_SEEDS), guard, kept)
    return Judged(medians(case, range(seeds), guard, kept), best_of((*OTHERS, TTFT), further))


def breaches(case: str, numbers: Mapping[str, Numbers], best: str) -> list[str]:
    """Bounds that the guarded policies break, a text each. best: the policy to compare with."""
    found = []
    default, theirs = numbers[DEFAULT], numbers[best]
    if default.ttft_ms > MOST * theirs.ttft_ms:
        found.append(f"`{DEFAULT}` takes {default.ttft_ms / theirs.ttft_ms:.2f} times the best")
    if default.p99_ms > MOST_P99 * theirs.p99_ms:
        ratio = default.p99_ms / theirs.p99_ms
        found.append(f"the 99th percentile of `{DEFAULT}` is {ratio:.2f} times that of the best")
    others_ms = numbers[best_of(OTHERS, numbers)].ttft_ms
    if numbers[TTFT].ttft_ms > MOST_OF_TTFT * others_ms:
        ratio = numbers[TTFT].ttft_ms / others_ms
        found.append(f"`{TTFT}` takes {ratio:.2f} times the best of the others")
    for policy in GUARDED:
        ours = numbers[policy]
        if not case.endswith(FITTING):
            continue
        p99_ms, sticky_ms = ours.p99_ms, numbers[STICKY].p99_ms
        if p99_ms > sticky_ms:
            their = f"that of `{STICKY}` {sticky_ms:.0f} ms"
            found.append(f"the 99th percentile of `{policy}` is {p99_ms:.0f} ms, {their}")
        ceiling = _ceiling(case)
        if ours.hit < LEAST_OF_CEILING * ceiling:
            found.append(f"`{policy}` reuses {ours.hit:.1%} of {ceiling:.1%} that could be")
    return found


def _ceiling(case: str) -> float:
    """The hit rate of one cache that never forgets."""
    player = Player()
    for line in CASES[case]:
        player.play(line)
    return reuse_ceiling(player.story.requests, BLOCK_SIZE).tokens
