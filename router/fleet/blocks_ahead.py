"""Which workers of a pool have KV blocks for a whole request, prompt and expected output.

    too few if  need > left
    enough  if  need + others <= left
    else    enough if prompt + growth <= left

    left    blocks that picks may promise, less those in use and reserved; a guess of other
            replicas' newest picks (WorkerLoad.unheard) is not subtracted
    need    blocks of the prompt and of the expected output, less those of the prompt's start that
            this router's open requests on the worker use already, which the request shares
    prompt  `need` without the output
    others  blocks of the outputs expected of open requests on the worker
    growth  blocks by which answers, the request's own included, outgrow what they hold now before
            one of them ends (router/fleet/reservations/outputs.py)

Requests of other replicas count as like ours on the same worker. The idea is that of Chitu's
scheduler, which simulates the blocks ahead before it admits a task. Pure.
"""

from collections.abc import Callable, Mapping

import numpy as np

from indexer.identity import WorkerKey
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.reservations.load import WorkerLoad
from router.request.prompt import Prompt

SIMULATED_MAX = 16
"""Workers that are simulated (`settle`) for one request at most, 20 us each. Past it, only a worker
that certainly has enough is picked."""


class BlocksAhead:
    """Compares the free KV blocks of a pool's workers with the needs of one request.

    Most picked workers have enough. So only the picked worker is checked at first, and the others
    only if it has too few.
    """

    def __init__(
        self,
        pool: Pool,
        loads: Mapping[WorkerKey, WorkerLoad],
        prompt: Prompt,
        output_tokens: int,
        promised: Callable[[int], float],
    ) -> None:
        """promised: returns the KV blocks that picks may reserve of the worker in a slot of the
        index; NaN: unknown, which is enough for any request.
        """
        self._pool, self._loads = pool, loads
        self._prompt, self._output_tokens, self._promised = prompt, output_tokens, promised
        rows = len(pool)
        self.short = np.zeros(rows, np.bool_)
        """True for each row whose worker was checked and has too few blocks."""
        self.unsure = np.zeros(rows, np.bool_)
        """True for each row that only `settle` can decide."""
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
        # Without the guess of other replicas' newest picks (WorkerLoad.unheard).
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
        """Whether the worker of a row that is marked in `unsure` has enough blocks, by simulating
        its answers; if not, the row is marked in `short`."""
        source = self._pool.sources[row]
        load, size = self._loads[source.key], heartbeat_of(source).block_size
        held = load.external_blocks * size
        peak = load.outputs.peak_tokens(held / load.of_all(), self._output_tokens, now_s)
        growth = (peak * load.of_all() - held) / size
        self.unsure[row] = False
        self.short[row] = self._prompt_blocks[row] + growth > self._left[row]
        return not self.short[row]
