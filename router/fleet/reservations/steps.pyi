"""How a WorkerLoad and Reservations change as reservations open and close. Pure (steps.pyx)."""

from indexer.hashing import HashArray
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.load_columns import LoadColumns
from router.fleet.reservations.reservations import Reservation, Reservations

HISTORY_MAX: int
"""Changes of `ours` that are kept for each worker, to look back to the time of its last sample."""
HISTORY_S: float
"""Seconds for which these changes are kept: a sample comes every second, and after 3 s without one
the worker is unhealthy."""

def open_load(
    load: WorkerLoad, prefixes: HashArray, own_blocks: int, new_tokens: int, now_s: float
) -> int:
    """Adds the load of a reservation. new_tokens: prompt tokens that the worker computes."""

def close_load(
    load: WorkerLoad, prefixes: HashArray, own_blocks: int, new_tokens: int, now_s: float
) -> None:
    """Subtracts the load of a reservation. new_tokens: prompt tokens not computed yet."""

def open_reservation(
    reservations: Reservations,
    load: WorkerLoad,
    reservation: Reservation,
    output_tokens: int,
    ordinal: int,
    columns: LoadColumns,
    slot: int,
) -> None:
    """Opens a pick's reservation, and writes its worker's load into the columns of the worker's
    slot. output_tokens: expected length of the answer; ordinal: number of the pick. The reservation
    is listed before anything outside the load changes, so that it can be withdrawn."""

def add_reservation(reservations: Reservations, reservation: Reservation) -> int:
    """Adds an open reservation: see Reservations.add."""
