"""How fast the index answers and changes: 64 workers, prefixes that some of them share."""

from collections.abc import Callable
from typing import Any

import numpy as np

from indexer.hashing import HashArray
from indexer.identity import Tier
from indexer.index import BlockIndex
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex
from tests.bench.timing import duration_us, rate

IMPLEMENTATIONS: dict[str, Callable[[], BlockIndex]] = {
    "native": NativeIndex,
    "reference": ReferenceIndex,
}
WORKERS = 64
PROMPT_BLOCKS = [512, 2048]
CHAINS_A_WORKER = 4
STORED_BLOCKS = 64
"""In one fact"""


def rows() -> list[dict[str, Any]]:
    """Microseconds a match, and blocks a second stored and removed, for each implementation."""
    return [row for name, make in IMPLEMENTATIONS.items() for row in _rows_of(name, make)]


def _rows_of(name: str, make: Callable[[], BlockIndex]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    index = make()
    found = []
    slots = [index.open_slot() for _ in range(WORKERS)]
    for slot in slots:
        for _ in range(CHAINS_A_WORKER):
            index.store(slot, Tier.DEVICE, _random(rng, 2048))
    for count in PROMPT_BLOCKS:
        all_share, staggered = _random(rng, count), _random(rng, count)
        for i, slot in enumerate(slots):
            index.store(slot, Tier.DEVICE, all_share)
            index.store(slot, Tier.DEVICE, staggered[: count * i // WORKERS])
        cold = _random(rng, count)
        found += [
            _match(f"match_{count}_all_hold_{name}", index, all_share),
            _match(f"match_{count}_some_hold_{name}", index, staggered),
            _match(f"match_{count}_none_holds_{name}", index, cold),
        ]
    slot = slots[0]
    facts = [_random(rng, STORED_BLOCKS) for _ in range(100)]

    def store_and_remove() -> None:
        for fact in facts:
            index.store(slot, Tier.DEVICE, fact)
        for fact in facts:
            index.remove(slot, Tier.DEVICE, fact)

    count = 2 * len(facts) * STORED_BLOCKS
    found.append(rate(f"store_and_remove_{name}", store_and_remove, count, "blocks/s"))
    return found


def _match(name: str, index: BlockIndex, hashes: HashArray) -> dict[str, Any]:
    return duration_us(name, lambda: index.match(hashes))


def _random(rng: np.random.Generator, count: int) -> HashArray:
    return rng.integers(0, 1 << 64, count, np.uint64)
