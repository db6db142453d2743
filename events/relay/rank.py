"""One engine rank, from its published bytes to the messages of its stream.

Puts the engine's own sequence in order (its numbers start at 0 with each start of the engine, and
a replay socket repeats the last messages), decodes, and updates the ledger of the stream
(events/relay/rank_stream.py). Pure: bytes and `now_s` in, bytes to publish out; the relay
(events/relay/relay.py) owns sockets and timers.

A *life* of an engine or a relay is the time from a start of its process to the next.

Laws:
- an engine message is applied at most once and in order;
- a message is applied whole; of a replay no call applies more than CATCH_UP_BYTES and a message;
- a sequence that goes back is another life of the engine: a new epoch, an empty ledger (unless the
  message is a live message that a replay overtook);
- a hole that the replay socket can't close empties the ledger, since removals may be in it: the
  stream is then true but partial, until the engine clears its cache;
- a saved ledger is published once the engine has shown that it is still in the same life, and that
  nothing was missed.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from typing_extensions import override
from xxhash import xxh3_64_intdigest

from events.engines.events import BlocksCleared
from events.engines.table import READINGS
from events.engines.wire import batch_time_s
from events.plane.facts import Epoch
from events.relay.ledger import Ledger, LedgerCopy
from events.relay.rank_stream import RankStream
from events.relay.saved_ledger import Checkpoint

HELD_MESSAGES_MAX = 20_000
HELD_BYTES_MAX = 128 * 1024 * 1024
OVERTAKEN_MAX = 1024
"""Live messages that a replay may overtake in transit."""
CATCH_UP_BYTES = 64 * 1024
"""Bytes of a replay's messages, applied between two looks at the relay's other sockets and timers:
some 10 ms."""
MESSAGE_BYTES = 256
"""What a replayed message counts besides its own bytes."""
OVERTAKEN_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of the live messages that a replay may overtake: about 2 ms of hashing."""


class EngineState(Enum):
    """Where the relay stands in the engine's own sequence of messages."""

    STARTING = auto()
    """No message yet."""
    HEALING = auto()
    """A replay was requested; live messages wait."""
    CATCHING_UP = auto()
    """A replay is applied part by part; live messages wait."""
    FOLLOWING = auto()


@dataclass(frozen=True, slots=True)
class Replay:
    """Effect: request the messages from this number on from the engine's replay socket."""

    from_seq: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Effect: publish messages on the facts subject, in order."""

    messages: list[bytes]


RankEffect = Replay | Publish


class Rank(RankStream[Ledger]):
    """One (engine, rank) in its relay.

    Over 300 lines: live messages, replays and a saved ledger move the same position in the engine's
    sequence.
    """

    def __init__(
        self,
        engine: str,
        epoch: Epoch,
        *,
        has_replay: bool,
        wanted_block_size: int | None = None,
    ) -> None:
        """engine: a name of events.engines.table.READINGS. Raises KeyError for another."""
        counts: Counter[str] = Counter()
        ledger = Ledger(wanted_block_size, dropped=counts)
        super().__init__(ledger, epoch, counts=counts)
        self.state = EngineState.STARTING
        self.engine_rank: int | None = None
        """The data-parallel rank in the engine's messages; None: no message had a rank."""
        self._decode = READINGS[engine].decode
        self._wanted_block_size = wanted_block_size
        self._has_replay = has_replay
        self._next_seq = 0
        """The engine's next number, while following."""
        self._last_digest: int | None = None
        """Digest of the last payload applied: shows whether a message is of the same life."""
        self._heal_next = False
        """Whether the publisher's connection was lost while catching up."""
        self._backlog: deque[tuple[int, bytes]] = deque()
        """Unapplied messages of a replay, then the live messages that had waited for it."""
        self._replayed = (-1, 0.0)
        """Number and time (the engine's clock) of the last message of a replay."""
        self._held: deque[tuple[int, bytes]] = deque()
        """Live messages that wait, in order."""
        self._held_bytes = 0
        self._overtaken: dict[int, int] = {}
        """Number -> digest of replayed messages that may still come live, in order."""
        self._first_received_s: float | None = None
        """When the first message of this life came."""
        self._process_start_s = 0.0
        """The latest start of the engine's process, from its pages."""
        self._emptied = 0
        """Times that the ledger was emptied because the engine slept."""
        self._kept: tuple[Checkpoint, Ledger] | None = None
        """The saved ledger of an earlier life of the relay, until the engine confirms it."""

    @override
    def __repr__(self) -> str:
        kind = "complete" if self.complete else "partial"
        return f"<Rank {self.state.name.lower()} {kind} at {self._next_seq}, {self.ledger!r}>"

    def summary(self) -> str:
        """The state in words, for a log line."""
        kind = "complete" if self.complete else "partial"
        blocks = f"{self.ledger.count()} placements of {len(self.ledger)} engine blocks"
        return f"the stream is {kind} up to engine message {self._next_seq - 1}, with {blocks}"

    @property
    def position(self) -> tuple[Epoch, int, float, int]:
        """A value that changes whenever the ledger should be saved again."""
        return self.outbox.epoch, self._next_seq, self._process_start_s, self._emptied

    def kept(self, now_s: float) -> tuple[Checkpoint, LedgerCopy] | None:
        """The state to save for the relay's next start; None before the first message."""
        if self._last_digest is None:
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
        """Keeps a saved ledger until the engine confirms it; call before `start`.

        Confirmed, with a replay socket: the engine still has the checkpoint's message, with equal
        bytes. Without: the engine's pages have the same process start, and its first message is the
        next in the sequence.
        """
        self._kept = checkpoint, ledger
        if self._process_start_s and checkpoint.is_before(self._process_start_s):
            self._drop_kept()

    def start(self) -> list[RankEffect]:
        """Returns the first Replay, if there is a replay socket; call once the subscription to the
        engine's publisher is up, so that no message is missed between the two."""
        if not self._has_replay:
            return []
        return self._heal_from(0 if self._kept is None else self._kept[0].seq)

    def on_message(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        """Applies a batch that the engine published. now_s: also the start of a new epoch, if there
        is one.
        """
        if self.state is EngineState.STARTING:
            effects = self._begin(seq, now_s)
            return effects + self._apply(seq, payload, now_s)
        if seq < self._expected():
            if self._overtaken.get(seq) == xxh3_64_intdigest(payload):
                return []
            # The waiting messages are of the engine's last life.
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
        """Empties the ledger after a call that raised, since a message may be half applied."""
        return self._lose(now_s)

    def on_reconnected(self) -> list[RankEffect]:
        """Requests a replay after a reconnect to the publisher: messages in between are lost, and
        the next message, whose number would show that, may come late."""
        if not self._has_replay:
            return []
        self._heal_next = self.state is EngineState.CATCHING_UP
        return self._heal() if self.state is EngineState.FOLLOWING else []

    def on_replay(
        self, messages: Sequence[tuple[int, bytes]], ended: bool, now_s: float
    ) -> list[RankEffect]:
        """Takes the replay socket's answer. ended: the end marker came, so nothing is cut off.

        Every hole that stays, up to the waiting live messages, empties the ledger. A long answer is
        applied in parts: while the state is CATCHING_UP, call `catch_up`.
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
            # Same number, other bytes: another life of the engine.
            effects += self._new_life(now_s)
            return effects + self._heal_from(0)
        last_live = self._held[-1][0] if self._held else self._next_seq - 1
        self._overtaken = {}
        room = OVERTAKEN_BYTES_MAX
        for seq, payload in reversed(messages[-OVERTAKEN_MAX:]):
            room -= len(payload)
            if seq <= last_live or room < 0:
                break
            self._overtaken[seq] = xxh3_64_intdigest(payload)
        self._replayed = (-1, 0.0)
        if messages:
            self._replayed = (messages[-1][0], batch_time_s(messages[-1][1]))
        self._backlog = deque(messages)
        self._backlog.extend(held for held in self._held if held[0] > self._replayed[0])
        self._held, self._held_bytes = deque(), 0
        self.state = EngineState.CATCHING_UP
        return effects + self.catch_up(now_s)

    def catch_up(self, now_s: float) -> list[RankEffect]:
        """Applies the next CATCH_UP_BYTES of the waiting messages, and at least one message.

        A hole between live messages that came meanwhile is healed like any other hole.
        """
        effects: list[RankEffect] = []
        room = CATCH_UP_BYTES
        while room > 0 and self.state is EngineState.CATCHING_UP:
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
            room -= MESSAGE_BYTES
            if of_last_life or seq < self._next_seq:
                continue
            if seq > self._next_seq:
                effects += self._lose(now_s)
            effects += self._apply(seq, payload, now_s)
            room -= len(payload)
        return effects

    def on_process_start(self, started_s: float, now_s: float) -> list[RankEffect]:
        """Takes the start (Unix time) of the engine's process from its pages. A start after the
        first message of this life is another life, though the sequence hasn't shown it yet. Before
        the first message, any start later than the last is another life."""
        before_s = self._process_start_s
        if started_s <= before_s:
            return []  # known: where clocks differ, a start may stay ahead of messages
        self._process_start_s = started_s
        effects: list[RankEffect] = []
        if self._kept is not None and self._kept[0].is_before(started_s):
            effects += self._drop_kept()
        first_s = self._first_received_s
        if started_s <= first_s if first_s is not None else not before_s:
            return effects
        effects += self._new_life(now_s)
        self.state = EngineState.STARTING
        return effects + self.start()

    def on_asleep(self, now_s: float) -> list[RankEffect]:
        """Empties the ledger of an engine whose page says that it sleeps without its cache. vLLM's
        event that says so comes with its first step after waking; blocks of messages that were in
        transit go with the next page."""
        if not len(self.ledger):
            return []
        self._emptied += 1
        complete = self.complete
        messages = self._forget_all(now_s)
        self.complete = complete  # no removal is lost, since every block is gone
        return _publish(messages)

    def _is_of_last_life(self, seq: int, payload: bytes) -> bool:
        """Whether a live message that waited for a replay was made before the replay's last
        message, though its number is higher: then it is a dead process's message that was still in
        transit. (If the engine's clock was set back instead, later messages heal the gap.)"""
        last_seq, time_s = self._replayed
        return seq > last_seq and time_s > 0.0 and 0.0 < batch_time_s(payload) < time_s

    def _begin(self, seq: int, now_s: float) -> list[RankEffect]:
        """Prepares for the first message of an engine without a replay socket, numbered seq."""
        self.state = EngineState.FOLLOWING
        if self._kept is not None:
            checkpoint, ledger = self._kept
            if checkpoint.process_start_s == self._process_start_s and seq == checkpoint.seq + 1:
                return self._believe(checkpoint, ledger, now_s)
            self._drop_kept()
        # A late subscriber has missed the beginning, unless this message is the first.
        self.complete = seq == 0
        self._next_seq = seq
        return []

    def _believe(self, checkpoint: Checkpoint, ledger: Ledger, now_s: float) -> list[RankEffect]:
        """Begins a new epoch with the blocks of the saved ledger, which the engine confirmed."""
        self._kept = None
        self.counts["saved_ledger_resumed"] += 1
        self.complete = checkpoint.complete
        self._next_seq = checkpoint.seq + 1
        self._last_digest = checkpoint.digest
        self._process_start_s = max(self._process_start_s, checkpoint.process_start_s or 0.0)
        if self._first_received_s is None:
            self._first_received_s = now_s
        ledger.dropped = self.counts
        return _publish(self._start_epoch(ledger, 1, now_s))

    def _drop_kept(self) -> list[RankEffect]:
        """Drops a saved ledger that is of another life of the engine, or too old."""
        self._kept = None
        self.counts["saved_ledger_dropped"] += 1
        return self._heal_from(0) if self.state is EngineState.HEALING else []

    def _expected(self) -> int:
        """The engine's number after the last message, applied or waiting."""
        for waiting in (self._held, self._backlog):
            if waiting:
                return waiting[-1][0] + 1
        return self._next_seq

    def _heal(self) -> list[RankEffect]:
        """Requests a replay from the last applied message on, whose bytes show whether the engine
        has restarted."""
        return self._heal_from(max(0, self._next_seq - 1))

    def _heal_from(self, seq: int) -> list[RankEffect]:
        self.state = EngineState.HEALING
        self._heal_next = False
        return [Replay(seq)]

    def _hold(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        if self._first_received_s is None:
            self._first_received_s = now_s
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        while len(self._held) > HELD_MESSAGES_MAX or self._held_bytes > HELD_BYTES_MAX:
            self.counts["held_overflow"] += 1
            self._held_bytes -= len(self._held.popleft()[1])
        return []

    def _restart(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        """Takes a live message whose number went back: the engine has restarted."""
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
        self._backlog.clear()
        self._held.clear()
        self._held_bytes = 0
        self.complete = False
        self._next_seq = 0
        self._last_digest = None
        self._overtaken.clear()
        self._first_received_s = None
        ledger = Ledger(self._wanted_block_size, dropped=self.counts)
        return _publish(self._start_epoch(ledger, 0, now_s))

    def _lose(self, now_s: float) -> list[RankEffect]:
        """Empties the ledger after a hole that no replay fills, since removals may be in it."""
        return _publish(self._forget_all(now_s))

    def _apply(self, seq: int, payload: bytes, now_s: float) -> list[RankEffect]:
        """Applies the engine's next message to the ledger; returns the full messages to publish."""
        self._next_seq = seq + 1
        self._last_digest = xxh3_64_intdigest(payload)
        self.last_event_s = now_s
        if self._first_received_s is None:
            self._first_received_s = now_s
        batch = self._decode(payload)
        self.counts["unknown"] += len(batch.unknown_kinds)
        self.counts["malformed"] += len(batch.malformed)
        kinds = Counter(map(type, batch.events))
        for kind, count in kinds.items():
            self.counts[kind.__name__] += count
        full = self.outbox.add(self.ledger.apply(*batch.events), now_s)
        if BlocksCleared in kinds:
            self.complete = True  # any missed block is gone, too
        if batch.dp_rank is not None:
            self.engine_rank = batch.dp_rank
        if self.ledger.may_miss or batch.malformed:
            self.complete = False  # blocks of an unreadable store are missing
        if batch.removals_lost:
            # After an unreadable removal, a block too many may stay: start empty.
            full += self.outbox.add(self.ledger.wipe(), now_s)
        return _publish(full)


def _publish(messages: list[bytes]) -> list[RankEffect]:
    return [Publish(messages)] if messages else []
