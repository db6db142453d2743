"""The table of workers that decisions read: its columns, and values computed from a row."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from events.engines.numbers import GAUGES

Column: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class Table:
    """The columns by their names, each with a number for each worker. Their order here is that of
    the array, of the places in C (router/fleet/native/table.h, which `make proto` writes) and of
    the decision log."""

    __slots__ = ("_columns",)
    _columns: Sequence[Column]
    """Rows of the array, one for each name of COLUMNS."""

    block_size: Column
    """Canonical block size, tokens."""
    total_blocks: Column
    """Canonical KV blocks that the worker has; NaN: unknown."""
    total_slots: Column
    """Requests that can run at once; one more than an estimate of them. NaN: unknown."""
    trust: Column
    """Share of the usable overlap that overlap_tokens counts, by the state of the stream."""
    running: Column
    """Running requests, by the engine's last sample."""
    waiting: Column
    """Waiting requests, by the engine's last sample."""
    reserved: Column
    """Requests sent there that the engine's sample did not count yet."""
    active_blocks: Column
    """Canonical blocks held by requests, reserved ones included."""
    prefill_tokens_active: Column
    """Prompt tokens sent there and not computed yet."""
    last_picked: Column
    """Ordinal of the last pick of this worker, 0 for never."""
    active_slots: Column
    """Queue depth: running + waiting + reserved."""
    load: Column
    """active_blocks / total_blocks; 0 where the total is unknown."""
    slot_ratio: Column
    """active_slots / total_slots; 0 where the total is unknown."""
    full: Column
    """1 where no slot or no block is left, else 0. An unknown total is never full. A worker over
    its estimate (router/fleet/health/capacity.py) is full, too, as long as another has room."""
    load_unknown: Column
    """1 where load is 0 because total_blocks is unknown, else 0."""
    tpot_s: Column
    """Predicted seconds between the tokens of a request that comes now
    (router/fleet/token_times.py); NaN: unknown."""

    def column(self, name: str) -> Column:
        """A column by its name; raises ValueError for another name."""
        return self._columns[COLUMNS.index(name)]


NUMBERS_FROM = len(Table.__annotations__) - len(Table.__slots__)
"""Place of the first column of an engine's own numbers; NaN: the engine has none of that name."""
COLUMNS = (*(name for name in Table.__annotations__ if name not in Table.__slots__), *GAUGES)


def check_header(names: Sequence[str]) -> None:
    """Raises ImportError if native code was built with other columns than these."""
    if tuple(names) != COLUMNS:
        differ = sorted(set(names) ^ set(COLUMNS)) or ["their order"]
        raise ImportError(
            f"router/fleet/native/table.h and router/fleet/table.py differ in {', '.join(differ)}:"
            " run `make proto`, and build the native parts"
        )


def _column_at(place: int) -> property:
    def column(rows: Table) -> Column:
        return rows._columns[place]

    return property(column)


for _place, _name in enumerate(COLUMNS):
    setattr(Table, _name, _column_at(_place))


def least(column: npt.NDArray[Any]) -> float:
    """Least value of a column of at least one row, as column.min() but at less than half of its
    cost for some hundred rows."""
    return float(column.item(column.argmin()))
