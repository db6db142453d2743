"""How a WorkerLoad and Reservations change as reservations open and close. Pure (steps.pyx)."""

from indexer.hashing import HashArray
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.load_columns import LoadColumns
from router.fleet.reservations.reservations import Reservation, Reservations

HISTORY_MAX: int
"""Changes of `ours` kept a worker, to look back to the time of its last sample."""
HISTORY_S: float
"""How far back they are kept: a sample comes every second, and after 3 the worker is unhealthy."""

def open_load(
    load: WorkerLoad, prefixes: HashArray, own_blocks: int, new_tokens: int, now_s: float
) -> int:
    """A reservation begins. new_tokens: of its prompt, which the worker computes."""

def close_load(
    load: WorkerLoad, prefixes: HashArray, own_blocks: int, new_tokens: int, now_s: float
) -> None:
    """A reservation ends. new_tokens: of its prompt that are not computed yet."""

def open_reservation(
    reservations: Reservations,
    load: WorkerLoad,
    reservation: Reservation,
    output_tokens: int,
    ordinal: int,
    columns: LoadColumns,
    slot: int,
) -> None:
    """A pick's reservation opens, with its load, which is written into the columns of its worker's
    slot. output_tokens: what is expected of its answer; ordinal: the number of the pick. The
    reservation is in the reservations before anything else happens to others, so that it can be
    withdrawn."""

def add_reservation(reservations: Reservations, reservation: Reservation) -> int:
    """Reservations.add."""
