"""Orders one worker's stream of facts, and knows how far it can be trusted. Pure: no clock, no I/O.

    live        it beats, and what it said is in the index
    recovering  something was missed; the relay's ring or a snapshot is on its way
    suspect     our own connection to the broker is down, or two beats are missing: nobody can tell
    silent      no beat for longer than the timeout

and, apart from that, complete or partial: a partial stream holds less than its engine does, since
blocks were stored before anybody listened.

Laws:
- a sequence number is applied at most once, and never before the one ahead of it;
- a gap is reported before anything after it is applied;
- what a lower epoch says changes nothing while the higher one beats;
- a stream is live for at most two beats after a fact was lost, even if the beats are lost too;
- of recoveries in a row, each after RECOVERIES_FREE comes later than the one before it.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from typing_extensions import override

from events.plane.facts import Beat, Epoch, Fact, FactsMessage

BUFFER_MESSAGES_MAX = 4096
BUFFER_BYTES_MAX = 32 * 1024 * 1024
BEAT_OVERDUE_S = 2.0
"""Two beats: whatever was lost since the last one, one of them would have shown."""
RECOVERIES_FREE = 3
"""Recoveries in a row without a pause."""
PAUSE_S = 0.5
"""After the next one, before another; doubled with each further one."""
PAUSE_MAX_S = 8.0
"""So long a stream may be recovering for nothing, once what kept it from healing is over."""
STEADY_S = 30.0
"""Without a recovery, after which the next one is the first of its row."""
_TWO_RELAYS_MESSAGES = 3
_TWO_RELAYS_WINDOW_S = 10.0


class StreamState(StrEnum):
    LIVE = "live"
    RECOVERING = "recovering"
    SUSPECT = "suspect"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Apply:
    """These facts are next."""

    facts: list[Fact]


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all that this worker holds."""


@dataclass(frozen=True, slots=True)
class Recover:
    """Ask the relay: for its ring from from_seq on if that is given, for a snapshot otherwise."""

    reason: str
    from_seq: int | None


@dataclass(frozen=True, slots=True)
class Adopt:
    """The snapshot that is staged takes the place of all that this worker holds."""


Effect = Apply | Forget | Adopt | Recover


@dataclass(slots=True)
class _Row:
    """Recoveries in a row."""

    recoveries: int = 0
    began_at_s: float = -inf
    """The last of them."""
    pause_s: float = 0.0
    """After the last of them began."""


class Stream:
    """The stream of one (worker, rank), as a router receives it.

    Over 300 lines: one state machine, of which every cause moves the same epoch and numbers.

    The state is derived from three facts: are we connected, does it beat, is the index in step with
    it. Effects must be performed in order, and before the next call.

    An instance has 29 attributes at most: from the 30th on CPython 3.11 keeps them in a dictionary
    of their own, and each message takes 12 % longer.
    """

    def __init__(self, beat_timeout_s: float, now_s: float) -> None:
        self.epoch: Epoch | None = None
        self.seq = 0
        """Of the last message that is in the index."""
        self.complete = False
        self.lacks: tuple[str, ...] = ()
        """Why the relay leaves out blocks that the engine holds, as the last beat said."""
        self.state = StreamState.RECOVERING
        self.reason = "new"
        self.changed_at_s = now_s
        self.last_beat_s = now_s
        self.beats_since_s = now_s
        """The first beat of those without a pause of beat_timeout_s between them."""
        self.lag_s = 0.0
        """Of the last message: from the relay's reading of the engine to our applying it."""
        self.duplicates = 0
        self.gaps = 0
        self.drifts = 0
        self.lower_epochs = 0
        self.buffer_overflows = 0
        self._beat_timeout_s = beat_timeout_s
        self._connected = True
        self._confirmed = True
        """False from a loss of connection until the next beat: nobody can tell what was lost."""
        self._in_step = False
        self._asked = False
        """A Recover is out and not answered yet."""
        self._from_ring = False
        """The index is right up to `seq`, so that the relay's ring could fill the gap."""
        self.pauses = 0
        """Recoveries after which the next one has to wait."""
        self._row = _Row()
        self._lower_at_s = 0.0
        self._lower_lately = 0
        self.waiting_bytes = 0
        """Of messages that wait for what is before them."""
        self._buffer: list[tuple[FactsMessage, int]] = []
        """These messages, with their sizes."""
        self._let_go_seq = 0
        """Of the last message that waited and had to go."""

    @override
    def __repr__(self) -> str:
        kind = "complete" if self.whole else "partial"
        return f"<Stream {self.state} {kind} at {self.seq}, {len(self._buffer)} waiting>"

    @property
    def trusted(self) -> bool:
        """Whether the index says no more about this worker than is true."""
        return self.state is StreamState.LIVE

    @property
    def connected(self) -> bool:
        """Whether our own connection to the broker is up."""
        return self._connected

    @property
    def whole(self) -> bool:
        """Whether nothing was missed and nothing is left out."""
        return self.complete and not self.lacks

    def on_facts(self, message: FactsMessage, size: int, now_s: float) -> list[Effect]:
        """The next facts message. size: its bytes, for the bound of the buffer."""
        effects = self._meet(message.epoch, now_s)
        if effects is None:
            return []
        if message.seq <= self.seq:
            self.duplicates += 1
            return effects
        # Not in step but at 0: a life that we hear from its first word on.
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
        elif not self._asked:
            effects += self._ask("not heard from the start", now_s)
        return effects

    def on_beat(self, beat: Beat, blocks: int, digest: int, now_s: float) -> list[Effect]:
        """A beat. blocks, digest: what the index holds of this worker now."""
        # Silent, and a lower epoch beats: the one that speaks on speaks for the engine.
        gone = self.silent_for_s(now_s) >= self._beat_timeout_s
        effects = self._meet(beat.epoch, now_s, lower_too=gone)
        if effects is None:
            return []
        if effects:
            blocks = digest = 0  # what it holds is of an earlier life, and about to go
        if gone:
            self.beats_since_s = now_s
        self.last_beat_s = now_s
        self._confirmed = True
        self.lacks = beat.lacks
        if not self._in_step and self.seq == beat.seq == beat.blocks == 0:
            effects += self._splice("nothing to know yet", now_s)
        if not self._in_step:
            effects += [] if self._asked else self._ask(self.reason, now_s)
        elif beat.seq > self.seq:
            self.gaps += 1
            effects += self._lose(f"lost tail: {self.seq} of {beat.seq}", True, now_s)
        elif beat.seq == self.seq and (beat.blocks, beat.digest) != (blocks, digest):
            self.drifts += 1
            effects += self._lose("digest differs", False, now_s)
        else:
            self.complete = beat.complete
            self._derive("in step", now_s)
        return effects

    def on_ring(self, epoch: Epoch, messages: list[FactsMessage], now_s: float) -> list[Effect]:
        """The relay's answer to a Recover with from_seq: all that it sent since then."""
        self._asked = False
        if self._in_step or epoch != self.epoch or not self._from_ring:
            return []  # answered by the stream itself meanwhile; or its next word asks again
        effects: list[Effect] = []
        for message in messages:
            if message.seq == self.seq + 1 and message.epoch == epoch:
                self.seq = message.seq
                effects.append(Apply(message.facts))
        if not effects or messages[-1].seq != self.seq:
            # Asking the ring again would bring the same.
            self._from_ring = False
            return effects + self._ask_now("the ring does not close the gap", now_s)
        return effects + self._splice("ring replayed", now_s)

    def on_snapshot(self, epoch: Epoch, as_of: int, complete: bool, now_s: float) -> list[Effect]:
        """The relay's answer to a Recover without from_seq is staged: all it held after as_of."""
        self._asked = False
        if self.epoch is not None and epoch < self.epoch:
            return []
        if epoch == self.epoch and (self._in_step or as_of < self.seq):
            return []
        if epoch != self.epoch:
            self._buffer = [one for one in self._buffer if one[0].epoch == epoch]
            self._let_go_seq = 0
        self.epoch = epoch
        self.seq = as_of
        self.complete = complete
        return [Adopt(), *self._splice("snapshot applied", now_s)]

    def on_recovery_failed(self, reason: str, from_ring: bool, now_s: float) -> list[Effect]:
        """No answer. A failed ring replay asks for a snapshot at once, a snapshot with a beat."""
        self._asked = False
        if self._in_step:
            return []
        self._from_ring = False
        if from_ring:
            return self._ask_now(reason, now_s)
        self._derive(reason, now_s)
        return []

    def resync(self, now_s: float) -> list[Effect]:
        """An operator, or a broken prediction, wants this stream read again."""
        self._in_step = self._from_ring = False
        return self._ask_now("resync asked for", now_s)

    def on_connection(self, connected: bool, now_s: float) -> None:
        """Our own connection to the broker came or went. Whatever was sent meanwhile is lost."""
        self._connected = connected
        self._confirmed = False
        if connected:
            self.last_beat_s = now_s  # its timer starts again
        self._derive("connected again" if connected else "our connection is down", now_s)

    def on_lost(self, now_s: float) -> None:
        """Messages of it were dropped unread. Its next message or beat shows what is missing."""
        self._confirmed = False
        self._derive("messages come faster than they may", now_s)

    def on_tick(self, now_s: float) -> None:
        """Time went by."""
        self._derive(self.reason, now_s)

    def silent_for_s(self, now_s: float) -> float:
        """Seconds since the last beat, 0 while our own connection is down."""
        return now_s - self.last_beat_s if self._connected else 0.0

    def two_relays(self, now_s: float) -> bool:
        """Whether another relay, with a lower epoch, speaks for this worker too."""
        lately = now_s - self._lower_at_s < _TWO_RELAYS_WINDOW_S
        return lately and self._lower_lately >= _TWO_RELAYS_MESSAGES

    def in_vain(self, now_s: float) -> int:
        """Recoveries in a row, if they are so many that there are pauses between them; else 0."""
        row = self._row
        lately = now_s - row.began_at_s < STEADY_S
        return row.recoveries if lately and row.recoveries > RECOVERIES_FREE else 0

    def _meet(self, epoch: Epoch, now_s: float, lower_too: bool = False) -> list[Effect] | None:
        """What a message's epoch means; None: the message belongs to an earlier life.

        lower_too: a lower epoch is taken up like a higher one.
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
        self._asked = False
        self._from_ring = False
        self._buffer.clear()
        self.waiting_bytes = 0
        self._let_go_seq = 0
        self._derive("new" if first else "new epoch", now_s)
        return [Forget()]

    def _keep(self, message: FactsMessage, size: int) -> None:
        """Holds a message until what is before it has come; over the bound the oldest go."""
        self._buffer.append((message, size))
        self.waiting_bytes += size
        too_many = len(self._buffer) > BUFFER_MESSAGES_MAX
        if too_many or self.waiting_bytes > BUFFER_BYTES_MAX:
            self.let_go()

    def let_go(self) -> None:
        """Drops what waits, for want of room. What is on its way may be older than this hole; then
        the stream recovers once more."""
        if self._buffer:
            self.buffer_overflows += 1
            self._let_go_seq = self._buffer[-1][0].seq
            self._buffer.clear()
            self.waiting_bytes = 0

    def _lose(self, reason: str, from_ring: bool, now_s: float) -> list[Effect]:
        self._in_step = False
        self._from_ring = from_ring
        return self._ask(reason, now_s)

    def _ask(self, reason: str, now_s: float) -> list[Effect]:
        """Recovers, unless a recovery of a moment ago was of no use: then a later beat does."""
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
        return self._ask_now(reason, now_s)

    def _ask_now(self, reason: str, now_s: float) -> list[Effect]:
        self._asked = True
        self._derive(reason, now_s)
        return [Recover(reason, self.seq + 1 if self._from_ring else None)]

    def _splice(self, reason: str, now_s: float) -> list[Effect]:
        """Puts the live tail after what was recovered."""
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
            return effects + self._lose("no room for what waits", True, now_s)
        self._in_step = True
        self._asked = False
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
        else:
            state = StreamState.LIVE
        if state is not self.state:
            self.state = state
            self.reason = reason
            self.changed_at_s = now_s
        elif state is StreamState.RECOVERING:
            self.reason = reason
