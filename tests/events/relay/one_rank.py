"""One engine rank and its relay, without sockets: what the tests of the rank play with."""

from collections.abc import Sequence
from typing import Any

import msgspec

from events.plane.facts import Beat, Epoch, FactsMessage, decode_stream
from events.relay.rank import CATCH_UP_BYTES, EngineState, Publish, Rank, RankEffect, Replay

EPOCH = Epoch(5_000_000_000, 9)
NOW_S = 100.0
SAID_S = 10_000.0
"""When batches were made, if nothing else is said: after any process started."""

Message = tuple[int, bytes]


def stored(block: int, life: int = 0) -> bytes:
    """A batch that stores one block; other lives of the engine say it in other bytes."""
    event = {
        "type": "BlockStored",
        "block_hashes": [block],
        "parent_block_hash": None,
        "token_ids": [block, life, 0, 0],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
    }
    return msgspec.msgpack.encode([SAID_S + life, [event], 0])


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([SAID_S, list(events), 0])


def removed(block: int) -> bytes:
    return batch({"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"})


def long(block: int) -> bytes:
    """A batch that stores one block and has more than CATCH_UP_BYTES."""
    [time_s, events, rank] = msgspec.msgpack.decode(stored(block))
    nothing = list(range(1 << 32, (1 << 32) + CATCH_UP_BYTES // 9))
    events.append({"type": "BlockRemoved", "block_hashes": nothing, "medium": "GPU"})
    return msgspec.msgpack.encode([time_s, events, rank])


def chain(blocks: int) -> bytes:
    """A batch that stores so many blocks, from 1 on, in one event."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(1, blocks + 1)),
        "parent_block_hash": None,
        "token_ids": list(range(4 * blocks)),
        "block_size": 4,
        "medium": "GPU",
    }
    return batch(event)


CLEARED = batch({"type": "AllBlocksCleared"})


class Engine:
    """A rank, and what its relay would do: effects sorted, time set."""

    def __init__(self, has_replay: bool = True) -> None:
        self.rank = Rank("vllm", EPOCH, has_replay=has_replay, wanted_block_size=4)
        self.asked: list[int] = []
        self.sent: list[bytes] = []
        self.now_s = NOW_S

    def perform(self, effects: Sequence[RankEffect]) -> list[int]:
        """Replays asked for."""
        asked = []
        for effect in effects:
            match effect:
                case Replay(from_seq):
                    asked.append(from_seq)
                case Publish(messages):
                    self.sent += messages
        self.asked += asked
        return asked

    def start(self) -> list[int]:
        return self.perform(self.rank.start())

    def hear(self, seq: int, payload: bytes | None = None) -> list[int]:
        """A live message; one that stores the block of its number when nothing else is said."""
        said = stored(seq) if payload is None else payload
        return self.perform(self.rank.on_message(seq, said, self.now_s))

    def replay(self, *messages: Message | int, ended: bool = True) -> list[int]:
        """An answer of the replay socket, applied to its end."""
        return self.begin_replay(*messages, ended=ended) + self.catch_up()

    def begin_replay(self, *messages: Message | int, ended: bool = True) -> list[int]:
        """An answer of the replay socket, of which one part is applied."""
        parts = [(one, stored(one)) if isinstance(one, int) else one for one in messages]
        return self.perform(self.rank.on_replay(parts, ended, self.now_s))

    def catch_up(self) -> list[int]:
        asked = []
        while self.rank.state is EngineState.CATCHING_UP:
            asked += self.perform(self.rank.catch_up(self.now_s))
        return asked

    def held(self) -> int:
        return self.rank.ledger.count()

    def told(self) -> list[FactsMessage | Beat]:
        """All that was sent, with a beat after it."""
        self.sent += self.rank.beat(self.now_s)
        decoded = [decode_stream(message)[0] for message in self.sent]
        return [message for message in decoded if message is not None]

    def complete(self) -> bool:
        beat = self.told()[-1]
        assert isinstance(beat, Beat)
        assert beat.complete == self.rank.complete
        assert (beat.blocks, beat.digest) == (self.held(), self.rank.ledger.digest())
        return beat.complete


class Life:
    """One life of an engine: what it published, and what its replay buffer still has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.messages: list[Message] = []
        self.held: list[set[int]] = [set()]
        """After each message"""

    def say(self, remove: bool, block: int) -> Message:
        held = set(self.held[-1])
        if remove and block in held:
            held.remove(block)
            payload = removed(block)
        elif block not in held:
            held.add(block)
            payload = stored(block, self.number)
        else:
            payload = batch()
        # The time is in each batch, so no two lives send the same bytes.
        stamp = [SAID_S + len(self.messages) + 1000.0 * self.number]
        payload = msgspec.msgpack.encode(stamp + msgspec.msgpack.decode(payload)[1:])
        self.messages.append((len(self.messages), payload))
        self.held.append(held)
        return self.messages[-1]


def started(has_replay: bool = True) -> Engine:
    """An engine that has said nothing yet; with a replay socket, its answer is awaited."""
    engine = Engine(has_replay)
    engine.start()
    return engine


def following(count: int = 3, has_replay: bool = True) -> Engine:
    """An engine heard from its first word on; so many messages are applied."""
    engine = started(has_replay)
    if has_replay:
        engine.replay()
    for seq in range(count):
        engine.hear(seq)
    assert (engine.rank.state, engine.held()) == (EngineState.FOLLOWING, count)
    assert engine.complete()
    return engine


def epochs_of(engine: Engine) -> list[Epoch]:
    epochs: list[Epoch] = []
    for message in engine.told():
        if not epochs or epochs[-1] != message.epoch:
            epochs.append(message.epoch)
    return epochs


def facts_of(engine: Engine) -> list[Any]:
    return [fact for one in engine.told() if isinstance(one, FactsMessage) for fact in one.facts]
