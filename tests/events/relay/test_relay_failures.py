"""What fails at a relay costs that piece of work a pause, and nobody else anything."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from events.engines.pages.probe import Answer, Probe
from events.plane import supervisor
from events.plane.facts import Heartbeat, SnapshotRequest, encode
from events.plane.settings import EngineSettings
from events.relay import engine_pages, ledger_file, stream_publisher
from events.relay import relay as module
from events.relay.relay import Relay
from tests.stage.waiting import until
from tests.stage.wire import Wire

CLASSES = [
    ValueError("bad value"),
    OverflowError("int too large"),
    UnicodeError("label too long"),
    IndexError("list index out of range"),
    KeyError("field"),
    TypeError("not an int"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    OSError(24, "Too many open files"),
    TimeoutError(),
    RuntimeError("Session is closed"),
    zmq.ZMQError(zmq.EINVAL),
    aiohttp.ClientError("payload"),
    AssertionError("law broken"),
]
errors = pytest.mark.parametrize("error", CLASSES, ids=lambda error: type(error).__name__)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.001)
    monkeypatch.setattr(supervisor, "BACKOFF_MAX_S", 0.01)
    monkeypatch.setattr(stream_publisher, "BEAT_S", 0.01)
    monkeypatch.setattr(engine_pages, "PROBE_S", 0.01)
    monkeypatch.setattr(stream_publisher, "HELLO_JITTER_S", 0.0)


class Pair:
    """Two relays on one broker; the engine of both is a publisher of the test."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.context = zmq.asyncio.Context()
        self.publisher = self.context.socket(zmq.PUB)
        port = self.publisher.bind_to_random_port("tcp://127.0.0.1")
        self.relays: dict[str, Relay] = {}
        self.settings = EngineSettings(
            id="victim",
            engine="vllm",
            address="http://127.0.0.1:1",
            events=f"tcp://127.0.0.1:{port}",
        )

    def relay(self, settings: EngineSettings, state_dir: Path | None = None) -> Relay:
        relay = self.relays[settings.id] = Relay(
            settings,
            self.wire,
            fleet="f",
            clock=lambda: 100.0,
            rng=random.Random(1),
            state_dir=state_dir,
        )
        return relay

    async def neighbour_is_well(self) -> None:
        """Its beats come, it says no warning, and nothing of it has failed."""
        count = len(self.wire.beats("neighbour"))
        await until(lambda: len(self.wire.beats("neighbour")) > count + 2, "the neighbour's beats")
        assert not self.relays["neighbour"].failures
        assert not self.wire.heartbeats("neighbour")[-1].warning_codes

    def last(self) -> Heartbeat | None:
        """Of its last rank."""
        heartbeats = self.wire.heartbeats("victim", self.relays["victim"].settings.ranks - 1)
        return heartbeats[-1] if heartbeats else None

    async def warned(self, work: str) -> Heartbeat:
        """The victim's first heartbeat that tells of this work's failure."""

        def telling() -> Heartbeat | None:
            last = self.last()
            if last is not None and "relay_failing" in last.warning_codes:
                assert len(last.warning_codes) <= len(last.warnings)
                return last if any(f"fails at {work}" in one for one in last.warnings) else None
            return None

        await until(telling, f"a warning about {work}")
        beats = len(self.wire.beats("victim"))
        await until(lambda: len(self.wire.beats("victim")) > beats, "a beat after it")
        last = self.last()
        assert last is not None
        return last


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    neighbour = msgspec.structs.replace(pair.settings, id="neighbour", address="engine")
    await pair.relay(neighbour).start()
    yield pair
    async with asyncio.timeout(60):
        for relay in pair.relays.values():
            await relay.stop()
            assert relay._context.closed
            assert relay._pages.session is None or relay._pages.session.closed
    assert not pair.wire.listeners
    pair.context.destroy(linger=0)
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if "victim" in name or "neighbour" in name]


async def test_a_saver_that_fails_is_the_saved_ledgers_trouble(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "pause_s", lambda _took_s: 1 / 0)
    relay = pair.relay(pair.settings, tmp_path)
    await relay.start()
    await pair.warned("saved_ledger")
    assert relay.failures.keys() == {"saved_ledger"}
    assert relay.counts["saved_ledger_failed"] > 0
    await pair.neighbour_is_well()
    monkeypatch.undo()  # else its last write would be tried for ever


@pytest.mark.parametrize(
    ("fields", "work"),
    [
        ({"events": "nonsense"}, "events"),
        ({"events": "tcp://host"}, "events"),
        ({"events": "tcp://*:5557"}, "events"),
        ({"events": "tcp://user:hunter2@host:1"}, "events"),
        ({"events": "ipc:///" + "a" * 200}, "events"),
        ({"events": "ipc:///tmp/x", "ranks": 2}, "events"),
        ({"replay": "bad"}, "replay"),
        ({"replay": "tcp://host"}, "replay"),
        ({"engine": "sglang", "load": "bad"}, "load_feed"),
    ],
)
async def test_an_endpoint_that_can_never_work_is_that_works_trouble(
    pair: Pair, fields: dict[str, object], work: str
) -> None:
    relay = pair.relay(msgspec.structs.replace(pair.settings, **fields))
    await relay.start()
    heartbeat = await pair.warned(work)
    assert relay.failures.keys() == {work}
    assert relay.counts[f"{work}_failed"] > 0
    assert not any("hunter2" in one for one in heartbeat.warnings)
    await pair.neighbour_is_well()


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "a" * 64 + ".b", "h:99999", "[::1", "\ud800"])
async def test_a_metrics_url_that_can_never_work_is_the_engines_silence(
    pair: Pair, host: str
) -> None:
    relay = pair.relay(msgspec.structs.replace(pair.settings, metrics=f"http://{host}"))
    await relay.start()
    await until(lambda: relay.counts["engine_silent"] > 2, "it to be asked again and again")

    def warned() -> bool:
        last = pair.last()
        return last is not None and any("the engine's HTTP" in one for one in last.warnings)

    await until(warned, "a warning")
    assert not relay.failures
    assert not any(one.healthy for one in pair.wire.heartbeats("victim"))
    await pair.neighbour_is_well()


def breaking(error: Exception, times: int = 3) -> Callable[..., None]:
    """Raises so many times, then no more."""
    left = times

    def raises(*_args: object) -> None:
        nonlocal left
        if left:
            left -= 1
            raise error

    return raises


def failing_first(whole: Callable[..., Any], error: Exception, times: int = 3) -> Any:
    """A function that raises so many times, and then does what the whole one does."""
    breaks = breaking(error, times)

    def fails(*args: object, **about: object) -> object:
        breaks()
        return whole(*args, **about)

    return fails


@errors
async def test_a_probe_that_raises_is_retried(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = {"identity": breaking(error), "load": breaking(error)}
    asked = {"identity": 0, "load": 0}

    def ask(question: str) -> Callable[[Probe], object]:
        async def ask_it(_probe: Probe, **_: bool) -> Answer:
            asked[question] += 1
            breaks[question]()
            return Answer.USABLE

        return ask_it

    monkeypatch.setattr(Probe, "ask_identity", ask("identity"))
    monkeypatch.setattr(Probe, "ask_load", ask("load"))
    relay = pair.relay(pair.settings)
    await relay.start()
    await until(lambda: asked["load"] > 4, "both to be asked after their failures")
    assert relay.failures == {"identity": 3, "load": 3}
    await pair.warned("load")
    heartbeat = await pair.warned("identity")
    assert heartbeat.healthy
    await pair.neighbour_is_well()


@errors
async def test_a_message_that_the_rank_fails_on_empties_it_and_the_next_ones_count(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = pair.relay(pair.settings)
    rank = relay._shells[0].rank
    heard: list[int] = []
    breaks = breaking(error, times=1)

    def on_message(seq: int, _payload: bytes, _now_s: float) -> list[object]:
        heard.append(seq)
        breaks()
        return []

    lost: list[float] = []
    monkeypatch.setattr(rank, "on_message", on_message)
    monkeypatch.setattr(rank, "on_failure", lambda now_s: lost.append(now_s) or [])
    await relay.start()
    await until(lambda: relay._shells[0].started, "the subscription")
    seq = 0
    async with asyncio.timeout(60):
        while len(heard) < 2:
            await pair.publisher.send_multipart([b"", seq.to_bytes(8, "big"), b""])
            seq += 1
            await asyncio.sleep(0.01)
    assert relay.failures == {"events": 1}
    assert len(lost) == 1
    await pair.warned("events")
    await pair.neighbour_is_well()


@errors
async def test_a_heartbeat_that_cannot_be_made_is_a_bare_one_with_a_warning(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = pair.relay(pair.settings)
    whole = relay._heartbeats.heartbeat
    monkeypatch.setattr(relay._heartbeats, "heartbeat", failing_first(whole, error))
    await relay.start()
    last = await pair.warned("heartbeat")
    assert last.address == pair.settings.address
    await until(lambda: relay.failures == {"heartbeat": 3}, "whole heartbeats")
    assert not pair.wire.heartbeats("victim")[0].healthy
    await pair.neighbour_is_well()


@errors
async def test_a_beat_that_fails_comes_after_a_pause(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = pair.relay(pair.settings)
    rank = relay._shells[0].rank
    monkeypatch.setattr(rank, "beat", failing_first(rank.beat, error))
    await relay.start()
    await pair.warned("beats")
    assert relay.failures == {"beats": 3}
    await pair.neighbour_is_well()


@errors
async def test_a_callback_that_fails_costs_its_message(pair: Pair, error: Exception) -> None:
    relay = pair.relay(pair.settings)
    shell = relay._shells[0]
    breaks = breaking(error)

    def answer(*_args: object) -> None:
        breaks()
        raise AssertionError("asked too often")

    await relay.start()
    shell.rank.answer = answer  # type: ignore[method-assign, assignment]
    for _ in range(3):
        await pair.wire.say("kvroute.v1.f.snapshot.victim.0", encode(SnapshotRequest()))
    assert relay.failures == {"snapshot": 3}
    await pair.warned("snapshot")
    await pair.neighbour_is_well()


@errors
async def test_a_broker_that_raises_is_tried_again(pair: Pair, error: Exception) -> None:
    breaks, refuses = breaking(error), breaking(error, times=2)

    def on_publish(subject: str) -> None:
        if "victim" in subject:
            breaks()

    def on_subscribe(subject: str) -> None:
        if "victim" in subject:
            refuses()

    pair.wire.on_publish, pair.wire.on_subscribe = on_publish, on_subscribe
    relay = pair.relay(pair.settings)
    await relay.start()
    await until(lambda: pair.wire.hears("kvroute.v1.f.snapshot.victim.0"), "it to listen")
    await pair.warned("snapshot")
    assert relay.failures["snapshot"] == 2
    assert sum(relay.failures.values()) == 5
    await pair.neighbour_is_well()


@errors
async def test_a_replay_that_raises_leaves_the_rank_partial_and_following(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_replay(*_args: object) -> None:
        raise error

    monkeypatch.setattr(module, "ask_replay", ask_replay)
    relay = pair.relay(msgspec.structs.replace(pair.settings, replay="tcp://127.0.0.1:1"))
    rank = relay._shells[0].rank
    await relay.start()
    await pair.warned("replay")
    await until(lambda: rank.state.name == "FOLLOWING", "the rank to follow")
    assert not rank.complete
    assert relay.failures.keys() == {"replay"}  # again at each connection
    await pair.neighbour_is_well()


@errors
async def test_a_map_that_raises_is_counted_and_the_engine_followed(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    relay = pair.relay(pair.settings, tmp_path)
    shell = relay._shells[0]

    def raises(*_args: object) -> None:
        raise error

    monkeypatch.setattr(shell.saver, "_load", raises)
    await relay.start()
    await until(lambda: shell.started, "the subscription")
    assert relay.counts["ledger_unusable"] == 1
    monkeypatch.setattr(shell.rank, "kept", raises)
    monkeypatch.setattr(shell.saver, "_saved", None)
    await relay.stop()
    assert relay.counts["ledger_not_saved"] == 1
    assert not relay.failures
    del pair.relays["victim"]
    await pair.neighbour_is_well()
