"""How a WorkerLoad changes as reservations open and close. Pure (load_steps.pyx)."""

from indexer.hashing import HashArray
from router.reservations.load import WorkerLoad

HISTORY_MAX: int
"""Changes of `ours` kept a worker, to look back to the time of its last sample."""
HISTORY_S: float
"""How far back they are kept: a sample comes every second, and after 3 the worker is unhealthy."""

def open_load(
    load: WorkerLoad, prefixes: HashArray, has_tail: bool, new_tokens: int, now_s: float
) -> int:
    """A reservation begins. new_tokens: of its prompt, which the worker computes."""

def close_load(
    load: WorkerLoad, prefixes: HashArray, has_tail: bool, new_tokens: int, now_s: float
) -> int:
    """A reservation ends. new_tokens: of its prompt that are not computed yet."""
