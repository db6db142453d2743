"""Types that all parts of kvroute share: hashes of blocks, tiers, workers."""

from enum import IntEnum
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt
from typing_extensions import override

BlockHash = NewType("BlockHash", int)
"""XXH3-64 of one block's content, an unsigned 64-bit number."""

PrefixHash = NewType("PrefixHash", int)
"""Hash of a block and all blocks before it, an unsigned 64-bit number: the key of the index."""

HashArray = npt.NDArray[np.uint64]
"""Hashes as a one-dimensional array of little-endian u64, as in messages."""

EngineHash = int | bytes
"""An engine's own name for a block: opaque, and only meaningful inside one (worker, rank)."""


class Tier(IntEnum):
    """The memory in which a worker keeps a block; lower is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class WorkerKey(NamedTuple):
    """Name of a worker, the target of a pick: an engine, or one data-parallel rank of an engine."""

    worker_id: str
    dp_rank: int

    @override
    def __str__(self) -> str:
        return f"{self.worker_id}/{self.dp_rank}"
