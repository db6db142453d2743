"""Which workers of a pool have KV blocks for a whole request, prompt and expected output.

    short   if  need > left
    enough  if  need + others <= left
    else    enough if prompt + growth <= left

    left    blocks that picks may promise, less those in use and reserved; what is guessed of
            peers' newest picks makes a worker dearer, but takes none of them
    need    blocks of the prompt and of the expected output, less those of the prompt's start that
            open requests of this router use there, which the request shares
    prompt  the same without the output
    others  blocks of all that is expected of open requests there
    growth  blocks by which answers, the request's own included, outgrow what they hold now before
            one of them ends (router/reservations/outputs.py)

Requests of other replicas are taken to be like ours on the same worker. The idea is that of Chitu's
scheduler, which simulates the blocks ahead before it admits a task. Pure.
"""

from collections.abc import Mapping

import numpy as np

from indexer.identity import WorkerKey
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.table import Column
from router.request.prompt import Prompt
from router.reservations.load import WorkerLoad

SIMULATED_MAX = 16
"""Workers whose blocks are looked at step by step for one request: 20 us each. Of others that are
neither short nor certain to have enough, none is picked."""


class BlocksAhead:
    """The workers of one pool, for one request."""

    def __init__(
        self,
        pool: Pool,
        loads: Mapping[WorkerKey, WorkerLoad],
        prompt: Prompt,
        output_tokens: int,
        promised: Column,
    ) -> None:
        """promised: blocks that picks may promise, by worker; not a number where unknown, which no
        request is too large for. It is changed here."""
        self._pool, self._loads, self._output_tokens = pool, loads, output_tokens
        self._left = promised
        rows = len(pool)
        self.short = np.zeros(rows, np.bool_)
        """Workers that have too few."""
        self.unsure = np.zeros(rows, np.bool_)
        """Workers that `settle` has to look at."""
        self._prompt_blocks = np.zeros(rows)
        for row, source in enumerate(pool.sources):
            load, size = loads.get(source.key), heartbeat_of(source).block_size
            if load is None or not size:
                continue
            self._left[row] -= load.active_blocks()  # without what is guessed of peers
            shared = load.in_use(prompt.prefixes(size)) if load.requests else 0
            self._prompt_blocks[row] = -(-prompt.token_count // size) - shared
            need = -(-(prompt.token_count + output_tokens) // size) - shared
            if load.active_requests() <= 0:
                continue
            self.short[row] = need > self._left[row]
            if load.outputs.tokens and not self.short[row]:
                others = load.outputs.tokens / size * load.of_all()
                self.unsure[row] = need + others > self._left[row]

    def settle(self, row: int, now_s: float) -> bool:
        """Whether a worker that `unsure` names has enough; else it is short."""
        source = self._pool.sources[row]
        load, size = self._loads[source.key], heartbeat_of(source).block_size
        held = load.external_blocks * size
        peak = load.outputs.peak_tokens(held / load.of_all(), self._output_tokens, now_s)
        growth = (peak * load.of_all() - held) / size
        self.unsure[row] = False
        self.short[row] = self._prompt_blocks[row] + growth > self._left[row]
        return not self.short[row]
