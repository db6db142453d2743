"""Facts about workers for orders of the admission queue. Reads only. Pure."""

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from indexer.hashing import HashArray
from router.decide.core.core import RouterCore
from router.decide.queue_order.sight import Fleet
from router.decide.waiter import Waiter
from router.request.prompt import Prompt


class FleetSight(Fleet):
    """What orders of the queue may read of the workers."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def chain(self, prompt: Prompt, model: str) -> tuple[HashArray | None, int]:
        """PrefixHashes of a prompt in the block size of a model's workers, and that size;
        (None, 0) where the workers have several sizes, or none is known."""
        pool = self._core.fleet.pool(model)
        if pool is None or len(pool.block_sizes) != 1:
            return None, 0
        size = next(iter(pool.block_sizes))
        return (prompt.prefixes(size), size) if size else (None, 0)

    def held_tokens(self, chain: HashArray, block_size: int, tokens: int, model: str) -> int:
        """Leading tokens of a prompt that some worker of a model holds: the most of any."""
        pool = self._core.fleet.pool(model)
        return 0 if pool is None else self._most(chain, block_size, tokens, pool.slots)

    @override
    def overlap_tokens(self, waiter: Waiter) -> int:
        pool = self._core.fleet.pool(waiter.model)
        if pool is None or waiter.prefixes is None:
            return 0
        slots = self._core.fleet.pools.with_room(pool)
        return self._most(waiter.prefixes, waiter.block_size, waiter.prompt_tokens, slots)

    @override
    def load(self, waiter: Waiter) -> float:
        return self._core.fleet.fill(waiter.model)

    @override
    def is_prefilling(self, reservation_id: str) -> bool:
        reservation = self._core.reservations.get(reservation_id)
        return (
            reservation is not None and reservation.ended is None and not reservation.prefill_done
        )

    def _most(
        self, chain: HashArray, block_size: int, tokens: int, slots: npt.NDArray[np.intp]
    ) -> int:
        if not len(slots) or not len(chain):
            return 0
        usable_max = (tokens - 1) // block_size  # engines compute the last block again
        blocks = self._core.fleet.view.index.overlap(chain, usable_max, slots)[1]
        return int(blocks.max()) * block_size
