"""The bar: which of its bounds a case breaks, by the medians of its runs."""

from collections.abc import Mapping, Sequence
from statistics import median

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
GUARDED = (DEFAULT, "ttft")
STICKY = "session-sticky"
MOST = 1.10
"""Of a guarded policy's mean TTFT to the best of the others."""
MOST_OF_DEFAULT = 1.05
"""Of a guarded policy's mean TTFT to the default's."""
FITTING = "all fit"
"""Ends the names of cases of sessions whose blocks all fit."""
LEAST_OF_CEILING = 0.98
"""Of what one cache that never forgets would have reused of such sessions."""
BLOCK_SIZE = 64
"""Of the engines in tests/stage/story.py."""


def medians(
    case: str, seeds: int, guard: str, kept: Mapping[str, Sequence[float]]
) -> dict[str, Numbers]:
    """Numbers of a case by policy. Raises KeyError for a run that isn't kept."""
    return {
        policy: median_of(
            [Run(case, policy, seed, guard if policy in GUARDED else "") for seed in range(seeds)],
            kept,
        )
        for policy in (*OTHERS, *GUARDED)
    }


def median_of(runs: Sequence[Run], kept: Mapping[str, Sequence[float]]) -> Numbers:
    """Each number's median. Raises KeyError for a run that isn't kept."""
    columns = zip(*(Numbers(*kept[run.key]) for run in runs), strict=True)
    return Numbers(*(median(column) for column in columns))


def best_of_others(numbers: Mapping[str, Numbers]) -> str:
    """The policy with the least mean TTFT of those that are not guarded."""
    return min(OTHERS, key=lambda policy: numbers[policy].ttft_ms)


def breaches(case: str, numbers: Mapping[str, Numbers]) -> list[str]:
    """Bounds that the guarded policies break, a text each."""
    found = []
    best_ms = numbers[best_of_others(numbers)].ttft_ms
    for policy in GUARDED:
        ours = numbers[policy]
        if ours.ttft_ms > MOST * best_ms:
            found.append(f"`{policy}` takes {ours.ttft_ms / best_ms:.2f} times the best")
        if ours.ttft_ms > MOST_OF_DEFAULT * numbers[DEFAULT].ttft_ms:
            ratio = ours.ttft_ms / numbers[DEFAULT].ttft_ms
            found.append(f"`{policy}` takes {ratio:.2f} times `{DEFAULT}`")
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
