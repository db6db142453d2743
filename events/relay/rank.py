"""One engine rank, from its published bytes to the messages of its stream.

Puts the engine's own sequence in order (its numbering starts at 0 with each life, and a replay
socket repeats the last messages), decodes, and keeps the ledger of the stream
(events/relay/rank_stream.py). Pure: bytes and `now_s` in, bytes to publish out; the relay
(events/relay/relay.py) owns sockets and timers.

Laws:
- an engine message is applied at most once and in order;
- no call does more than about SLICE_UNITS of work on what engines said
  (events/engines/batch_reader.py);
- a sequence that goes back is another life of the engine: a new epoch, an empty ledger (but a live
  message that a replay overtook is none);
- a hole that the replay socket can't close empties the ledger, since removals may be in it: the
  stream is then true but partial, until the engine clears its cache;
- a map that an earlier life of the relay kept is published once the engine has shown that its life
  is the one of the map, and that nothing was missed.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from typing_extensions import override
from xxhash import xxh3_64_intdigest

from events.engines.batch_reader import SLICE_UNITS, BatchReader, batch_time_s
from events.engines.decoding import SCHEMAS
from events.engines.events import BlocksCleared
from events.plane.facts import Epoch
from events.relay.ledger import Ledger
from events.relay.ledger_copy import LedgerCopy
from events.relay.rank_stream import RankStream
from events.relay.saved_ledger import Checkpoint

HELD_MESSAGES_MAX = 20_000
HELD_BYTES_MAX = 128 * 1024 * 1024
OVERTAKEN_MAX = 1024
"""Live messages that a replay may overtake on their way here."""
SWEPT_AT_ONCE = 512
"""Units of a ledger that was wiped (see Ledger.sweep): 0.3 ms, and more at the end of a large one,
whose memory goes back to the system then."""
OVERTAKEN_BYTES_MAX = 8 * 1024 * 1024
"""Of these messages: about 2 ms of hashing."""


class EngineState(Enum):
    """How we stand with the engine's own sequence."""

    STARTING = auto()
    """Nothing heard yet."""
    HEALING = auto()
    """A replay is on its way; live messages wait."""
    CATCHING_UP = auto()
    """A replay, or a message that is too long for one slice, is applied slice by slice; live
    messages wait."""
    FOLLOWING = auto()


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the engine's replay socket for its messages from this number on."""

    from_seq: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Messages for the facts subject, in order."""

    messages: list[bytes]


RankEffect = Replay | Publish


class Rank(RankStream[Ledger]):
    """One (engine, rank) as its relay follows it.

    Over 300 lines: live messages, replays and a kept map move one position in the engine's numbers.
    """

    def __init__(
        self,
        engine: str,
        epoch: Epoch,
        *,
        has_replay: bool,
        wanted_block_size: int | None = None,
    ) -> None:
        """engine: a name of events.engines.decoding.SCHEMAS. Raises KeyError for another."""
        counts: Counter[str] = Counter()
        ledger = Ledger(wanted_block_size, dropped=counts)
        super().__init__(ledger, epoch, counts=counts, swept_at_once=SWEPT_AT_ONCE)
        self.state = EngineState.STARTING
        self.engine_rank: int | None = None
        """The data-parallel rank that the engine's messages name; None: none has named one."""
        self._schema = SCHEMAS[engine]
        self._wanted_block_size = wanted_block_size
        self._has_replay = has_replay
        self._next_seq = 0
        """The engine's next number, while following."""
        self._last_digest: int | None = None
        """Of the last payload applied: tells one life's messages from another's."""
        self._open: BatchReader | None = None
        """The message before `_next_seq`, as long as it is not applied to its end."""
        self._heal_next = False
        """The publisher's connection was lost while we caught up."""
        self._backlog: deque[tuple[int, bytes]] = deque()
        """What a replay brought, and what had waited for it, as far as it is not applied yet."""
        self._replayed = (-1, 0.0)
        """Number and time (the engine's clock) of the last message of a replay."""
        self._held: deque[tuple[int, bytes]] = deque()
        """Live messages that wait, in order."""
        self._held_bytes = 0
        self._overtaken: dict[int, int] = {}
        """Number and digest of what a replay brought and the publisher, in order, may yet bring."""
        self._first_heard_s: float | None = None
        """When we heard the first message of this life."""
        self._process_start_s = 0.0
        """The latest start of the engine's process that its pages had."""
        self._kept: tuple[Checkpoint, Ledger] | None = None
        """The map of an earlier life of the relay, until the engine shows whether it is true."""

    @override
    def __repr__(self) -> str:
        kind = "complete" if self.complete else "partial"
        return f"<Rank {self.state.name.lower()} {kind} at {self._next_seq}, {self.ledger!r}>"

    def summary(self) -> str:
        """Where it stands, for a log line."""
        kind = "complete" if self.complete else "partial"
        blocks = f"{self.ledger.count()} placements of {len(self.ledger)} engine blocks"
        return f"the stream is {kind} up to engine message {self._next_seq - 1}, with {blocks}"

    @property
    def position(self) -> tuple[Epoch, int, float]:
        """Changes with everything that makes a kept map worth saving again."""
        return self.outbox.epoch, self._next_seq, self._process_start_s

    def kept(self, now_s: float) -> tuple[Checkpoint, LedgerCopy] | None:
        """What a next life of the relay could go on from; None when nothing was heard yet, and
        while a message is applied by half."""
        if self._last_digest is None or self._open is not None:
            return None
        checkpoint = Checkpoint(
            seq=self._next_seq - 1,
            digest=self._last_digest,
            complete=self.complete,
            process_start_s=self._process_start_s or None,
            taken_at_s=now_s,
        )
        return checkpoint, self.ledger.copy()

    def resume(self, checkpoint: Checkpoint, ledger: Ledger) -> None:
        """Takes what an earlier life of the relay kept, to be believed later; call before `start`.

        With a replay socket: if the engine still has the message of the checkpoint, to the byte.
        Without: if its process tells the same start, and is next heard with the very next message.
        """
        self._kept = checkpoint, ledger
        if self._process_start_s and checkpoint.is_before(self._process_start_s):
            self._drop_kept()

    def start(self) -> list[RankEffect]:
        """Call once the subscription to the engine's publisher is up: live first, then replay."""
        if not self._has_replay:
            return []
        return self._heal_from(0 if self._kept is None else self._kept[0].seq)

    def on_message(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        """The engine published a batch. New epochs, where needed, are made of now_s."""
        if self.state is EngineState.STARTING:
            effects = self._begin(seq, now_s)
            return effects + self._apply(seq, payload, now_s)
        if seq < self._expected():
            if self._overtaken.get(seq) == xxh3_64_intdigest(payload):
                return []
            # What waits is of the engine's last life.
            return self._restart(seq, payload, now_s)
        self._overtaken.clear()
        if self.state is not EngineState.FOLLOWING:
            return self._hold(seq, payload, now_s)
        if seq > self._next_seq:
            self.engine_gaps += 1
            if self._has_replay:
                return self._heal() + self._hold(seq, payload, now_s)
            return self._lose(now_s) + self._apply(seq, payload, now_s)
        return self._apply(seq, payload, now_s)

    def on_failure(self, now_s: float) -> list[RankEffect]:
        """A call raised, so that a message may be applied by half: nothing held is certain."""
        if self._open is not None:
            self._last_digest = self._open.digest or None
            self._open = None
        return self._lose(now_s)

    def on_reconnected(self) -> list[RankEffect]:
        """The connection to the publisher is there again. What was published meanwhile is lost, and
        the next number, which would show that, may be long in coming."""
        if not self._has_replay:
            return []
        self._heal_next = self.state is EngineState.CATCHING_UP
        return self._heal() if self.state is EngineState.FOLLOWING else []

    def on_replay(
        self, messages: Sequence[tuple[int, bytes]], ended: bool, now_s: float
    ) -> list[RankEffect]:
        """What the replay socket answered. ended: the end marker came, so that nothing is cut off.

        Every hole that stays, up to the live messages that waited, empties the ledger. A long
        answer is applied in slices: while the state is CATCHING_UP, call `catch_up`.
        """
        if self.state is not EngineState.HEALING:
            return []
        effects: list[RankEffect] = []
        if not ended:
            self.counts["replay_cut_off"] += 1
        if self._kept is not None:
            checkpoint, ledger = self._kept
            same = messages and messages[0][0] == checkpoint.seq
            if not same or xxh3_64_intdigest(messages[0][1]) != checkpoint.digest:
                return self._drop_kept()
            effects += self._believe(checkpoint, ledger, now_s)
        if self._last_digest is None:
            # From the start: complete only if we get the whole life of the engine.
            self.complete = ended and (not messages or messages[0][0] == 0)
            self._next_seq = messages[0][0] if messages else 0
        elif not messages or messages[0][0] != self._next_seq - 1:
            self.counts["replay_too_short"] += 1
            effects += self._lose(now_s)
        elif xxh3_64_intdigest(messages[0][1]) != self._last_digest:
            # Same number, other bytes: this is not the engine's life that we were following.
            effects += self._new_life(now_s)
            return effects + self._heal_from(0)
        heard = self._held[-1][0] if self._held else self._next_seq - 1
        self._overtaken = {}
        room = OVERTAKEN_BYTES_MAX
        for seq, payload in reversed(messages[-OVERTAKEN_MAX:]):
            room -= len(payload)
            if seq <= heard or room < 0:
                break
            self._overtaken[seq] = xxh3_64_intdigest(payload)
        self._replayed = (-1, 0.0)
        if messages:
            self._replayed = (messages[-1][0], batch_time_s(messages[-1][1]))
        self._backlog = deque(messages)
        self._backlog.extend(one for one in self._held if one[0] > self._replayed[0])
        self._held, self._held_bytes = deque(), 0
        self.state = EngineState.CATCHING_UP
        return effects + self.catch_up(now_s)

    def catch_up(self, now_s: float) -> list[RankEffect]:
        """Applies the next SLICE_UNITS of what waits, and at least a step of it.

        A hole between live messages that came while we caught up is healed like any other.
        """
        effects: list[RankEffect] = []
        room = SLICE_UNITS
        while room > 0 and self.state is EngineState.CATCHING_UP:
            if self._open is not None:
                more, room = self._apply_open(self._open, room, now_s)
                effects += more
                continue
            came_since = not self._backlog
            waiting = self._held if came_since else self._backlog
            if not waiting:
                self.state = EngineState.FOLLOWING
                self._replayed = (-1, 0.0)
                if self._heal_next:
                    effects += self._heal()
                break
            seq, payload = waiting[0]
            of_last_life = self._is_of_last_life(seq, payload)
            if came_since and seq > self._next_seq and not of_last_life:
                self.engine_gaps += 1
                return effects + self._heal()
            waiting.popleft()
            if came_since:
                self._held_bytes -= len(payload)
            if of_last_life:
                self.counts["of_last_life"] += 1
            if of_last_life or seq < self._next_seq:
                room -= 1
                continue
            if seq > self._next_seq:
                effects += self._lose(now_s)
            self._take(seq, payload, now_s)
        return effects

    @override
    def beat(self, now_s: float) -> list[bytes]:
        self.sweep()  # a restart that the engine's pages show is swept by beats alone
        return super().beat(now_s)

    def on_process_start(self, started_s: float, now_s: float) -> list[RankEffect]:
        """The engine's process started then (Unix time). A start after the first message that we
        heard is another life, though its sequence hasn't shown it yet; and so is any other start
        than the one before, as long as we have heard nothing."""
        before_s = self._process_start_s
        if started_s <= before_s:
            return []  # known: where clocks differ, a start may stay ahead of this one
        self._process_start_s = started_s
        effects: list[RankEffect] = []
        if self._kept is not None and self._kept[0].is_before(started_s):
            effects += self._drop_kept()
        heard_s = self._first_heard_s
        if started_s <= heard_s if heard_s is not None else not before_s:
            return effects
        effects += self._new_life(now_s)
        self.state = EngineState.STARTING
        return effects + self.start()

    def _is_of_last_life(self, seq: int, payload: bytes) -> bool:
        """Whether a live message that waited for a replay was made before the end of the replay,
        though its number is higher: then it is a dead process's, which was still on its way. (If
        the engine's clock was set back instead, the gap is healed by what follows.)"""
        last_seq, time_s = self._replayed
        return seq > last_seq and time_s > 0.0 and 0.0 < batch_time_s(payload) < time_s

    def _begin(self, seq: int, now_s: float) -> list[RankEffect]:
        """The first message that we hear, without a replay socket."""
        self.state = EngineState.FOLLOWING
        if self._kept is not None:
            checkpoint, ledger = self._kept
            if checkpoint.process_start_s == self._process_start_s and seq == checkpoint.seq + 1:
                return self._believe(checkpoint, ledger, now_s)
            self._drop_kept()
        # A late subscriber has missed the beginning, unless this is it.
        self.complete = seq == 0
        self._next_seq = seq
        return []

    def _believe(self, checkpoint: Checkpoint, ledger: Ledger, now_s: float) -> list[RankEffect]:
        """What was kept is true: we go on from there, in an epoch that begins with its blocks."""
        self._kept = None
        self.counts["kept_map_resumed"] += 1
        self.complete = checkpoint.complete
        self._next_seq = checkpoint.seq + 1
        self._last_digest = checkpoint.digest
        self._process_start_s = max(self._process_start_s, checkpoint.process_start_s or 0.0)
        if self._first_heard_s is None:
            self._first_heard_s = now_s
        ledger.dropped = self.counts
        return _publish(self._start_epoch(ledger, 1, now_s))

    def _drop_kept(self) -> list[RankEffect]:
        """What was kept is of another life, or too old to go on from: we start from nothing."""
        if self._kept is not None:
            self.ledger.inherit(self._kept[1])
        self._kept = None
        self.counts["kept_map_dropped"] += 1
        return self._heal_from(0) if self.state is EngineState.HEALING else []

    def _expected(self) -> int:
        """The number after the last one that we have, applied or waiting."""
        for waiting in (self._held, self._backlog):
            if waiting:
                return waiting[-1][0] + 1
        return self._next_seq

    def _heal(self) -> list[RankEffect]:
        """Asks from the last message on that we have: its bytes show whose life this is."""
        return self._heal_from(max(0, self._next_seq - 1))

    def _heal_from(self, seq: int) -> list[RankEffect]:
        self.state = EngineState.HEALING
        self._heal_next = False
        return [Replay(seq)]

    def _hold(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        if self._first_heard_s is None:
            self._first_heard_s = now_s
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        while len(self._held) > HELD_MESSAGES_MAX or self._held_bytes > HELD_BYTES_MAX:
            self.counts["held_overflow"] += 1
            self._held_bytes -= len(self._held.popleft()[1])
        return []

    def _restart(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        """The engine's sequence went back: another life of it."""
        effects = self._new_life(now_s)
        if seq > 0 and self._has_replay:
            return effects + self._heal_from(0) + self._hold(seq, payload, now_s)
        self.state = EngineState.FOLLOWING
        self.complete = seq == 0
        return effects + self._apply(seq, payload, now_s)

    def _new_life(self, now_s: float) -> list[RankEffect]:
        self.engine_restarts += 1
        if self._kept is not None:
            self._drop_kept()
        self._open = None
        self._backlog.clear()
        self._held.clear()
        self._held_bytes = 0
        self.complete = False
        self._next_seq = 0
        self._last_digest = None
        self._overtaken.clear()
        self._first_heard_s = None
        ledger = Ledger(self._wanted_block_size, dropped=self.counts)
        return _publish(self._start_epoch(ledger, 0, now_s))

    def _lose(self, now_s: float) -> list[RankEffect]:
        """A hole stays open, and removals may be lost in it."""
        return _publish(self._forget_all(now_s))

    def _apply(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        """Applies a message, or its first slice; the state is CATCHING_UP until all is applied."""
        effects, _ = self._apply_open(self._take(seq, payload, now_s), SLICE_UNITS, now_s)
        if self._open is not None:
            self.state = EngineState.CATCHING_UP
        return effects

    def _take(self, seq: int, payload: bytes, now_s: float) -> BatchReader:
        """This message is the next to be applied."""
        self._next_seq = seq + 1
        self.last_event_s = now_s
        if self._first_heard_s is None:
            self._first_heard_s = now_s
        self._open = BatchReader(payload, self._schema, self.counts)
        return self._open

    def _apply_open(
        self, batch: BatchReader, room: int, now_s: float
    ) -> tuple[list[RankEffect], int]:
        """Applies the next slice of a message; and what is left of the room."""
        full: list[bytes] = []
        for event in batch.read(room):
            full += self._changed(self.ledger.apply(event), now_s)
            if isinstance(event, BlocksCleared):
                self.complete = True  # whatever was missed is gone now
        if self.ledger.may_miss:
            self.complete = False
        if batch.ended:
            self._open = None
            self._last_digest = batch.digest
            if batch.dp_rank is not None:
                self.engine_rank = batch.dp_rank
            if batch.malformed:
                self.complete = False  # a store that can't be read is a block less
            if batch.removals_lost:
                # A removal that can't be read would leave a block too many: start from nothing.
                full += self._changed(self.ledger.wipe(), now_s)
        return _publish(full), batch.room - batch.ended


def _publish(messages: list[bytes]) -> list[RankEffect]:
    return [Publish(messages)] if messages else []
