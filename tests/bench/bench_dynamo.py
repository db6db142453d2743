"""Hash, match, store and memory, side by side with NVIDIA Dynamo's router core in one run.

Dynamo is the PyPI wheel ai-dynamo-runtime, in an environment of its own (build/bench/dynamo), which
is made on the first run; without it the rows stand alone and say so. Both sides get the same inputs
in the form they take best: ours arrays, theirs lists and JSON. What is measured is the call that a
caller makes, its conversions included. Inputs rotate over 50 prompts.
"""

import time
from statistics import median
from typing import Any

import numpy as np

from indexer.hashing import HashArray, block_hashes
from indexer.identity import Tier
from indexer.kernel import NativeIndex
from tests.bench.environments import Missing, dynamo_says
from tests.bench.timing import beside, row

REPEATS = 5
MEMORY = {"memory_chain_bytes": (1, 512_000), "memory_shared64_bytes": (64, 8_000)}
"""Row -> workers, and blocks that each of them holds"""


def rows() -> list[dict[str, Any]]:
    ours = [
        row("hash_8192_b16", round(_hash_us(), 3), "us", "less"),
        *_match_rows(),
        row("store_16", round(_store_rate()), "blocks/s", "more"),
        *(row(name, round(_memory(*held), 3), "B", "less") for name, held in MEMORY.items()),
    ]
    try:
        theirs = _theirs()
    except Missing as error:
        return [one | {"note": f"no other router: {error}"} for one in ours]
    return [beside(one, theirs[one["name"]]) for one in ours]


def _theirs() -> dict[str, float]:
    found: dict[str, float] = dynamo_says("core")
    for name, (workers, blocks) in MEMORY.items():
        found[name] = dynamo_says("memory", str(workers), str(blocks))
    return found


def _hash_us() -> float:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 100_000, 8192).astype(np.uint32).tobytes() for _ in range(50)]

    def once() -> float:
        started = time.perf_counter()
        for prompt in prompts:
            block_hashes(prompt, 16)
        return (time.perf_counter() - started) / len(prompts) * 1e6

    return median(once() for _ in range(REPEATS))


def _match_rows() -> list[dict[str, Any]]:
    """Worker i of 64 holds the first (i + 1) / 64 of every chain, as Dynamo's workers do."""
    rng = np.random.default_rng(1)
    index = NativeIndex()
    slots = [index.open_slot() for _ in range(64)]
    chains = [_chain(rng, 2048) for _ in range(50)]
    for chain in chains:
        for i, slot in enumerate(slots):
            index.store(slot, Tier.DEVICE, chain[: 2048 * (i + 1) // 64 // 16 * 16])
    found = []
    for blocks in (512, 2048):
        prompts = [chain[:blocks].copy() for chain in chains]

        def once(prompts: list[HashArray] = prompts) -> float:
            started = time.perf_counter()
            for prompt in prompts:
                index.match(prompt)
            return (time.perf_counter() - started) / len(prompts) * 1e6

        us = median(once() for _ in range(REPEATS))
        found.append(row(f"match_{blocks}_w64", round(us, 3), "us", "less"))
    return found


def _store_rate() -> float:
    """Blocks a second, stored 16 at a time: 400 chains of 512 of one worker."""
    rng = np.random.default_rng(2)
    chains = [_chain(rng, 512) for _ in range(400)]

    def once() -> float:
        facts = [chain[i : i + 16] for chain in chains for i in range(0, 512, 16)]
        index = NativeIndex()
        slot = index.open_slot()
        started = time.perf_counter()
        for fact in facts:
            index.store(slot, Tier.DEVICE, fact)
        return len(facts) * 16 / (time.perf_counter() - started)

    return median(once() for _ in range(REPEATS))


def _memory(workers: int, blocks: int) -> float:
    """Bytes for each (worker, block), by the table's own account, in chains of 64."""
    rng = np.random.default_rng(3)
    index = NativeIndex()
    slots = [index.open_slot() for _ in range(workers)]
    before = index.stats().bytes
    for _ in range(blocks // 64):
        chain = _chain(rng, 64)
        for slot in slots:
            index.store(slot, Tier.DEVICE, chain)
    stats = index.stats()
    return (stats.bytes - before) / stats.placements


def _chain(rng: np.random.Generator, length: int) -> HashArray:
    return rng.integers(1, 1 << 62, length, np.uint64)
