"""Columns about workers that few policies read, made only when a policy reads them.

The columns that most decisions need come from one table (router/fleet/pools.py). Those here cost
time that a policy which does not read them should not pay for.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.rates import PrefillRates
from router.fleet.reservations.load import WorkerLoad
from router.fleet.reservations.sessions import Sessions
from router.fleet.shared_prefixes import ROOM_SHARE, SharedPrefixes
from router.fleet.table import COLUMNS, Column
from router.fleet.topology import Topology
from router.fleet.working_set import WorkingSets

_TOTAL_BLOCKS = COLUMNS.index("total_blocks")


class Further:
    """Makes such columns for Candidates (router/decide/policies/candidates.py); changes nothing."""

    def __init__(
        self,
        loads: Mapping[WorkerKey, WorkerLoad],
        rates: PrefillRates,
        sessions: Sessions | None = None,
        working_sets: WorkingSets | None = None,
        shared_prefixes: SharedPrefixes | None = None,
    ) -> None:
        """A source that is None counts as empty: no sessions, working sets or shared prefixes."""
        self.rates = rates
        self._working_sets = WorkingSets() if working_sets is None else working_sets
        self.loads = loads
        self._sessions = Sessions(0.0, 0) if sessions is None else sessions
        self._shared = SharedPrefixes() if shared_prefixes is None else shared_prefixes
        self._topology: tuple[Pool, Topology] | None = None
        """The pool of the last call of `topology`, often the only pool, and its topology."""

    def session_row(self, pool: Pool, session_id: str) -> int:
        """The row of the worker that the session's last request went to; -1: none."""
        worker = self._sessions.worker_of(session_id)
        return -1 if worker is None else pool.made(_row_of_worker).get(worker, -1)

    def recent_blocks(self, pool: Pool) -> Column:
        """Number of blocks in each worker's working set."""
        blocks: Column = self._working_sets.table(pool.made(last_slot)).take(pool.slots)
        return blocks

    def invested_tokens(
        self,
        pool: Pool,
        table: npt.NDArray[np.float64],
        usable: npt.NDArray[np.int32],
        longest: int,
        prefixes: HashArray,
        now_s: float,
    ) -> Column | None:
        """Tokens that a prompt would invest on each worker; None: none on any. table: the pool's
        columns; all else as for SharedPrefixes.invested."""
        if not longest:
            return None

        def room() -> Column:
            blocks: Column = ROOM_SHARE * table[_TOTAL_BLOCKS] - self.recent_blocks(pool)
            return blocks

        size, rate = pool.only_block_size, self.rates.anchor(pool.models[0])
        return self._shared.invested(prefixes, usable, longest, size, room, rate, now_s)

    def topology(self, pool: Pool) -> Topology:
        """Distances between the workers of a pool."""
        if self._topology is None or self._topology[0] is not pool:
            labels = [heartbeat_of(source).labels for source in pool.sources]
            self._topology = pool, Topology(labels)
        return self._topology[1]


def _row_of_worker(pool: Pool) -> dict[WorkerKey, int]:
    return {key: row for row, key in enumerate(pool.workers)}


def last_slot(pool: Pool) -> int:
    """The highest index slot of a pool's workers."""
    return int(pool.slots.max(initial=0))
