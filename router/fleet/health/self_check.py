"""Compares cached tokens that engines report with those that the index predicted at the pick.

    reported = predicted, to a block   the index is right
    reported > predicted               the index lacks blocks; it learns those of a partial stream
    reported < predicted               the index has too many, unless they were removed since

A shortfall (reported < predicted) proves little by itself: requests for prompt log probabilities
reuse nothing, and a block may be removed, and stored again by the very request that missed it,
before that request's report comes. So shortfalls add up to a suspicion, which ends when a predicted
hit comes true; at SUSPICION_MAX the worker's stream is read again: a resync. Pure.

Laws:
- a predicted hit that came true ends all suspicion: exact reports never lead to a resync;
- shortfalls on a live stream with no such hit between them lead to a resync, after SUSPICION_MAX of
  them at most, unless the worker's last resync is too recent;
- a worker waits RESYNC_S from one resync to the next, each time twice as long, up to RESYNC_MAX_S,
  until hits come true again; the fleet begins at most RESYNCS_MAX of them in RESYNCS_WINDOW_S.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from typing_extensions import override

from events.feed.fleet_view import FleetView, Pull, Source
from events.feed.stream import StreamState
from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.fleet.reservations.reservations import Reservation

SUSPICION_MAX = 30
_SUSPICION_CALM = 10
"""Suspicion that a shortfall adds if no block of the worker was removed since the pick."""
_SUSPICION_BUSY = 1
"""Suspicion that a shortfall adds if blocks were removed since, perhaps the missed ones."""
TRUE_RUN = 3
"""Predicted hits in a row that come true, after which a worker's next wait is RESYNC_S again."""
RESYNC_S = 30.0
RESYNC_MAX_S = 600.0
RESYNCS_MAX = 16
RESYNCS_WINDOW_S = 10.0


class CheckResult(StrEnum):
    """What a report shows of the index; its values are values of a metric's label."""

    EXACT = "exact"
    COLD = "cold"
    """Nothing was reused, or nothing predicted, and at most a block of the other: no evidence."""
    UNDER = "under"
    """More was reused than predicted, and the index still lacks the blocks."""
    OVER = "over"
    """Less was reused than predicted, and the index still has the blocks."""
    EXPLAINED = "explained"
    """Reported and predicted differ, but the index has changed since and agrees with the report."""
    UNTRUSTED = "untrusted"
    """The stream was not live all the time since the pick, or the prompt's content is not known, so
    that the index predicted nothing."""


@dataclass(slots=True)
class Record:
    """Counts over the reports on one worker."""

    suspicion: int = 0
    """Sum that shortfalls have added since a hit came true: 0 to SUSPICION_MAX."""
    true_run: int = 0
    """Predicted hits that came true, in a row."""
    blind_run: int = 0
    """Reports UNDER for which nothing was predicted, since a predicted hit last came true."""
    phantom_run: int = 0
    """Reports OVER for which nothing was reused, since a predicted hit last came true."""
    resyncs: int = 0
    """Resyncs since TRUE_RUN hits came true in a row."""
    wait_s: float = RESYNC_S
    """Seconds from the next resync to the one after it, at least."""
    not_before_s: float = 0.0


class SelfCheck:
    """Checks every worker's reports, and says which streams to read again."""

    def __init__(self, view: FleetView) -> None:
        self.results: Counter[CheckResult] = Counter()
        self.resyncs = 0
        self.learned_blocks = 0
        """Blocks that engines reused though their streams had not reported them."""
        self._view = view
        self._records: dict[WorkerKey, Record] = {}
        self._due: dict[WorkerKey, None] = {}
        """Workers to resync, the longest due in front."""
        self._begun: deque[float] = deque(maxlen=RESYNCS_MAX)
        """When the last resyncs began."""

    @override
    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {result}" for result, count in sorted(self.results.items()))
        return f"<SelfCheck {counts or 'no reports'}; {self.resyncs} resyncs, {len(self._due)} due>"

    def record(self, worker: WorkerKey) -> Record:
        """The record of a worker; an empty record before its first report."""
        return self._records.get(worker) or Record()

    def on_report(self, reservation: Reservation, reported_tokens: int, now_s: float) -> None:
        """Checks a reservation's first report of cached tokens. reported_tokens: prompt tokens that
        the engine had cached."""
        source = self._view.sources.get(reservation.worker)
        if source is not None:
            self.results[self._check(source, reservation, reported_tokens, now_s)] += 1

    def on_forgotten(self, workers: Iterable[WorkerKey]) -> None:
        """Forgets workers that left the fleet view."""
        for worker in workers:
            self._records.pop(worker, None)
            self._due.pop(worker, None)

    def begin_resyncs(self, now_s: float) -> list[Pull]:
        """Begins the resyncs that are due and allowed; returns pulls, which the caller performs."""
        pulls: list[Pull] = []
        while self._due and not self._too_many(now_s):
            worker = next(iter(self._due))
            del self._due[worker]
            record = self._records[worker]
            record.suspicion = 0
            if self._view.sources[worker].stream.state is not StreamState.LIVE:
                continue  # it is read again already, or claims nothing
            record.resyncs += 1
            record.not_before_s = now_s + record.wait_s
            record.wait_s = min(2 * record.wait_s, RESYNC_MAX_S)
            self.resyncs += 1
            self._begun.append(now_s)
            pulls += self._view.resync(worker.worker_id, now_s, worker.dp_rank)
        return pulls

    def _too_many(self, now_s: float) -> bool:
        return len(self._begun) == RESYNCS_MAX and now_s - self._begun[0] < RESYNCS_WINDOW_S

    def _check(
        self, source: Source, reservation: Reservation, reported: int, now_s: float
    ) -> CheckResult:
        heartbeat, stream = source.heartbeat, source.stream
        if (
            heartbeat is None
            or not heartbeat.block_size
            or stream.state is not StreamState.LIVE
            or stream.changed_at_s > reservation.opened_at_s
            or (not len(reservation.prefixes) and reservation.prompt_tokens >= heartbeat.block_size)
        ):
            return CheckResult.UNTRUSTED
        size = heartbeat.block_size
        # Engines reuse whole blocks of their own; some leave out the last one that matches.
        slack = max(size, heartbeat.engine_block_size)
        predicted = reservation.predicted_tokens
        record = self._records.setdefault(source.key, Record())
        if reported + slack < predicted:
            beyond = (reported + slack) // size + 1
            if self._known_blocks(source, reservation.prefixes[:beyond]) < beyond:
                return CheckResult.EXPLAINED
            self._suspect(source, record, reservation.opened_at_s, now_s)
            record.phantom_run += not reported
            return CheckResult.OVER
        if predicted and reported:
            self._came_true(source.key, record)
        reused = reported // size
        if reused <= predicted // size:
            return CheckResult.EXACT if predicted and reported else CheckResult.COLD
        prefixes = reservation.prefixes[:reused]
        known = self._known_blocks(source, prefixes)
        if known == reused:
            return CheckResult.EXPLAINED  # others stored it meanwhile
        record.blind_run += not predicted
        if source.approximate or not self._view.complete(source):
            self.learned_blocks += reused - known
            self._view.predict(source, prefixes, now_s)
        return CheckResult.UNDER

    def _known_blocks(self, source: Source, prefixes: HashArray) -> int:
        """Number of a prompt's leading blocks that a worker holds now, by its events."""
        return int(self._view.index.match(prefixes).held()[source.slot])

    def _suspect(self, source: Source, record: Record, picked_at_s: float, now_s: float) -> None:
        calm = source.gone_at_s < picked_at_s
        record.true_run = 0
        record.suspicion = min(
            record.suspicion + (_SUSPICION_CALM if calm else _SUSPICION_BUSY), SUSPICION_MAX
        )
        if record.suspicion == SUSPICION_MAX and now_s >= record.not_before_s:
            self._due[source.key] = None

    def _came_true(self, worker: WorkerKey, record: Record) -> None:
        record.suspicion = record.blind_run = record.phantom_run = 0
        record.true_run += 1
        if record.true_run >= TRUE_RUN:
            record.resyncs = 0
            record.wait_s = RESYNC_S
        self._due.pop(worker, None)
