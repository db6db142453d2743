"""Candidates made of plain numbers, for tests of what is computed from them."""

from math import nan

import numpy as np

from indexer.identity import WorkerKey
from router.candidates import COLUMNS, Candidates, shares


def rows(prompt_tokens: int, *workers: dict[str, float]) -> Candidates:
    """Candidates of what a test says about them; what it doesn't is zero, or unknown."""
    unsaid = dict.fromkeys((*COLUMNS, "overlap_tokens"), 0.0) | {
        "block_size": 16.0,
        "trust": 1.0,
        "total_blocks": nan,
        "total_slots": nan,
    }
    table = np.zeros((len(COLUMNS), len(workers)))
    for i, worker in enumerate(workers):
        said: dict[str, float] = unsaid | worker
        slots = said["running"] + said["waiting"] + said["reserved"]
        names = ("load", "slot_ratio", "full", "load_unknown")
        derived = shares(slots, said["active_blocks"], said["total_slots"], said["total_blocks"])
        said |= {"active_slots": slots} | dict(zip(names, derived, strict=True))
        table[:, i] = [said[name] for name in COLUMNS]
    return Candidates(
        workers=tuple(WorkerKey(f"w{i}", 0) for i in range(len(workers))),
        prompt_tokens=prompt_tokens,
        overlap_tokens=np.array([worker.get("overlap_tokens", 0.0) for worker in workers]),
        excluded=("",) * len(workers),
        table=table,
    )
