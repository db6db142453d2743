"""A worker's load as numbers in the columns of its slot (Pools.put_load). Pure."""

import numpy as np
import numpy.typing as npt

from router.fleet.reservations.load import WorkerLoad

class LoadColumns:
    """Writes loads of workers into the fleet's columns, one place a slot."""

    settled: dict[int, tuple[float, ...]]
    """Slot -> block_size, total_blocks, total_slots, trust; the slots that are known and the blocks
    that picks may promise; the bounds on prefill tokens, prefills and decodes; the line of the time
    between tokens (router/fleet/token_times.py). NaN: unknown."""
    full: set[int]
    """Slots of workers without a slot or a block left, over_estimate ones included."""
    over_estimate: set[int]
    """The slots in `full` whose workers are full by what was learned alone
    (router/fleet/health/capacity.py)."""

    def use(self, table: npt.NDArray[np.float64], others_waiting: npt.NDArray[np.float64]) -> None:
        """Writes into these arrays from now on: a row for each of COLUMNS, and a place for each
        slot that is settled."""

    def drop(self, slot: int) -> None:
        """Forgets a slot that its worker has left."""

    def put(self, slot: int, load: WorkerLoad) -> int:
        """Writes a worker's load into its slot's columns, if the slot is in `settled`."""

    def surely_fits(self, slot: int, load: WorkerLoad | None, tokens: int) -> bool:
        """Whether a worker has KV blocks for a request even if it shares none with others and all
        answers grow to their ends at once. Most workers do; the others are checked more closely
        (router/fleet/blocks_ahead.py). tokens: of its prompt and of the expected output."""
