"""Hash, match, store and memory, side by side with NVIDIA Dynamo's router core in one run.

The peer is the PyPI wheel ai-dynamo-runtime, in an environment of its own (build/bench/peer), which
is made on the first run; without it the rows stand alone and say so. Both sides get the same inputs
in the form they take best: ours arrays, theirs lists and JSON. What is measured is the call that a
caller makes, its conversions included. Inputs rotate over 50 prompts.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from indexer.hashing import HashArray, block_hashes
from indexer.identity import Tier
from indexer.kernel import NativeIndex
from tests.bench.timing import row

PEER = "ai-dynamo-runtime==1.6.1"
HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / "build" / "bench" / "peer"
REPEATS = 5


def rows() -> list[dict[str, Any]]:
    peer = _peer()
    return [
        _compared("hash_8192_b16", _hash_us(), "us", "less", peer),
        *_match_rows(peer),
        _compared("store_16", _store_rate(), "blocks/s", "more", peer),
        _compared("memory_chain_bytes", _memory(1, 512_000), "B", "less", peer),
        _compared("memory_shared64_bytes", _memory(64, 8_000), "B", "less", peer),
        row("forget_pause_ms", _forget_pause_ms(), "ms", "less"),
    ]


def _hash_us() -> float:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 100_000, 8192).astype(np.uint32).tobytes() for _ in range(50)]

    def once() -> float:
        started = time.perf_counter()
        for prompt in prompts:
            block_hashes(prompt, 16)
        return (time.perf_counter() - started) / len(prompts) * 1e6

    return median(once() for _ in range(REPEATS))


def _match_rows(peer: dict[str, float]) -> list[dict[str, Any]]:
    """Worker i of 64 holds the first (i + 1) / 64 of every chain, as the peer's workers do."""
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
        found.append(_compared(f"match_{blocks}_w64", us, "us", "less", peer))
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


def _forget_pause_ms() -> float:
    """10 million blocks over 200 workers: the longest step of forgetting one and sweeping."""
    rng = np.random.default_rng(4)
    index = NativeIndex()
    slots = [index.open_slot() for _ in range(200)]
    for slot in slots:
        index.store(slot, Tier.DEVICE, _chain(rng, 50_000))
    longest = 0.0
    started = time.perf_counter()
    index.forget(slots[7])
    longest = max(longest, time.perf_counter() - started)
    more = True
    while more:
        started = time.perf_counter()
        more = index.sweep()
        longest = max(longest, time.perf_counter() - started)
    return longest * 1e3


def _compared(
    name: str, ours: float, unit: str, better: str, peer: dict[str, float]
) -> dict[str, Any]:
    found = row(name, round(ours, 3), unit, better)
    theirs = peer.get(name)
    if theirs is not None:
        found["peer"] = round(theirs, 3)
        found["ratio"] = round(theirs / ours if better == "less" else ours / theirs, 2)
    return found


def _peer() -> dict[str, float]:
    """What the peer measures, in its own process; nothing when it can't be installed."""
    python = ENVIRONMENT / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", PEER, "numpy"]
            subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ran = subprocess.run(
            [str(python), str(HERE / "peer_side.py")], check=True, capture_output=True, text=True
        )
    except (subprocess.CalledProcessError, OSError) as error:
        sys.stderr.write(f"no peer to compare with ({PEER}): {error}\n")
        return {}
    measured: dict[str, float] = json.loads(ran.stdout)
    return measured


def _chain(rng: np.random.Generator, length: int) -> HashArray:
    return rng.integers(1, 1 << 62, length, np.uint64)
