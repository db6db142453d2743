"""The table of workers that decisions read: its columns, and values computed from a row."""

from math import isnan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class Row(NamedTuple):
    """Columns of a worker that are kept up to date (router/fleet/pools.py), with properties
    computed from them.
    """

    block_size: float
    total_blocks: float
    total_slots: float
    trust: float
    running: float
    waiting: float
    reserved: float
    active_blocks: float
    prefill_tokens_active: float
    last_picked: float
    active_slots: float
    load: float
    slot_ratio: float
    full: float
    load_unknown: float


COLUMNS = Row._fields


def least(column: npt.NDArray[Any]) -> float:
    """Least value of a column of at least one row, as column.min() but at less than half of its
    cost for some hundred rows."""
    return float(column.item(column.argmin()))


def shares(
    active_slots: float, active_blocks: float, total_slots: float, total_blocks: float
) -> tuple[float, float, float, float]:
    """load, slot_ratio, full and load_unknown of one worker (as in Candidates); NaN: an unknown
    total.
    """
    return (
        active_blocks / total_blocks if total_blocks > 0 else 0.0,
        active_slots / total_slots if total_slots > 0 else 0.0,
        float(is_full(active_slots, active_blocks, total_slots, total_blocks)),
        float(isnan(total_blocks)),
    )


def is_full(slots: float, blocks: float, slots_max: float, blocks_max: float) -> bool:
    """Whether no slot or no block is left; a bound of NaN is unknown, and never reached."""
    return slots >= slots_max or blocks >= blocks_max
