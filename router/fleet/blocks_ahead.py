"""Which workers of a pool have KV blocks for a whole request, prompt and expected output.

    short   if  need > left
    enough  if  need + others <= left
    else    enough if prompt + growth <= left

    left    blocks that picks may promise, less those in use and reserved; what is guessed of
            replicas' newest picks makes a worker dearer, but takes none of them
    need    blocks of the prompt and of the expected output, less those of the prompt's start that
            open requests of this router use there, which the request shares
    prompt  the same without the output
    others  blocks of all that is expected of open requests there
    growth  blocks by which answers, the request's own included, outgrow what they hold now before
            one of them ends (router/fleet/reservations/outputs.py)

Requests of other replicas are taken to be like ours on the same worker. The idea is that of Chitu's
scheduler, which simulates the blocks ahead before it admits a task. Pure.
"""

from collections.abc import Callable, Mapping

import numpy as np

from indexer.identity import WorkerKey
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.reservations.load import WorkerLoad
from router.request.prompt import Prompt

SIMULATED_MAX = 16
"""Workers whose blocks are looked at step by step for one request: 20 us each. Of others that are
neither short nor certain to have enough, none is picked."""


class BlocksAhead:
    """Free KV blocks of the workers of one pool, held against the needs of one request.

    Most picked workers have enough, so a worker is computed when it is picked, and the others only
    where it has too few.
    """

    def __init__(
        self,
        pool: Pool,
        loads: Mapping[WorkerKey, WorkerLoad],
        prompt: Prompt,
        output_tokens: int,
        promised: Callable[[int], float],
    ) -> None:
        """promised: KV blocks that picks may reserve of the worker in each slot; NaN where unknown,
        which is enough for any request.
        """
        self._pool, self._loads = pool, loads
        self._prompt, self._output_tokens, self._promised = prompt, output_tokens, promised
        rows = len(pool)
        self.short = np.zeros(rows, np.bool_)
        """Workers that have too few, of those looked at."""
        self.unsure = np.zeros(rows, np.bool_)
        """Workers that `settle` has to look at."""
        self._seen = np.zeros(rows, np.bool_)
        self._left = np.zeros(rows)
        self._prompt_blocks = np.zeros(rows)

    def has_enough(self, row: int, now_s: float) -> bool:
        """Whether a worker (row) has enough free KV blocks for this request's prompt and expected
        output.
        """
        self._look(row)
        return not self.short[row] and (not self.unsure[row] or self.settle(row, now_s))

    def look_at_all(self) -> None:
        for row in np.flatnonzero(~self._seen).tolist():
            self._look(row)

    def _look(self, row: int) -> None:
        if self._seen[row]:
            return
        self._seen[row] = True
        source = self._pool.sources[row]
        load, size = self._loads.get(source.key), heartbeat_of(source).block_size
        if load is None or not size:
            return
        tokens = self._prompt.token_count
        # What is guessed of other replicas takes none of them.
        left = self._promised(source.slot) - load.active_blocks()
        shared = load.in_use(self._prompt.prefixes(size)) if load.requests else 0
        need = -(-(tokens + self._output_tokens) // size) - shared
        self._left[row], self._prompt_blocks[row] = left, -(-tokens // size) - shared
        if load.active_requests() <= 0:
            return
        self.short[row] = need > left
        if load.outputs.tokens and not self.short[row]:
            self.unsure[row] = need + load.outputs.tokens / size * load.of_all() > left

    def settle(self, row: int, now_s: float) -> bool:
        """Whether a worker that `unsure` names has enough blocks; if not, it is marked short."""
        source = self._pool.sources[row]
        load, size = self._loads[source.key], heartbeat_of(source).block_size
        held = load.external_blocks * size
        peak = load.outputs.peak_tokens(held / load.of_all(), self._output_tokens, now_s)
        growth = (peak * load.of_all() - held) / size
        self.unsure[row] = False
        self.short[row] = self._prompt_blocks[row] + growth > self._left[row]
        return not self.short[row]
