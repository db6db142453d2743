"""The router's picture of its fleet: every worker's stream, heartbeat and place in the index.

Pure: bytes and `now_s` in, recoveries to perform out; the feed (events/feed/feed.py) does the I/O.

Laws:
- a worker's blocks are in the index only while the worker is known; a forgotten worker leaves no
  trace, and a worker removed by command stays away until its tombstone ends;
- predictions never count as blocks in a worker's events.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from typing_extensions import override

from events.engines.table import engine_of
from events.feed.clock_offset import ClockOffset
from events.feed.newest import Newest
from events.feed.predictions import Predictions
from events.feed.stream import (
    LATE_S,
    Adopt,
    Apply,
    Effect,
    Forget,
    Recover,
    Stream,
    StreamState,
)
from events.plane.facts import (
    TIERS,
    Beat,
    Cleared,
    Epoch,
    Fact,
    FactsMessage,
    Heartbeat,
    Removed,
    Stored,
    Unreadable,
    decode,
    decode_stream,
    unpack_hashes,
)
from events.plane.left_out import ITEMS_UNTOLD, SALTS_UNTOLD
from indexer.identity import HashArray, WorkerKey
from indexer.index import BlockIndex

MASS_SILENCE_WORKERS = 2
"""Least workers among which a mass silence is possible. Relays inside one router end with it, so
that already two workers may fall silent together and serve on; a single worker's silence shows no
more than that worker's failure."""
BEAT_TIMEOUT_S = 3.0
"""Silence after which a worker gets no requests: two missing beats, and one that is late."""
FORGET_S = 30.0
"""Silence after which a worker is forgotten: a relay that is started again is back by then, and its
blocks are known."""
WAITING_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of all streams' messages that wait for a recovery; each stream has its own bound, too."""
RANKS_MAX = 1024
"""Ranks of one worker id, so that a single relay can't take every place of fleet.workers_max. A
relay's `ranks` has the same bound."""
PREDICTED_TTL_S = 5.0
"""Seconds for which the blocks of a pick count as cached before its worker's events confirm them:
longer than a long prompt is computed, so that a burst of siblings lands together, and short enough
for a request that failed."""
PREDICTED_BLOCKS_MAX = 1 << 16
"""Predicted blocks of a worker that doesn't report its total_blocks."""
HEARTBEAT_UNREADABLE = "no readable heartbeat"
"""Reason: beats of the worker's stream come, but no heartbeat that could be read."""
NOT_ANSWERING = "engine not answering"
DELAY_WINDOW_S = 4.0
"""Seconds of a window; for one to two windows a relay's clock that was set back looks like a delay.
"""
ASLEEP = "engine asleep"
NOT_PROBED = "engine not probed yet"
"""Reason: the worker's relay has just started, and its first probe of the engine has not ended."""
SLICE_BYTES = 64 * 1024
"""Bytes of hashes applied at once, about 1 ms of work; the rest of a recovery or of a long message
waits in the worker's backlog. A fact counts as FACT_BYTES more."""
FACT_BYTES = 128
"""What a fact counts in a slice besides its hashes: 2 us of work, so that 512 facts fit at most."""
SLICE_FACTS = SLICE_BYTES // FACT_BYTES
_MASS_SILENCE_PATIENCE = 10
"""Multiple of forget_s after which a worker is forgotten in a mass silence."""


class Pull(NamedTuple):
    """A recovery to perform: a request to this worker's relay."""

    worker: WorkerKey
    reason: str
    from_seq: int | None


@dataclass(slots=True)
class Source:
    """One worker (rank): its relay's stream and heartbeat, and its slot in the index."""

    key: WorkerKey
    slot: int
    stream: Stream
    heartbeat: Heartbeat | None = None
    heartbeat_at_s: float = 0.0
    """When the last readable heartbeat came."""
    heartbeat_overdue: bool = False
    """The stream beat on for beat_timeout_s after the last readable heartbeat: address and load may
    have changed since. If the relay is away, beats stop too, and the stream is silent instead."""
    clock_skew_s: float = 0.0
    """Our clock less the relay's when its last heartbeat came; delays make it larger."""
    clock: ClockOffset = field(default_factory=ClockOffset)
    """Our clock less the relay's, without the delays of single heartbeats."""
    least: ClockOffset = field(default_factory=lambda: ClockOffset(DELAY_WINDOW_S))
    """Our clock less the relay's, by the least delayed of the latest beats."""
    gone_at_s: float = 0.0
    """When the last removal or clearing of blocks was applied."""
    waiting_bytes: int = 0
    """The stream's waiting_bytes as counted in FleetView.waiting_bytes."""
    pauses: int = 0
    """The stream's pauses as counted in FleetView.recovery_pauses."""
    backlog: deque[Fact] = field(default_factory=deque)
    """Facts in order that are not in the index yet: `FleetView.work` applies them. Bounded by the
    bytes of a recovery and of the messages that may wait for it."""
    state: StreamState | None = None
    """The stream's state when it was last marked as changed."""

    def delayed_s(self, sent_s: float, now_s: float) -> float:
        """Seconds by which a beat came later than other recent ones, by the relay's clock."""
        self.least.heard(sent_s, now_s)
        return now_s - sent_s - self.least.seconds

    @property
    def approximate(self) -> bool:
        """Whether the worker's blocks are known from predictions only."""
        if self.heartbeat is not None and not self.heartbeat.events:
            return True
        return self.stream.seq == 0 and self.stream.state is StreamState.LIVE


class FleetView:
    """All workers with a stream or a heartbeat.

    Over 300 lines: the only writer of the streams, heartbeats and slots of all workers.
    """

    newest: Newest | None = None
    """Blocks stored in the last second; None: no request needs them."""

    def __init__(
        self,
        index: BlockIndex,
        *,
        beat_timeout_s: float = BEAT_TIMEOUT_S,
        forget_s: float = FORGET_S,
        workers_max: int,
        predicted_ttl_s: float = PREDICTED_TTL_S,
        approximate_ttl_s: float = 120.0,
    ) -> None:
        """predicted_ttl_s, approximate_ttl_s: seconds of a prediction, see `predict`; 0: none."""
        self.index = index
        self.sources: dict[WorkerKey, Source] = {}
        self.facts: Counter[str] = Counter()
        """Kind -> facts applied"""
        self.applied = 0
        """Facts of all kinds applied, except facts of snapshots"""
        self.dropped: Counter[str] = Counter()
        """Reason -> messages or facts dropped"""
        self.forgotten: Counter[str] = Counter()
        """Reason -> placements forgotten"""
        self.shut_out: Counter[str] = Counter()
        """Plane -> times that a flooding publisher was shut out; see events/feed/fence.py"""
        self.recoveries: Counter[tuple[str, str]] = Counter()
        """(ring or snapshot, ok or failed) -> recoveries"""
        self.lost: Counter[str] = Counter()
        """Worker id -> messages dropped over the intake's bounds; known workers only"""
        self.gaps = 0
        self.drifts = 0
        self.recovery_pauses = 0
        """Recoveries of all streams after which the next recovery has to wait"""
        self.mass_silence = False
        """Whether most workers fell silent together, so that the broker may have failed."""
        self.silent_models: frozenset[str] = frozenset()
        """Models most of whose workers fell silent together."""
        self.waiting_bytes = 0
        """Bytes of all streams' waiting messages"""
        self.behind_s = 0.0
        """Seconds for which messages that are read now had waited in our connection, as measured
        last."""
        self.predictions = Predictions(index)
        self.salted = False
        """Whether a request with a cache salt was routed."""
        self.itemized = False
        """Whether a request with images or other items was routed."""
        self._predicted_ttl_s = predicted_ttl_s
        self._approximate_ttl_s = approximate_ttl_s
        self.backlogged: dict[WorkerKey, None] = {}
        """Workers with a backlog, in the order of their turns"""
        self._ranks: dict[str, dict[int, Source]] = {}
        """Worker id -> rank -> source"""
        self._changed: dict[WorkerKey, None] = {}
        self._staged: dict[WorkerKey, int] = {}
        """Worker -> slot of the snapshot that is being staged"""
        self._beat_timeout_s = beat_timeout_s
        self._forget_s = forget_s
        self._workers_max = workers_max
        self._connection_at_s = -inf
        """When our own connection to the broker was made or lost last."""
        self._tombstones: dict[str, float] = {}
        """Worker id -> end of its removal, until which its messages are ignored"""

    @override
    def __repr__(self) -> str:
        return f"<FleetView {self.summary()}>"

    def summary(self) -> str:
        """The number of workers by the state of their streams; for a log line."""
        states = Counter(source.stream.state.value for source in self.sources.values())
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"{len(self.sources)} workers: {counts or 'none'}"

    def on_stream(self, key: WorkerKey, payload: bytes, now_s: float) -> list[Pull]:
        """Applies a message of the facts subject; returns recoveries to perform."""
        message, dropped = decode_stream(payload)
        if dropped:
            self._count_dropped(dropped)
        if message is None:
            return []
        source = self._source(key, now_s)
        if source is None:
            return []
        if source.backlog:
            self._catch_up(source, now_s)
        stream = source.stream
        before = (stream.gaps, stream.drifts)
        if isinstance(message, Beat):
            slot = source.slot
            stream.late_s = max(source.delayed_s(message.time_s, now_s), self.behind_s)
            effects = stream.on_beat(message, self.index.told(slot), self.index.digest(slot), now_s)
        else:
            duplicates = stream.duplicates
            effects = stream.on_facts(message, len(payload), now_s)
            if stream.duplicates != duplicates:
                self.dropped["duplicate"] += stream.duplicates - duplicates
        self.gaps += stream.gaps - before[0]
        self.drifts += stream.drifts - before[1]
        if len(payload) <= SLICE_BYTES and len(effects) == 1 and not source.backlog:
            only = effects[0]
            if isinstance(only, Apply) and len(only.facts) <= SLICE_FACTS:
                self._apply_next(source, only.facts, now_s)
                return []
        return self._perform(source, effects, now_s)

    def on_heartbeat(self, key: WorkerKey, payload: bytes, now_s: float) -> Source | None:
        """Applies a message of the load subject; returns the changed source, or None when it was
        dropped.
        """
        message = decode(Heartbeat, payload)
        if isinstance(message, Unreadable):
            self._count_dropped((message,))
            return None
        source = self._source(key, now_s)
        if source is None:
            return None
        known = [source.stream.epoch]
        if source.heartbeat and now_s - source.heartbeat_at_s < self._beat_timeout_s:
            known.append(source.heartbeat.epoch)
        if any(epoch is not None and message.epoch < epoch for epoch in known):
            self.dropped["lower_epoch"] += 1
            return None
        source.heartbeat = message
        source.heartbeat_at_s = now_s
        source.heartbeat_overdue = False
        source.clock_skew_s = now_s - message.sent_at_s
        source.clock.heard(message.sent_at_s, now_s)
        self._changed[key] = None
        if message.asleep and source.approximate:  # of others, the stream says so
            self.index.clear(source.slot)
            self.predictions.forget(source.slot)
            source.gone_at_s = now_s
        return source

    def on_ring(
        self, key: WorkerKey, epoch: Epoch, messages: Iterable[bytes | FactsMessage], now_s: float
    ) -> list[Pull]:
        """Applies messages from a relay's ring, decoded or not; returns recoveries to perform."""
        source = self.sources.get(key)
        if source is None:
            return []
        self._catch_up(source, now_s)
        decoded: list[FactsMessage] = []
        for payload in messages:
            if isinstance(payload, FactsMessage):
                decoded.append(payload)
                continue
            message, dropped = decode_stream(payload)
            self._count_dropped(dropped)
            if not isinstance(message, FactsMessage):
                self.recoveries["ring", "failed"] += 1
                effects = source.stream.on_recovery_failed(
                    "a message of the relay's ring is unreadable", True, now_s
                )
                return self._perform(source, effects, now_s)
            decoded.append(message)
        self.recoveries["ring", "ok"] += 1
        effects = source.stream.on_ring(epoch, decoded, now_s)
        return self._perform(source, effects, now_s)

    def on_snapshot(
        self,
        key: WorkerKey,
        epoch: Epoch,
        as_of: int,
        facts: list[Stored],
        complete: bool,
        now_s: float,
    ) -> list[Pull]:
        """Stages a snapshot's last facts, after the earlier ones, and puts all staged facts in the
        place of the worker's blocks; returns recoveries to perform.
        """
        source = self.sources.get(key)
        if source is None:
            return []
        self.stage(key, facts)
        self.recoveries["snapshot", "ok"] += 1
        effects = source.stream.on_snapshot(epoch, as_of, complete, now_s)
        pulls = self._perform(source, effects, now_s)
        self.unstage(key)
        return pulls

    def work(self, now_s: float) -> None:
        """Applies a slice of the backlog of the next worker in turn.

        Any further message of a `backlogged` worker applies its whole backlog at once; hold such
        messages back where that would take too long.
        """
        for key in self.backlogged:
            source = self.sources[key]
            self._apply_slice(source, now_s)
            del self.backlogged[key]
            if source.backlog:
                self.backlogged[key] = None  # behind the others
            return

    def stage(self, key: WorkerKey, facts: Iterable[Stored]) -> None:
        """Stages facts of a snapshot beside the worker's present blocks, which count until all are
        staged.

        So a snapshot of any size is applied as it comes, without a pause and without a buffer.
        """
        if key not in self.sources:
            return
        if key not in self._staged:
            self._staged[key] = self.index.open_slot()
        for fact in facts:
            self._store(self._staged[key], fact)

    def unstage(self, key: WorkerKey) -> None:
        """Drops the staged facts of a failed snapshot, if there are any."""
        if (slot := self._staged.pop(key, None)) is not None:
            self.index.forget(slot)

    def on_pull_failed(self, pull: Pull, reason: str, now_s: float) -> list[Pull]:
        """Records that a recovery got no usable answer; returns recoveries to perform."""
        from_ring = pull.from_seq is not None
        self.recoveries["ring" if from_ring else "snapshot", "failed"] += 1
        source = self.sources.get(pull.worker)
        if source is None:
            return []
        effects = source.stream.on_recovery_failed(reason, from_ring, now_s)
        return self._perform(source, effects, now_s)

    def on_connection(self, connected: bool, now_s: float) -> None:
        """Records that this router's connection to NATS was made or lost."""
        for source in self.sources.values():
            source.stream.on_connection(connected, now_s)
            self._mark(source)
        self._connection_at_s = now_s

    @property
    def worker_ids(self) -> Collection[str]:
        """The ids of all workers in the view."""
        return self._ranks.keys()

    def knows(self, worker_id: str) -> bool:
        """Whether a worker is in the view."""
        return worker_id in self._ranks

    def on_lost(self, worker_id: str, messages: int, now_s: float) -> None:
        """Records that messages of a worker were dropped unread: its streams are suspect until they
        beat.
        """
        ranks = self.ranks(worker_id)
        if ranks:
            self.lost[worker_id] += messages
        for source in ranks:
            source.stream.on_lost(now_s)
            self._mark(source)

    def resync(self, worker_id: str, now_s: float, dp_rank: int | None = None) -> list[Pull]:
        """Recovers a worker's streams, or the stream of one rank; empty for an unknown worker."""
        return [
            pull
            for source in self.ranks(worker_id)
            if dp_rank in (None, source.key.dp_rank)
            for pull in self._perform(source, source.stream.resync(now_s), now_s)
        ]

    def remove(self, worker_id: str, until_s: float) -> list[WorkerKey]:
        """Forgets a worker and ignores its messages until until_s."""
        self._tombstones[worker_id] = until_s
        if len(self._tombstones) > self._workers_max:
            self.dropped["too_many_tombstones"] += 1
            del self._tombstones[min(self._tombstones, key=self._tombstones.__getitem__)]
        return [self._forget(source, "removed").key for source in self.ranks(worker_id)]

    def pardon(self, worker_id: str) -> None:
        """Takes a removal back: the worker's messages count from now on."""
        self._tombstones.pop(worker_id, None)

    def tick(self, now_s: float) -> list[WorkerKey]:
        """Ends predictions, removals and silent workers that are due at now_s, and derives each
        stream's state. Returns the workers forgotten."""
        self.index.sweep()
        self.predictions.tick(now_s)
        self._tombstones = {
            worker: until for worker, until in self._tombstones.items() if until > now_s
        }
        self._look_for_silence(now_s)
        forgotten = []
        for source in list(self.sources.values()):
            silent_s = source.stream.silent_for_s(now_s)
            patience = _MASS_SILENCE_PATIENCE if self.mass_silence else 1
            if silent_s >= self._forget_s * patience:
                forgotten.append(self._forget(source, "silent").key)
            else:
                if self.behind_s >= LATE_S:
                    source.stream.late_s = self.behind_s
                source.stream.on_tick(now_s)
                self._mark(source)
                self._look_for_heartbeat(source)
        return forgotten

    def mark_changed(self, key: WorkerKey) -> None:
        """Makes `take_changed` return a worker, whose state changed outside of the view."""
        self._changed[key] = None

    def last_resort(self, source: Source) -> bool:
        """Whether a worker that is not schedulable may get requests if no schedulable worker can.

        True for workers that fell silent together with most of the fleet or of their model's
        workers, since the broker may have failed instead of them; and for workers whose heartbeats
        can't be read.
        """
        heartbeat = source.heartbeat
        if heartbeat is None or not heartbeat.healthy:
            return False
        if source.stream.state is StreamState.SILENT:
            return self.mass_silence or heartbeat.model in self.silent_models
        return source.heartbeat_overdue

    @property
    def has_changed(self) -> bool:
        """Whether `take_changed` has any worker to return."""
        return bool(self._changed)

    def take_changed(self) -> list[WorkerKey]:
        """Workers whose heartbeat or stream state has changed since the last call, and workers
        forgotten since."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def predict(self, source: Source, prefixes: HashArray, now_s: float) -> None:
        """Predicts blocks that a worker will hold, or that it reused without an event about them.

        The prediction lasts predicted_ttl_s where events report every block; approximate_ttl_s
        where the stream is partial or leaves blocks out, or where there are no events.
        """
        heartbeat, ttl_s = source.heartbeat, self._predicted_ttl_s
        if not source.stream.complete or self.lacks(source) or source.approximate:
            ttl_s = self._approximate_ttl_s
        if ttl_s <= 0:
            return
        blocks_max = (heartbeat is not None and heartbeat.total_blocks) or PREDICTED_BLOCKS_MAX
        self.predictions.add(source.slot, prefixes, ttl_s, blocks_max, now_s)

    def complete(self, source: Source) -> bool:
        """Whether the index has every block that the engine holds."""
        return source.stream.complete and not self.lacks(source) and self.index.whole(source.slot)

    def lacks(self, source: Source) -> tuple[str, ...]:
        """Reasons for which a worker's stream leaves out blocks that requests may match: keys of
        events/plane/left_out.py, or of later relays."""
        lacks, heartbeat = source.stream.lacks, source.heartbeat
        if heartbeat is None:
            return lacks
        if self.salted and not heartbeat.tells_salts:
            lacks = (*lacks, SALTS_UNTOLD)
        if self.itemized and not engine_of(heartbeat.engine).names_items:
            lacks = (*lacks, ITEMS_UNTOLD)
        return lacks

    def ranks(self, worker_id: str) -> list[Source]:
        """The sources of all ranks of one engine; empty: it is not in the view."""
        return list(self._ranks.get(worker_id, {}).values())

    def _source(self, key: WorkerKey, now_s: float) -> Source | None:
        """The source of a message; None when its worker must not be added."""
        source = self.sources.get(key)
        if source is not None:
            return source
        if self._tombstones.get(key.worker_id, 0.0) > now_s:
            self.dropped["tombstone"] += 1
            return None
        if len(self.sources) >= self._workers_max:
            self.dropped["too_many_workers"] += 1
            return None
        ranks = self._ranks.get(key.worker_id, {})
        if len(ranks) >= RANKS_MAX:
            self.dropped["too_many_ranks"] += 1
            return None
        stream = Stream(self._beat_timeout_s, now_s)
        source = self.sources[key] = Source(key, self.index.open_slot(), stream)
        self._ranks.setdefault(key.worker_id, ranks)[key.dp_rank] = source
        return source

    def _forget(self, source: Source, reason: str) -> Source:
        del self.sources[source.key]
        worker_id, rank = source.key
        del self._ranks[worker_id][rank]
        if not self._ranks[worker_id]:
            del self._ranks[worker_id]
            self.lost.pop(worker_id, None)
        self.unstage(source.key)
        self.backlogged.pop(source.key, None)
        self.waiting_bytes -= source.waiting_bytes
        self._changed[source.key] = None
        self.predictions.forget(source.slot)
        self.forgotten[reason] += self.index.forget(source.slot)
        return source

    def _apply_next(self, source: Source, facts: Sequence[Fact], now_s: float) -> None:
        """Applies the facts of one message in order that is at most a slice of work, without the
        bookkeeping of the backlog: the usual case."""
        self._mark(source)
        for fact in facts:
            self._apply(source, fact, now_s)
        self.applied += len(facts)
        self._account(source)

    def _perform(self, source: Source, effects: Sequence[Effect], now_s: float) -> list[Pull]:
        """Performs the effects of a stream on the index; returns the recoveries to perform."""
        self._mark(source)
        pulls: list[Pull] = []
        has_more = False
        for effect in effects:
            match effect:
                case Apply(facts):
                    source.backlog.extend(facts)
                    self.backlogged[source.key] = None  # also if applying the first of them raises
                    has_more = True
                case Forget():
                    source.backlog.clear()
                    self.index.clear(source.slot)
                    self.predictions.forget(source.slot)
                case Adopt():
                    source.backlog.clear()
                    self.predictions.forget(source.slot)
                    self.index.forget(source.slot)
                    source.slot = self._staged.pop(source.key)
                    self._changed[source.key] = None
                case Recover(reason, from_seq):
                    pulls.append(Pull(source.key, reason, from_seq))
        if has_more:
            self._apply_slice(source, now_s)
            if not source.backlog:
                del self.backlogged[source.key]
        self._account(source)
        return pulls

    def _account(self, source: Source) -> None:
        """Updates the fleet's waiting_bytes and recovery_pauses. Over WAITING_BYTES_MAX, the stream
        drops its waiting messages and recovers once more."""
        stream = source.stream
        if stream.pauses != source.pauses:
            self.recovery_pauses += stream.pauses - source.pauses
            source.pauses = stream.pauses
        if not stream.waiting_bytes and not source.waiting_bytes:
            return
        self.waiting_bytes += stream.waiting_bytes - source.waiting_bytes
        if self.waiting_bytes > WAITING_BYTES_MAX and stream.waiting_bytes:
            self.dropped["no_room_to_wait"] += 1
            self.waiting_bytes -= stream.waiting_bytes
            stream.let_go()
        source.waiting_bytes = stream.waiting_bytes

    def _apply_slice(self, source: Source, now_s: float) -> None:
        """Applies the next SLICE_BYTES of the backlog."""
        backlog = source.backlog
        left = SLICE_BYTES
        while backlog and left > 0:
            fact = backlog.popleft()
            if not isinstance(fact, Cleared):
                size = len(fact.hashes)
                if size > left and size > SLICE_BYTES // 2:
                    fact, rest = _parted(fact, max(left & ~7, 8))
                    backlog.appendleft(rest)
                left -= len(fact.hashes)
            left -= FACT_BYTES
            self._apply(source, fact, now_s)
            self.applied += 1

    def _catch_up(self, source: Source, now_s: float) -> None:
        """Applies the whole backlog, since the next message refers to the state after it."""
        while source.backlog:
            self._apply_slice(source, now_s)
        self.backlogged.pop(source.key, None)

    def _apply(self, source: Source, fact: Stored | Removed | Cleared, now_s: float) -> None:
        slot = source.slot
        match fact:
            case Stored():
                self._store(slot, fact)
                if self.newest is not None:
                    self.newest.add(slot, unpack_hashes(fact.hashes), now_s)
            case Removed():
                self.index.remove(slot, TIERS[fact.tier], unpack_hashes(fact.hashes))
                self.facts["removed"] += 1
                source.gone_at_s = now_s
            case Cleared():
                self.index.clear(slot, TIERS[fact.tier] if fact.tier is not None else None)
                self.facts["cleared"] += 1
                source.gone_at_s = now_s

    def _store(self, slot: int, fact: Stored) -> None:
        self.index.store(slot, TIERS[fact.tier], unpack_hashes(fact.hashes))
        self.facts["stored"] += 1

    def _look_for_silence(self, now_s: float) -> None:
        """Sets mass_silence and silent_models."""
        models: dict[str, list[Source]] = {}
        for source in self.sources.values():
            if source.heartbeat is not None:
                models.setdefault(source.heartbeat.model, []).append(source)
        self.mass_silence = self._silent_at_once(self.sources.values(), now_s)
        self.silent_models = frozenset(
            model for model, sources in models.items() if self._silent_at_once(sources, now_s)
        )

    def _silent_at_once(self, sources: Collection[Source], now_s: float) -> bool:
        """Whether most workers stopped beating together, as when the broker or our own connection
        fails.

        Together: within one timeout. Workers that died earlier or later don't matter.
        """
        silent = sorted(
            source.stream.last_beat_s
            for source in sources
            if source.stream.silent_for_s(now_s) >= self._beat_timeout_s
        )
        most = len(sources) // 2 + 1
        return len(sources) >= MASS_SILENCE_WORKERS and any(
            last - first <= self._beat_timeout_s
            for first, last in zip(silent, silent[most - 1 :], strict=False)
        )

    def _look_for_heartbeat(self, source: Source) -> None:
        """Sets heartbeat_overdue, by the beats since the last heartbeat: a relay sends a heartbeat
        before each beat, and both are missing while it restarts or our own connection is down."""
        stream = source.stream
        since_s = max(source.heartbeat_at_s, self._connection_at_s, stream.beats_since_s)
        beaten_s = stream.last_beat_s - since_s
        overdue = (
            source.heartbeat is not None and stream.connected and beaten_s >= self._beat_timeout_s
        )
        if overdue and not source.heartbeat_overdue:
            self._changed[source.key] = None
        source.heartbeat_overdue = overdue or (source.heartbeat_overdue and not stream.connected)

    def _mark(self, source: Source) -> None:
        if source.state is not source.stream.state:
            source.state = source.stream.state
            self._changed[source.key] = None

    def _count_dropped(self, dropped: Iterable[Unreadable]) -> None:
        for unreadable in dropped:
            self.dropped[unreadable.reason] += 1


def _parted(fact: Stored | Removed, size: int) -> tuple[Stored | Removed, Stored | Removed]:
    """A fact with the first `size` bytes of hashes, and a fact with the rest; the index needs no
    parent."""
    head, tail = fact.hashes[:size], fact.hashes[size:]
    if isinstance(fact, Stored):
        return Stored(head, fact.tier), Stored(tail, fact.tier)
    return Removed(head, fact.tier), Removed(tail, fact.tier)


def away(source: Source) -> bool:
    """Whether a worker's engine stopped answering its relay, or the relay's beats ended."""
    return schedulable(source) in (NOT_ANSWERING, StreamState.SILENT.value)


def schedulable(source: Source) -> str:
    """Why a worker is not schedulable, by its relay's messages; empty: it is schedulable."""
    if source.heartbeat is None:
        return "no heartbeat yet"
    if source.heartbeat.asleep:
        return ASLEEP
    if not source.heartbeat.healthy:
        return NOT_ANSWERING if source.heartbeat.probed else NOT_PROBED
    if source.stream.state is StreamState.SILENT:
        return "silent"
    if source.heartbeat_overdue:
        return HEARTBEAT_UNREADABLE
    return ""
