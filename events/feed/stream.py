"""Orders one worker's stream of facts, and derives its state. Pure: no clock, no I/O.

    live        it beats, and all its messages are in the index
    recovering  messages were missed; the relay's ring or a snapshot is requested
    suspect     our own connection to the broker is down, two beats are missing, or messages come
                seconds late: state unknown
    silent      no beat for longer than the timeout

and, apart from that, complete or partial: a partial stream has fewer blocks than its engine, which
stored blocks before its relay listened.

Laws:
- a sequence number is applied at most once, and never before its predecessor;
- a gap is reported before anything after it is applied;
- messages of a lower epoch change nothing while the higher epoch beats;
- a stream is live for at most two beats after a fact was lost, even if the beats are lost too;
- a stream whose last beat came LATE_S late is not live;
- of recoveries in a row, each after RECOVERIES_FREE waits longer than its predecessor.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from typing_extensions import override

from events.plane.facts import Beat, Epoch, Fact, FactsMessage

BUFFER_MESSAGES_MAX = 4096
BUFFER_BYTES_MAX = 32 * 1024 * 1024
BEAT_OVERDUE_S = 2.0
"""Seconds without a beat after which a stream is suspect: two missing beats, each of which would
have shown a loss."""
LATE_S = 2.0
"""Seconds of a beat's delay from which a stream is suspect, as if beats were missing."""
CONNECTION_DOWN = "our connection is down"
"""The reason of every stream while the router has no connection to the broker."""
RECOVERIES_FREE = 3
"""Recoveries in a row without a pause."""
PAUSE_S = 0.5
"""Pause after the first recovery past RECOVERIES_FREE, seconds; doubles with each further one."""
PAUSE_MAX_S = 8.0
"""Longest pause, seconds: a stream may stay unrecovered that long after its trouble is over."""
STEADY_S = 30.0
"""Seconds without a recovery after which recoveries in a row are counted from 1 again."""
_TWO_RELAYS_MESSAGES = 3
_TWO_RELAYS_WINDOW_S = 10.0


class StreamState(StrEnum):
    LIVE = "live"
    RECOVERING = "recovering"
    SUSPECT = "suspect"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Apply:
    """Effect: apply these facts, the next in order."""

    facts: list[Fact]


@dataclass(frozen=True, slots=True)
class Forget:
    """Effect: drop all blocks of this worker."""


@dataclass(frozen=True, slots=True)
class Recover:
    """Effect: request the relay's ring from from_seq on; with from_seq None, a snapshot."""

    reason: str
    from_seq: int | None


@dataclass(frozen=True, slots=True)
class Adopt:
    """Effect: replace all blocks of this worker by the staged snapshot."""


Effect = Apply | Forget | Adopt | Recover


@dataclass(slots=True)
class _Row:
    """Recoveries of a stream in a row, with less than STEADY_S between them."""

    recoveries: int = 0
    began_at_s: float = -inf
    """When the last recovery began."""
    pause_s: float = 0.0
    """Least seconds from that beginning to the next recovery's."""


class Stream:
    """The stream of one (worker, rank), as a router receives it.

    Over 300 lines: one state machine; every cause changes the same epoch and numbers.

    The state is derived from three facts: whether we are connected, whether the stream beats, and
    whether the index is in step with it. Effects must be performed in order, and before the next
    call.

    An instance has 29 attributes at most: from the 30th on, CPython 3.11 keeps attributes in a
    separate dictionary, and each message takes 12 % longer.
    """

    def __init__(self, beat_timeout_s: float, now_s: float) -> None:
        self.epoch: Epoch | None = None
        self.seq = 0
        """Number of the last message in the index."""
        self.complete = False
        self.lacks: tuple[str, ...] = ()
        """Reasons for which the relay leaves out blocks of the engine, from the last beat."""
        self.state = StreamState.RECOVERING
        self.reason = "new"
        self.changed_at_s = now_s
        self.last_beat_s = now_s
        self.beats_since_s = now_s
        """First beat of the present run of beats, without a pause of beat_timeout_s in it."""
        self.lag_s = 0.0
        """Lag of the last message: from its reading at the relay to its applying here."""
        self.late_s = 0.0
        """Delay of the last beat, seconds: by the relay's clock, or as measured in our connection.
        """
        self.duplicates = 0
        self.gaps = 0
        self.drifts = 0
        self.lower_epochs = 0
        self.buffer_overflows = 0
        self._beat_timeout_s = beat_timeout_s
        self._connected = True
        self._confirmed = True
        """False from a loss of connection until the next beat: losses are unknown meanwhile."""
        self._in_step = False
        self._requested = False
        """Whether a Recover is unanswered."""
        self._from_ring = False
        """Whether the index is right up to `seq`, so that the relay's ring may fill the gap."""
        self.pauses = 0
        """Recoveries after which the next recovery has to wait."""
        self._row = _Row()
        self._lower_at_s = 0.0
        self._lower_lately = 0
        self.waiting_bytes = 0
        """Bytes of the messages that wait for their predecessors."""
        self._buffer: list[tuple[FactsMessage, int]] = []
        """The messages that wait for their predecessors, with their sizes in bytes."""
        self._let_go_seq = 0
        """Number of the last waiting message that was dropped."""

    @override
    def __repr__(self) -> str:
        kind = "complete" if self.whole else "partial"
        return f"<Stream {self.state} {kind} at {self.seq}, {len(self._buffer)} waiting>"

    @property
    def trusted(self) -> bool:
        """Whether all blocks of this worker in the index are held by its engine."""
        return self.state is StreamState.LIVE

    @property
    def connected(self) -> bool:
        """Whether our own connection to the broker is up."""
        return self._connected

    @property
    def whole(self) -> bool:
        """Whether no block was missed and none is left out."""
        return self.complete and not self.lacks

    def on_facts(self, message: FactsMessage, size: int, now_s: float) -> list[Effect]:
        """Applies the next facts message; returns effects. size: its bytes, for the bound of the
        buffer.
        """
        effects = self._meet(message.epoch, now_s)
        if effects is None:
            return []
        if message.seq <= self.seq:
            self.duplicates += 1
            return effects
        # Not in step but at 0: an epoch that is received from its first message on.
        if message.seq == self.seq + 1 and (self._in_step or self.seq == 0):
            self.seq = message.seq
            self.lag_s = max(0.0, now_s - message.time_s)
            effects.append(Apply(message.facts))
            if not self._in_step:
                return effects + self._splice("in step", now_s)
            self._derive("in step", now_s)  # in step: nothing waits
            return effects
        self._keep(message, size)
        if self._in_step:
            self.gaps += 1
            effects += self._lose(f"gap: {self.seq} then {message.seq}", True, now_s)
        elif not self._requested:
            effects += self._recover("the stream was not received from its start", now_s)
        return effects

    def on_beat(self, beat: Beat, blocks: int, digest: int, now_s: float) -> list[Effect]:
        """Compares a beat with the worker's blocks and digest in the index; returns effects. The
        caller sets late_s first."""
        # Silent, and a lower epoch beats: the relay that still sends is the engine's.
        gone = self.silent_for_s(now_s) >= self._beat_timeout_s
        effects = self._meet(beat.epoch, now_s, lower_too=gone)
        if effects is None:
            return []
        if effects:
            blocks = digest = 0  # its blocks are of an earlier epoch, and about to be dropped
        if gone:
            self.beats_since_s = now_s
        self.last_beat_s = now_s
        self._confirmed = True
        self.lacks = beat.lacks
        if not self._in_step and self.seq == beat.seq == beat.blocks == 0:
            effects += self._splice("no facts yet", now_s)
        if not self._in_step:
            effects += [] if self._requested else self._recover(self.reason, now_s)
        elif beat.seq > self.seq:
            self.gaps += 1
            effects += self._lose(f"last messages lost: {self.seq} of {beat.seq} came", True, now_s)
        elif beat.seq == self.seq and (beat.blocks, beat.digest) != (blocks, digest):
            self.drifts += 1
            effects += self._lose("digest differs", False, now_s)
        else:
            self.complete = beat.complete
            self._derive("in step", now_s)
        return effects

    def on_ring(self, epoch: Epoch, messages: list[FactsMessage], now_s: float) -> list[Effect]:
        """Applies the answer to a Recover with from_seq: the relay's messages from there on;
        returns effects."""
        self._requested = False
        if self._in_step or epoch != self.epoch or not self._from_ring:
            return []  # filled by the stream itself meanwhile, or its next message recovers again
        effects: list[Effect] = []
        for message in messages:
            if message.seq == self.seq + 1 and message.epoch == epoch:
                self.seq = message.seq
                effects.append(Apply(message.facts))
        if not effects or messages[-1].seq != self.seq:
            # The ring would answer the same again.
            self._from_ring = False
            return effects + self._recover_now("the relay's ring does not close the gap", now_s)
        return effects + self._splice("ring replayed", now_s)

    def on_snapshot(self, epoch: Epoch, as_of: int, complete: bool, now_s: float) -> list[Effect]:
        """Takes the answer to a Recover without from_seq: a snapshot of the blocks after message
        as_of, which the caller has staged. Returns effects; none for a snapshot of an earlier
        epoch, or of an earlier message than the last one applied."""
        self._requested = False
        if self.epoch is not None and epoch < self.epoch:
            return []
        if epoch == self.epoch and (self._in_step or as_of < self.seq):
            return []
        if epoch != self.epoch:
            self._buffer = [entry for entry in self._buffer if entry[0].epoch == epoch]
            self._let_go_seq = 0
        self.epoch = epoch
        self.seq = as_of
        self.complete = complete
        return [Adopt(), *self._splice("snapshot applied", now_s)]

    def on_recovery_failed(self, reason: str, from_ring: bool, now_s: float) -> list[Effect]:
        """Records a recovery without an answer; returns effects. After a ring a snapshot is
        requested at once, after a snapshot at a beat.
        """
        self._requested = False
        if self._in_step:
            return []
        self._from_ring = False
        if from_ring:
            return self._recover_now(reason, now_s)
        self._derive(reason, now_s)
        return []

    def resync(self, now_s: float) -> list[Effect]:
        """Recovers from a snapshot, for an operator or after a broken prediction."""
        self._in_step = self._from_ring = False
        return self._recover_now("resync asked for", now_s)

    def on_connection(self, connected: bool, now_s: float) -> None:
        """Records that this router's connection to NATS was made or lost. Messages in between are
        lost.
        """
        self._connected = connected
        self._confirmed = False
        if connected:
            self.last_beat_s = now_s  # its timer starts again
        self._derive("connected again" if connected else CONNECTION_DOWN, now_s)

    def on_lost(self, now_s: float) -> None:
        """Records that messages of this stream were dropped unread: it is suspect until its next
        beat, which shows the gap."""
        self._confirmed = False
        self._derive("messages come faster than their budget", now_s)

    def on_tick(self, now_s: float) -> None:
        """Derives the state at `now_s`."""
        self._derive(self.reason, now_s)

    def silent_for_s(self, now_s: float) -> float:
        """Seconds since the last beat, 0 while our own connection is down."""
        return now_s - self.last_beat_s if self._connected else 0.0

    def two_relays(self, now_s: float) -> bool:
        """Whether another relay, with a lower epoch, publishes for this worker, too."""
        lately = now_s - self._lower_at_s < _TWO_RELAYS_WINDOW_S
        return lately and self._lower_lately >= _TWO_RELAYS_MESSAGES

    def in_vain(self, now_s: float) -> int:
        """Recoveries in a row, if there are pauses between them; else 0."""
        row = self._row
        lately = now_s - row.began_at_s < STEADY_S
        return row.recoveries if lately and row.recoveries > RECOVERIES_FREE else 0

    def _meet(self, epoch: Epoch, now_s: float, lower_too: bool = False) -> list[Effect] | None:
        """The effects of a message's epoch; None: the epoch is over, ignore the message.

        lower_too: a lower epoch replaces the present one, as a higher epoch does.
        """
        if epoch == self.epoch:
            return []
        if self.epoch is not None and epoch < self.epoch:
            self.lower_epochs += 1
            if now_s - self._lower_at_s >= _TWO_RELAYS_WINDOW_S:
                self._lower_lately = 0
            self._lower_at_s = now_s
            self._lower_lately += 1
            if not lower_too:
                return None
        first = self.epoch is None
        self.epoch = epoch
        self.seq = 0
        self.complete = False
        self.lacks = ()
        self._in_step = False
        self._requested = False
        self._from_ring = False
        self._buffer.clear()
        self.waiting_bytes = 0
        self._let_go_seq = 0
        self._derive("new" if first else "new epoch", now_s)
        return [Forget()]

    def _keep(self, message: FactsMessage, size: int) -> None:
        """Keeps a message until its predecessors have come; over the bound all are dropped."""
        self._buffer.append((message, size))
        self.waiting_bytes += size
        too_many = len(self._buffer) > BUFFER_MESSAGES_MAX
        if too_many or self.waiting_bytes > BUFFER_BYTES_MAX:
            self.let_go()

    def let_go(self) -> None:
        """Drops the waiting messages, for lack of space. If the recovery under way ends at a lower
        number than that of the last of them, the stream recovers once more."""
        if self._buffer:
            self.buffer_overflows += 1
            self._let_go_seq = self._buffer[-1][0].seq
            self._buffer.clear()
            self.waiting_bytes = 0

    def _lose(self, reason: str, from_ring: bool, now_s: float) -> list[Effect]:
        self._in_step = False
        self._from_ring = from_ring
        return self._recover(reason, now_s)

    def _recover(self, reason: str, now_s: float) -> list[Effect]:
        """Requests a recovery; during the pause after the last one, leaves that to a later beat."""
        row = self._row
        since_s = now_s - row.began_at_s
        if since_s < row.pause_s:
            self._derive(reason, now_s)
            return []
        row.recoveries = 1 if since_s >= STEADY_S else row.recoveries + 1
        row.began_at_s = now_s
        doublings = row.recoveries - RECOVERIES_FREE - 1
        row.pause_s = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(doublings, 16)) if doublings >= 0 else 0
        self.pauses += doublings >= 0
        return self._recover_now(reason, now_s)

    def _recover_now(self, reason: str, now_s: float) -> list[Effect]:
        self._requested = True
        self._derive(reason, now_s)
        return [Recover(reason, self.seq + 1 if self._from_ring else None)]

    def _splice(self, reason: str, now_s: float) -> list[Effect]:
        """Applies the waiting messages after the recovered ones."""
        effects: list[Effect] = []
        waiting, self._buffer, self.waiting_bytes = self._buffer, [], 0
        for i, (message, _) in enumerate(waiting):
            if message.seq <= self.seq:
                continue
            if message.seq > self.seq + 1:
                self._buffer = waiting[i:]
                self.waiting_bytes = sum(size for _, size in self._buffer)
                return effects + self._lose(f"gap: {self.seq} then {message.seq}", True, now_s)
            self.seq = message.seq
            effects.append(Apply(message.facts))
        if self.seq < self._let_go_seq:
            return effects + self._lose("no space for waiting messages", True, now_s)
        self._in_step = True
        self._requested = False
        self._from_ring = False
        self._derive(reason, now_s)
        return effects

    def _derive(self, reason: str, now_s: float) -> None:
        quiet_s = now_s - self.last_beat_s
        if not self._connected:
            state = StreamState.SUSPECT
        elif quiet_s >= self._beat_timeout_s:
            state, reason = StreamState.SILENT, f"no beat for {self._beat_timeout_s:g} s"
        elif not self._in_step:
            state = StreamState.RECOVERING
        elif quiet_s >= BEAT_OVERDUE_S:
            state, reason = StreamState.SUSPECT, f"no beat for {BEAT_OVERDUE_S:g} s"
        elif not self._confirmed:
            state = StreamState.SUSPECT
        elif self.late_s >= LATE_S:
            state, reason = StreamState.SUSPECT, f"its messages are {self.late_s:.1f} s late"
        else:
            state = StreamState.LIVE
        if state is not self.state:
            self.state = state
            self.reason = reason
            self.changed_at_s = now_s
        elif state is StreamState.RECOVERING:
            self.reason = reason
