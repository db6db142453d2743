"""The candidates of a decision: a row for each live worker of a pool, stored as columns.

Costs (router/decide/policies) read these and nothing else, so a receipt that shows a row shows
everything that its worker was judged by.
"""

from collections.abc import Sequence
from math import nan
from typing import cast

import numpy as np
import numpy.typing as npt
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from router.fleet.eligibility import Barred
from router.fleet.on_demand import Further
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.rates import PrefillColumns
from router.fleet.table import COLUMNS, Column, Flags, Table
from router.request.request import Request

_TRUST = COLUMNS.index("trust")


class Candidates(Table):
    """Live workers of a pool, row by row; excluded ones too, since means are over all workers."""

    __slots__ = (
        "_further", "_kv_distance", "_pool", "_tokens", "barred", "invested_tokens",
        "new_tokens", "now_s", "overlap_tokens", "prompt_tokens", "request", "table", "workers",
    )  # fmt: skip

    def __init__(
        self,
        barred: Barred,
        table: npt.NDArray[np.float64],
        request: Request,
        tokens: npt.NDArray[np.int32],
        pool: Pool,
        further: Further,
        now_s: float,
        kv_distance: Column | None = None,
        invested_tokens: Column | None = None,
    ) -> None:
        """table: shape (len(COLUMNS), rows); nobody may change it afterwards.

        tokens: shape (fields of Overlap, rows), before any trust.
        """
        self.workers = pool.workers
        self.prompt_tokens = request.prompt.token_count
        """Tokens of the prompt, 1 at least."""
        self.overlap_tokens: Column = table[_TRUST] * tokens[1]
        """Tokens of the prompt that the engine will reuse (usable overlap), times trust."""
        self.new_tokens = self.prompt_tokens - self.overlap_tokens
        self.invested_tokens = np.zeros(len(self)) if invested_tokens is None else invested_tokens
        """The part of new_tokens that is computed for later prompts with the same prefix, too
        (router/fleet/shared_prefixes.py); 0 for policies that don't invest."""
        self.barred = barred
        """Rows that can't be picked, but for those that are full."""
        self.request = request
        """The request: prompt, session_id, tenant, expected_output_tokens and so on."""
        self.now_s = now_s
        """Unix time of the decision, in seconds."""
        self._tokens = tokens
        self._pool = pool
        self._further = further
        self._kv_distance = kv_distance
        self.table = table
        """All columns: shape (len(COLUMNS), rows)."""
        self._columns = cast("Sequence[Column]", table)  # a matrix is the sequence of its rows

    @override
    def __repr__(self) -> str:
        return f"<Candidates {len(self)} rows for {self.prompt_tokens} tokens>"

    def __len__(self) -> int:
        return len(self.workers)

    # Most policies don't read what follows; it is made on demand.

    @property
    def excluded(self) -> Sequence[str]:
        """Reason for each row why it can't be picked; empty when it can, unless it is full."""
        return self.barred.reasons

    @property
    def can_take(self) -> Flags:
        """True where a row can be picked: neither excluded nor full."""
        can: Flags = self.full == 0
        if self.barred.mask is not None:
            can &= ~self.barred.mask
        return can

    @property
    def device_tokens(self) -> Column:
        """The part of overlap_tokens that is on the device, or predicted to be."""
        return self._trusted(self._tokens[2] + self._tokens[5])

    @property
    def host_tokens(self) -> Column:
        """The part of overlap_tokens that is on the host and not on the device."""
        return self._trusted(self._tokens[3])

    @property
    def disk_tokens(self) -> Column:
        """The part of overlap_tokens that is on disk alone."""
        return self._trusted(self._tokens[4])

    @property
    def block_tokens(self) -> Column:
        """Tokens of a block, as a divisor: block_size, or 1 where it is unknown."""
        return np.maximum(self.block_size, 1.0)

    @property
    def prompt_blocks(self) -> Column:
        """Blocks that the prompt takes, a partly filled last block included."""
        return np.ceil(self.prompt_tokens / self.block_tokens)

    @property
    def blocks_in_use(self) -> Column:
        """Blocks of the prompt that this router's open requests on each worker use already."""
        used, prompt = np.zeros(len(self)), self.request.prompt
        for row, source in enumerate(self._pool.sources):
            load = self._further.loads.get(source.key)
            if load is not None and load.requests and (size := heartbeat_of(source).block_size):
                used[row] = load.in_use(prompt.prefixes(size))
        return used

    @property
    def new_blocks(self) -> Column:
        """Blocks of the prompt that our open requests on the worker do not use already."""
        return self.prompt_blocks - self.blocks_in_use

    @property
    def free_blocks(self) -> Column:
        """total_blocks - active_blocks; inf where the total is unknown."""
        return np.where(np.isnan(self.total_blocks), np.inf, self.total_blocks - self.active_blocks)

    @property
    def others_waiting(self) -> Column:
        """Estimate of the requests that wait on the worker and were not sent by this router."""
        others, waiting = np.zeros(len(self)), self.waiting
        for row in np.flatnonzero(waiting).tolist():
            load = self._further.loads[self.workers[row]]  # that is where waiting came from
            others[row] = min(float(waiting[row]), load.external_requests)
        return others

    @property
    def prefill(self) -> PrefillColumns:
        """How fast each worker computes prompts, and for how long it is busy, as columns."""
        return self._further.rates.columns(self._pool.slots, self._pool.models, self.now_s)

    @property
    def recent_blocks(self) -> Column:
        """Estimate of the distinct blocks that this replica sent to each worker in the last
        minute.
        """
        return self._further.recent_blocks(self._pool)

    @property
    def evicted_share(self) -> Column:
        """Share of the blocks that the request adds to a worker for which there is no place beside
        the worker's working set: 1 - (total_blocks - recent_blocks) / (new_tokens / block_size),
        from 0 to 1; 0 where the total is unknown.
        """
        stored_blocks = np.maximum(self.new_tokens, 1.0) / self.block_tokens
        room = self.total_blocks - self.recent_blocks
        share: Column = np.nan_to_num(np.clip(1 - room / stored_blocks, 0.0, 1.0))
        return share

    def own_number(self, name: str) -> Column:
        """A number that `engines.numbers` of the relays names; NaN where a worker's engine has
        none.
        """
        beats = [source.heartbeat for source in self._pool.sources]  # each has one: 50 ns a worker
        return np.array([beat.own_numbers.get(name, nan) if beat else nan for beat in beats])

    @property
    def name_hashes(self) -> npt.NDArray[np.uint64]:
        """Hash of each worker's id and rank; the same in every process."""
        return self._pool.name_hashes

    @property
    def of_session(self) -> Flags:
        """True for the worker that the session's last request went to, as far as this replica
        knows.
        """
        flags = np.zeros(len(self), np.bool_)
        row = self._further.session_row(self._pool, self.request.session_id)
        if row >= 0:
            flags[row] = True
        return flags

    @property
    def affinity_key(self) -> int:
        """64-bit key that is the same for requests which belong together: made of session_id;
        without one, of the prompt's first block, or of the whole prompt if that fills no block.
        """
        if self.request.session_id:
            return xxh3_64_intdigest(self.request.session_id.encode())
        sizes = [size for size in self._pool.block_sizes if size]
        size, prompt = min(sizes, default=0), self.request.prompt
        first = prompt.prefixes(size)[:1]
        return int(first[0]) if len(first) else prompt.fingerprint(size) & (1 << 64) - 1

    def _trusted(self, tokens: npt.NDArray[np.int32]) -> Column:
        counted: Column = self.trust * tokens
        return counted

    @property
    def kv_distance(self) -> Column:
        """Distance over which the prompt's KV cache has to come, on the scale of mean_distance; 0
        where nothing has to come, and everywhere for requests that are served by one worker.
        """
        return np.zeros(len(self)) if self._kv_distance is None else self._kv_distance

    def mean_distance(self, targets: Flags) -> Column:
        """Mean distance from each worker to those where targets is True: 0 the same host, 1 the
        same rack, 2 the same cluster, 3 beyond or unknown; 0 without targets.
        """
        return self._further.topology(self._pool).mean_distance(targets)
