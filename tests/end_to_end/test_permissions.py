"""Nobody speaks for another worker where NATS permissions are as docs/nats.md has them."""

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from events.feed.stream import StreamState
from events.plane import subjects
from events.plane.broker import Broker
from events.plane.facts import (
    VERSION,
    Beat,
    Control,
    Epoch,
    Heartbeat,
    SnapshotChunk,
    Warm,
    Warmed,
    decode,
    encode,
)
from events.plane.settings import NatsSettings
from indexer.hashing import pack_tokens
from indexer.identity import WorkerKey
from kvroute.client import KvRouteClient
from router.app.processes.router_process import RouterApp
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from tests.stage.loopback import (
    BLOCK_SIZE,
    a_broker,
    a_relay,
    all_schedulable,
    router_app,
    serve_config,
)
from tests.stage.nats_server import nats_server
from tests.stage.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "nats.md"
A, B = WorkerKey("a", 0), WorkerKey("b", 0)
LATER = Epoch(1 << 62, 0)
"""A life after every other."""


def documented() -> str:
    """The page's configuration, with a second worker like its first."""
    (config,) = re.findall(r"```\n(RELAY_A.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    relay = re.search(r"RELAY_A = \{.*?\n\}\n", config, re.DOTALL)
    user = re.search(r"    \{ user: relay-a.*\n", config)
    assert relay is not None
    assert user is not None
    twin = relay[0].replace("RELAY_A", "RELAY_B").replace(".a.", ".b.")
    twins_user = user[0].replace("relay-a", "relay-b").replace("RELAY_A", "RELAY_B")
    return twin + str(config).replace(user[0], user[0] + twins_user)


@dataclass
class Guarded:
    """Two workers with their relays, a router, and a stranger with the password of relay a."""

    engines: dict[str, StandIn]
    brokers: dict[str, Broker]
    router: RouterApp
    client: KvRouteClient
    stranger: Broker

    def held(self, worker: WorkerKey) -> int:
        view = self.router.view
        return view.index.count(view.sources[worker].slot)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    scheduler = SchedulerConfig(block_count=256, block_size=BLOCK_SIZE)
    configs = [EngineConfig(name, scheduler) for name in ("a", "b")]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(nats_server(tmp_path, documented()))
        engines = await stack.enter_async_context(stand_ins(configs, ScaledClock(100.0)))
        brokers = {}
        for engine in engines:
            name = engine.engine_id
            brokers[name] = await stack.enter_async_context(
                user_of(server.url, f"relay-{name}", "change-me")
            )
            await stack.enter_async_context(a_relay(engine, brokers[name], warm=True))
        config = serve_config(server.url)
        nats = NatsSettings(url=server.url, user="router", password="change-me-too")
        router, client = await stack.enter_async_context(
            router_app(msgspec.structs.replace(config, nats=nats))
        )
        stranger = await stack.enter_async_context(user_of(server.url, "relay-a", "change-me"))
        await all_schedulable(router, 2)
        yield Guarded(
            {engine.engine_id: engine for engine in engines}, brokers, router, client, stranger
        )


def user_of(url: str, user: str, password: str) -> AbstractAsyncContextManager[Broker]:
    return a_broker(url, user, user=user, password=password)


async def test_the_documented_permissions_are_enough(guarded: Guarded) -> None:
    """Facts, heartbeats, hello, recoveries by ring and by snapshot, fleet commands, warming."""
    view = guarded.router.view
    for name, engine in guarded.engines.items():
        await engine.engine.complete(list(range(10 * BLOCK_SIZE)), 1)
        await until(lambda key=B if name == "b" else A: guarded.held(key) == 10, "its blocks")
        await guarded.client.resync_worker(name)
    await until(lambda: view.recoveries["snapshot", "ok"] == 2, "two snapshots")
    stream = view.sources[A].stream
    await until(lambda: stream.state is StreamState.LIVE, "a live stream")
    stream.seq -= 1  # as if its last message had been lost
    await until(lambda: view.recoveries["ring", "ok"] == 1, "the ring")
    await until(lambda: stream.state is StreamState.LIVE, "a live stream")
    assert guarded.router.links.broker is not None
    warm = encode(Warm(id="1", tokens=pack_tokens(range(20 * BLOCK_SIZE))))
    answer = await guarded.router.links.broker.request(subjects.warm("default", A), warm, 30.0)
    assert answer is not None
    assert decode(Warmed, answer) == Warmed(id="1", done=True)
    assert await guarded.client.drain_worker("a") == 1
    picks = {(await guarded.client.route(token_ids=[1, 2, 3])).worker_id for _ in range(10)}
    assert picks == {"b"}
    assert [+broker.counts for broker in guarded.brokers.values()] == [{}, {}]
    assert +guarded.router.links.broker.counts == {}


async def test_a_relay_cannot_speak_for_another_worker_or_command_the_fleet(
    guarded: Guarded,
) -> None:
    await guarded.engines["b"].engine.complete(list(range(10 * BLOCK_SIZE)), 1)
    await until(lambda: guarded.held(B) == 10, "its blocks")
    view = guarded.router.view
    before = (+view.dropped, view.gaps, view.drifts, dict(view.recoveries))
    epoch = view.sources[B].stream.epoch
    beat = encode(Beat(VERSION, LATER, 0, 0, 0, True, 1.0))
    heartbeat = encode(
        Heartbeat(epoch=LATER, address="http://thief", engine="vllm", model="stand-in", sent_at_s=1)
    )
    remove = encode(Control(VERSION, "1", "remove", "b", 60.0))
    chunk = encode(SnapshotChunk(VERSION, LATER, 0, 0, 1))
    attempts = [
        (subjects.facts("default", B), beat),
        (subjects.load("default", B), heartbeat),
        (subjects.control("default"), remove),
        (subjects.hello("default"), b""),
        (subjects.snapshot("default", B), b""),
        (subjects.warm("default", B), b""),
        ("_INBOX.somebody.else", chunk),
    ]
    for refused, (subject, payload) in enumerate(attempts, 1):
        await guarded.stranger.publish(subject, payload)
        await until(lambda n=refused: guarded.stranger.counts["error"] == n, f"no to {subject}")
    # Nor can it listen to what is asked of b, or to answers: only then could it forge one.
    for heard in (
        subjects.snapshot("default", B),
        subjects.warm("default", B),
        subjects.all_of("default", "snapshot"),
        "_INBOX.>",
        "kvroute.v1.default.>",
    ):
        refused += 1
        await guarded.stranger.subscribe(heard, _nobody)
        await until(lambda n=refused: guarded.stranger.counts["error"] == n, f"no to {heard}")
    # What it may say comes after all that, so none of it is still on its way.
    spare = WorkerKey("a", 7)
    await guarded.stranger.publish(subjects.facts("default", spare), beat)
    await until(lambda: spare in view.sources, "what is allowed")
    assert before == (+view.dropped, view.gaps, view.drifts, dict(view.recoveries))
    source = view.sources[B]
    assert (source.stream.epoch, source.stream.state) == (epoch, StreamState.LIVE)
    assert source.heartbeat is not None
    assert source.heartbeat.address == guarded.engines["b"].address
    assert guarded.held(B) == 10


async def _nobody(_message: object) -> None:
    raise AssertionError("heard what is not for it")


async def test_a_router_may_subscribe_to_one_worker_alone(guarded: Guarded) -> None:
    came: list[bytes] = []
    url = guarded.stranger._url
    async with user_of(url, "router", "change-me-too") as router:
        subject = subjects.of_publisher("default", "facts", b"a")
        (one,) = await router.change_raw([subject], [], lambda name, _: came.append(name))
        await guarded.stranger.publish(subjects.facts("default", WorkerKey("a", 7)), b"x")
        await until(lambda: b"kvroute.v1.default.facts.a.7" in came, "a message of that worker")
        assert all(name.startswith(b"kvroute.v1.default.facts.a.") for name in came)
        await router.change_raw([], [one], lambda _name, _payload: None)
        assert router.counts["error"] == 0
