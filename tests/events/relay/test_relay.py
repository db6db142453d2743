"""The shell of the relay: what is queued for the broker, and what a replay socket may do to it."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
import zmq
import zmq.asyncio
from nats.aio.msg import Msg

from events.engines import sockets as engine_sockets
from events.plane.broker import Broker
from events.plane.settings import EngineSettings, NatsSettings
from events.relay.rank import EngineState, Publish
from events.relay.relay import Relay
from events.relay.stream_publisher import OUT_MESSAGES_MAX
from tests.events.relay.one_rank import long


class Wired:
    """A relay whose sockets are real, without a broker."""

    def __init__(self, relay: Relay, replay: zmq.asyncio.Socket) -> None:
        self.relay = relay
        self.replay = replay
        self.shell = relay._shells[0]

    async def asked(self) -> bytes:
        """Has the rank ask for a replay from its beginning; who asks."""
        self.relay._perform(self.shell, self.shell.rank.start())
        asker, *question = await self.replay.recv_multipart()
        assert question == [b"", bytes(8)]
        return asker

    async def replayed(self, *answers: Sequence[bytes]) -> None:
        """A replay of these messages, from the question to its end. Each is a number and a batch;
        the end has a third part."""
        asker = await self.asked()
        for answer in answers:
            await self.replay.send_multipart([asker, b"", *answer])
        await self.over()

    async def over(self) -> None:
        """Waits until the relay waits for no replay."""
        assert self.shell.replaying is not None
        async with asyncio.timeout(60):
            await asyncio.wait([self.shell.replaying])


@pytest.fixture
async def wired() -> AsyncIterator[Wired]:
    context = zmq.asyncio.Context()
    replay = context.socket(zmq.ROUTER)
    port = replay.bind_to_random_port("tcp://127.0.0.1")
    relay = Relay(
        EngineSettings(
            id="w",
            engine="vllm",
            address="engine",
            events="tcp://127.0.0.1:1",
            replay=f"tcp://127.0.0.1:{port}",
        ),
        Broker(NatsSettings(), "nats://127.0.0.1:1", "test"),
        fleet="f",
        clock=lambda: 100.0,
        rng=random.Random(1),
    )
    yield Wired(relay, replay)
    await relay.stop()
    context.destroy(linger=0)
    assert not relay.failures


END = (b"", b"\xff" * 8, b"")


async def test_what_waits_for_the_broker_is_bounded_and_counted(wired: Wired) -> None:
    messages = [str(i).encode() for i in range(OUT_MESSAGES_MAX + 30)]
    wired.relay._perform(wired.shell, [Publish(messages)])
    assert list(wired.shell.out) == messages[30:]
    assert wired.relay.counts["unsent"] == 30


async def test_a_replay_that_is_answered_ends_the_healing(wired: Wired) -> None:
    asker = await wired.asked()
    assert wired.shell.rank.state is EngineState.HEALING
    await wired.replay.send_multipart([asker, b"", *END])
    await wired.over()
    assert wired.shell.rank.state is EngineState.FOLLOWING
    assert wired.shell.rank.complete
    assert wired.shell.replaying is None


async def test_a_snapshot_request_for_a_negative_chunk_is_counted_and_not_answered(
    wired: Wired,
) -> None:
    asked = msgspec.msgpack.encode({"v": 1, "chunk": -5})
    await wired.relay._publisher.answer(wired.shell, Msg(None, "asked", "answer", asked))  # type: ignore[arg-type]  # no client: an answer would raise
    assert wired.relay.counts["malformed_request"] == 1


async def test_log_lines_show_no_internals(wired: Wired, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await wired.replayed((b"\xff" * 8, b""))
    assert "0 batches replayed; the stream is complete" in caplog.text
    assert "<" not in caplog.text


async def test_a_replay_socket_that_talks_nonsense_ends_the_healing_too(
    wired: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "REPLAY_MESSAGES_MAX", 20)
    await wired.replayed(*[(b"chatter", b"")] * 20)
    assert wired.shell.rank.state is EngineState.FOLLOWING
    assert not wired.shell.rank.complete
    assert wired.relay.counts["malformed_frame"] == 20


async def test_a_replay_socket_that_falls_silent_ends_the_healing_too(
    wired: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "REPLAY_QUIET_S", 0.01)
    wired.relay._perform(wired.shell, wired.shell.rank.start())
    await wired.over()
    assert wired.shell.rank.state is EngineState.FOLLOWING
    assert wired.relay.counts["replay_timeout"] == 1


async def test_a_question_that_is_lost_is_asked_again(
    wired: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "REPLAY_QUESTIONS", 1_000)
    monkeypatch.setattr(engine_sockets, "REPLAY_QUIET_S", 0.01)
    await wired.asked()  # not answered
    asker, *question = await wired.replay.recv_multipart()
    assert question == [b"", bytes(8)]
    monkeypatch.setattr(engine_sockets, "REPLAY_QUIET_S", 10.0)
    await wired.replay.send_multipart([asker, b"", *END])
    await wired.over()
    assert wired.shell.rank.complete
    assert wired.relay.counts["replay_timeout"] == 0


async def test_a_replay_that_is_too_large_is_cut_off_and_leaves_the_stream_partial(
    wired: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sockets, "REPLAY_BYTES_MAX", 1000)
    await wired.replayed(*((seq.to_bytes(8, "big"), bytes(100)) for seq in range(20)))
    assert wired.relay.counts["replay_too_large"] == 1
    assert wired.shell.rank.state is EngineState.FOLLOWING
    assert not wired.shell.rank.complete


async def test_the_loop_turns_between_the_parts_of_a_long_replay(wired: Wired) -> None:
    asker = await wired.asked()
    for seq in range(20):
        await wired.replay.send_multipart([asker, b"", seq.to_bytes(8, "big"), long(seq)])
    await wired.replay.send_multipart([asker, b"", *END])
    turns = Counter[int]()
    async with asyncio.timeout(60):
        while wired.shell.rank.state is not EngineState.FOLLOWING:
            turns[wired.shell.rank._next_seq] += 1
            await asyncio.sleep(0)
    assert set(range(2, 20)) <= turns.keys()
