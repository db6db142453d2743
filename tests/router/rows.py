"""Candidates made of plain numbers, for tests of what is computed from them."""

from math import nan
from typing import Any

import numpy as np

from indexer.identity import WorkerKey
from router.candidates import Candidates

COLUMNS = (
    "overlap_tokens",
    "active_blocks",
    "total_blocks",
    "running",
    "waiting",
    "reserved",
    "total_slots",
    "last_picked",
)


def rows(prompt_tokens: int, *workers: dict[str, float]) -> Candidates:
    """Candidates of what a test says about them; what it doesn't is zero, or unknown."""
    unsaid = dict.fromkeys(COLUMNS, 0.0) | {"total_blocks": nan, "total_slots": nan}
    columns: dict[str, Any] = {
        name: np.array([{**unsaid, **worker}[name] for worker in workers]) for name in COLUMNS
    }
    count = len(workers)
    return Candidates(
        workers=tuple(WorkerKey(f"w{i}", 0) for i in range(count)),
        prompt_tokens=prompt_tokens,
        block_size=np.full(count, 16.0),
        trust=np.ones(count),
        new_tokens=prompt_tokens - columns["overlap_tokens"],
        prefill_tokens_active=np.zeros(count),
        excluded=("",) * count,
        **columns,
    )
