"""Decisions: the pick of a request, and every number that it was made of. Pure data."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from events.feed.fleet_view import Source
from router.config.settings.routing_settings import GuardSettings
from router.decide.decision.guard import Guarded, Waits
from router.decide.decision.ranking import Ranking
from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Policy, Scores
from router.fleet.eligibility import NOT_A_NUMBER, Barred
from router.fleet.on_demand import Further
from router.fleet.pools import Pool
from router.fleet.table import COLUMNS, Column
from router.request.request import Request

FULL = "full"
_FULL = COLUMNS.index("full")


class Prefill(StrEnum):
    """Where the prompt of a pair is computed; its values are values of a metric's label."""

    REMOTE = "remote"
    """The prefill worker computes the prompt, and hands its KV cache over."""
    LOCAL = "local"
    """The decode worker computes the prompt, of which hardly any token is new to it."""
    ABSENT = "absent"
    """One worker alone serves the request, since no pair can."""


class Overlap(NamedTuple):
    """Tokens of a prompt that a worker holds: all (raw), usable, and the usable ones by where
    they are. The fields are in the order of the rows of BlockIndex.overlap.
    """

    raw: int
    usable: int
    device: int
    host: int
    disk: int
    predicted: int

    @property
    def by_events(self) -> int:
        """Usable tokens that the worker's events show, without predictions."""
        return self.device + self.host + self.disk


class Decision:
    """All candidates for a request with their costs, and the picked one."""

    # What most decisions leave as it is has its first value here, which costs them nothing.
    prefill: "Decision | None" = None
    """Decision about a pair's prefill worker, as this one is about its decode worker; None: no
    pair."""
    how: Prefill | None = None
    """Place where the prompt of a pair is computed; None: the request is for no pair."""
    guard: GuardSettings | None = None
    """The guard of the pick; None: no guard."""
    last_resort = False
    """Whether the candidates are last resorts, since no answering worker may be picked."""
    over_estimate = False
    """Whether the candidates include workers over their learned capacity, since no other has
    room."""
    sheds = False
    """Whether a sheddable request was held since no worker with room keeps its objectives for any
    prompt."""
    reservation_id = ""
    """Id of the pick's reservation; set only for observers of decisions."""
    waited_s = 0.0
    """Seconds that the request waited in the queue; set only for observers of decisions, by
    router/observe/audit/sampling.py."""
    invested_tokens: Column | None = None
    """Candidates.invested_tokens; None: 0 for each row."""
    _rows: Candidates | None = None
    _scores: Scores | None = None
    _excluded: Sequence[str] | None = None

    def __init__(
        self,
        request: Request,
        policy: Policy,
        pool: Pool,
        tokens: npt.NDArray[np.int32],
        barred: Barred,
        not_live: list[tuple[Source, str]],
        decided_at_s: float,
        further: Further,
        kv_distance: Column | None,
        ranking: Ranking,
    ) -> None:
        self.request = request
        self.policy = policy
        self.pool = pool
        """The live workers, one a row; no rows when no worker of the pool is live."""
        self.tokens = tokens
        """Overlap of each worker in tokens: shape (fields of Overlap, rows)."""
        self.barred = barred
        """Rows that can't be picked, with reasons, but for those that are full."""
        self.not_live = not_live
        """Workers of the pool that made no row, and why."""
        self.decided_at_s = decided_at_s
        self.order: list[int] = []
        """Row of the pick, then the next rows that could be picked, cheapest first; empty: none."""
        self._further = further
        self.kv_distance = kv_distance
        """Distance from each row to the source of the KV cache; None: nothing has to come."""
        self.ranking = ranking
        """The rows' costs, and their order by cost."""

    @property
    def table(self) -> npt.NDArray[np.float64]:
        """Columns of the workers, shape (len(COLUMNS), rows), as they were when this was first
        read; read only.
        """
        return self.ranking.table

    @property
    def sources(self) -> Sequence[Source]:
        """The worker of each row."""
        return self.pool.sources

    @property
    def rows(self) -> Candidates:
        """The candidates as policies see them. Columns that few policies read (prefill, blocks in
        use) are made when they are read: read them before this decision's pick is reserved.
        """
        if self._rows is None:
            self._rows = Candidates(
                barred=self.barred,
                table=self.table,
                request=self.request,
                tokens=self.tokens,
                pool=self.pool,
                further=self._further,
                now_s=self.decided_at_s,
                kv_distance=self.kv_distance,
                invested_tokens=self.invested_tokens,
            )
        return self._rows

    @property
    def scores_made(self) -> Scores | None:
        """Costs with their terms, if Python computed them; None: native code computed them."""
        return self._scores

    @property
    def scores(self) -> Scores:
        """Costs with their terms, by the policy's function; see `rows` for when to read them."""
        if self._scores is None:
            self._scores = self.policy.score(self.rows) if len(self.pool) else Scores(np.zeros(0))
        return self._scores

    @scores.setter
    def scores(self, scores: Scores) -> None:
        self._scores = scores

    def keep(self) -> None:
        """Computes `table` and `scores` now, since the fleet may change before they are read."""
        _ = self.table, self.scores
        if self.prefill is not None:
            self.prefill.keep()

    def keep_table(self) -> None:
        """Copies `table` now, since the fleet may change before it is read."""
        _ = self.table
        if self.prefill is not None:
            self.prefill.keep_table()

    def affinity_at(self, row: int) -> float:
        """Bonus that is subtracted from a row's cost because the request's session goes on
        there.
        """
        home = self._further.session_row(self.pool, self.request.session_id)
        return self.policy.affinity_bonus if row == home else 0.0

    @property
    def draws(self) -> bool:
        """Whether the pick is drawn at random by the rows' chances."""
        return self._scores is not None and self._scores.chances is not None

    @property
    def excluded(self) -> Sequence[str]:
        """Reason for each row why it can't be picked; empty when it can."""
        if self._excluded is None:
            full = self.table[_FULL].tolist()
            reasons = [
                reason or (FULL if is_full else "")
                for reason, is_full in zip(self.barred.reasons, full, strict=True)
            ]
            for row in self.ranking.bad_rows():
                reasons[row] = reasons[row] or NOT_A_NUMBER
            self._excluded = reasons
        return self._excluded

    @property
    def tied(self) -> int:
        """Number of rows that shared the lowest cost."""
        return self.ranking.tied

    @property
    def guarded(self) -> Guarded | None:
        """The pick that the guard replaced, with the guard's numbers; None: the pick stayed."""
        cheapest = self.ranking.moved_from
        if cheapest < 0 or self.guard is None:
            return None
        can = np.array([not reason for reason in self.excluded], np.bool_)
        return Guarded(cheapest, Waits.of(self.rows, can, self.guard))

    @property
    def ttft_s(self) -> float | None:
        """Predicted seconds to the first token of the pick; None: the policy predicts none."""
        seconds = self.ranking.seconds
        return None if seconds is None else seconds.item(self.order[0])

    @property
    def tpot_s(self) -> float | None:
        """Predicted seconds between the tokens of the pick's answer; None: not learned yet. Read it
        before the pick is reserved, unless the table is kept."""
        return self.ranking.tpot_s(self.order[0])

    @property
    def computing(self) -> "Decision":
        """The decision about the worker that computes the prompt: for a pair, that of the prefill
        worker.
        """
        return self.prefill if self.prefill and self.how is Prefill.REMOTE else self

    def overlap(self, row: int) -> Overlap:
        return Overlap._make(self.tokens[:, row].tolist())

    def best_overlap_tokens(self) -> int:
        """Usable overlap of the worker that has the most, in tokens."""
        return self.ranking.best_overlap()

    @property
    def waits(self) -> bool:
        """Whether some worker may take the request once it has room or another cost."""
        return self.ranking.full > 0 or self.ranking.not_finite > 0

    def exclusions(self) -> Mapping[str, int]:
        """Number of excluded workers, by reason."""
        reasons, ranking = dict(self.barred.counts), self.ranking
        for _, reason in self.not_live:
            reasons[reason] = reasons.get(reason, 0) + 1
        for reason, count in ((FULL, ranking.full), (NOT_A_NUMBER, ranking.not_finite)):
            if count:
                reasons[reason] = reasons.get(reason, 0) + count
        return reasons
