"""What a match costs as work grows: longer prompts, a larger index. Draws build/bench-match-*.svg.

Chains that 8 workers hold in part: worker i the first (i + 1) / 8 of each. Prompts rotate over many
chains, from anywhere in the index, so that a large one pays for what the CPU's caches don't have.
Dynamo's tree gets the same, but only up to a million blocks, since it takes them as JSON.
"""

import json
import math
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from indexer.identity import Tier
from indexer.kernel import NativeIndex
from simulator.study.page import picture_file
from simulator.study.svg import Axis, Line, lines_picture
from tests.bench.environments import BUILD, Missing, dynamo_says
from tests.bench.timing import beside, row

WORKERS = 8
STORED_BLOCKS = 64
"""In one fact"""
PROMPTS = 1000
"""At most"""
REPEATS = 3
LENGTHS = [16 << i for i in range(11)]
SIZES = [10_000, 31_623, 100_000, 316_228, 1_000_000, 3_162_278, 10_000_000]
SIZE_BLOCKS = 512
"""Of the chains and prompts in an index of growing size"""
DYNAMO_SIZES = SIZES[:5]
LONG = LENGTHS.index(1024)
"""From here on a match costs more than a call."""


class Stage(NamedTuple):
    """Chains that are stored, and prompts that are asked for."""

    chain_blocks: int
    chains: list[int]
    """How many there are in the end, each time that is measured"""
    lengths: list[int]
    """Of the prompts, in blocks: beginnings of chains"""

    def json(self) -> str:
        return json.dumps(
            self._asdict() | {"workers": WORKERS, "stored": STORED_BLOCKS, "prompts": PROMPTS}
        )


class Curves(NamedTuple):
    """Microseconds a match."""

    by_length: list[float]
    by_size: list[float]

    def growth_in_blocks(self) -> float:
        """Exponent: 1 is linear."""
        times = self.by_length[-1] / self.by_length[LONG]
        return round(math.log(times) / math.log(LENGTHS[-1] / LENGTHS[LONG]), 2)

    def growth_in_index(self, sizes: int) -> float:
        """Times from the smallest of so many sizes to the largest: 1 is flat."""
        return round(self.by_size[sizes - 1] / self.by_size[0], 2)


def rows() -> list[dict[str, Any]]:
    """How a match grows, and what the largest ones cost."""
    ours = _curves(_ours(_by_length()), _ours(_by_size(SIZES)))
    note = ""
    theirs: Curves | None = None
    try:
        said = dynamo_says("growth", _by_length().json(), _by_size(DYNAMO_SIZES).json())
        theirs = _curves(*said)
    except Missing as error:
        note = f"no other router: {error}"
    common = len(DYNAMO_SIZES)
    return [
        row(
            "match_growth_in_blocks",
            ours.growth_in_blocks(),
            "exponent",
            "less",
            f"1 is linear; theirs {theirs.growth_in_blocks() if theirs else '?'};"
            f" {_draw(ours, theirs)}",
        ),
        row(
            "match_growth_in_index",
            ours.growth_in_index(len(SIZES)),
            "times",
            "less",
            f"10 million blocks over 10,000; to a million {ours.growth_in_index(common)},"
            f" theirs {theirs.growth_in_index(common) if theirs else '?'}",
        ),
        beside(
            row(f"match_{LENGTHS[-1]}_w8", round(ours.by_length[-1], 2), "us", "less", note),
            theirs and theirs.by_length[-1],
        ),
        beside(
            row("match_512_of_1m_w8", round(ours.by_size[common - 1], 2), "us", "less", note),
            theirs and theirs.by_size[common - 1],
        ),
        row("match_512_of_10m_w8", round(ours.by_size[-1], 2), "us", "less"),
    ]


def _by_length() -> Stage:
    return Stage(LENGTHS[-1], [50], LENGTHS)


def _by_size(sizes: list[int]) -> Stage:
    return Stage(SIZE_BLOCKS, [size // SIZE_BLOCKS for size in sizes], [SIZE_BLOCKS])


def _curves(by_length: list[list[float]], by_size: list[list[float]]) -> Curves:
    return Curves(by_length[0], [one for (one,) in by_size])


def _ours(stage: Stage) -> list[list[float]]:
    """Microseconds a match: for each size of the index, for each length. See dynamo_side.py."""
    rng = np.random.default_rng(5)
    index = NativeIndex()
    slots = [index.open_slot() for _ in range(WORKERS)]
    chains = []
    found = []
    for count in stage.chains:
        for _ in range(count - len(chains)):
            chain = rng.integers(1, 1 << 62, stage.chain_blocks, np.uint64)
            chains.append(chain)
            facts = len(chain) // STORED_BLOCKS
            for i, slot in enumerate(slots):
                for n in range(facts * (i + 1) // WORKERS):
                    fact = chain[n * STORED_BLOCKS : (n + 1) * STORED_BLOCKS]
                    index.store(slot, Tier.DEVICE, fact)
        turns = np.random.default_rng(6).permutation(count)[:PROMPTS]
        found.append([_us(index, [chains[i][:length] for i in turns]) for length in stage.lengths])
    return found


def _us(index: NativeIndex, prompts: list[Any]) -> float:
    """Median time of a match: one that the machine cut short for another process doesn't count."""
    took = []
    for prompt in prompts * REPEATS:
        started = time.perf_counter()
        index.match(prompt)
        took.append(time.perf_counter() - started)
    return median(took) * 1e6


def _draw(ours: Curves, theirs: Curves | None) -> str:
    """Draws the pictures; returns their files."""
    about = "blocks of the prompt (820,000 in the index)"
    by_length = _picture("blocks", about, LENGTHS, ours.by_length, theirs and theirs.by_length)
    about = f"blocks in the index (prompts of {SIZE_BLOCKS})"
    by_size = _picture("index", about, SIZES, ours.by_size, theirs and theirs.by_size)
    return f"drawn in {by_length} and {by_size}"


def _picture(
    name: str, about: str, places: list[int], ours_us: list[float], dynamo_us: list[float] | None
) -> Path:
    """Microseconds a match over places, both axes logarithmic. Dynamo's may end sooner."""
    curves = {"kvroute": ours_us} | ({"Dynamo's RadixTree": dynamo_us} if dynamo_us else {})
    lines = []
    for number, (label, us) in enumerate(curves.items()):
        xs = places[: len(us)]
        label = f"{label}: {us[-1]:,.3g} µs at {xs[-1]:,}"
        lines.append(Line(label, np.array(xs, np.float64), np.array(us), number))
    times = [value for us in curves.values() for value in us]
    picture = lines_picture(
        "A match",
        "; ".join(line.label for line in lines),
        Axis(places[0], places[-1], about, _number, is_log=True),
        Axis(min(times), 2 * max(times), "µs a match", _number, is_log=True),
        lines,
    )
    file = BUILD / f"bench-match-{name}.svg"
    file.write_text(picture_file(picture), encoding="utf-8")
    return file.relative_to(BUILD.parent)


def _number(value: float) -> str:
    return f"{value:,.10g}"
