"""Relays over real sockets, beside stand-in engines: what routers get to hear of an engine."""

import asyncio
import random
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from events.feed.stream import StreamState
from events.plane.clock import unix_now
from events.plane.settings import EngineSettings
from events.relay.ledger_file import saved_ledger_path
from events.relay.saved_ledger import Source, unpack
from indexer.hashing import block_hashes, pack_tokens, prefix_hashes
from indexer.identity import WorkerKey
from router.app.processes.router_process import RouterApp
from router.cluster.children.nats_server import NatsChild
from router.decide.core.progress import Pick
from router.request.prompt import Prompt
from router.request.request import Request
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins
from tests.stage.loopback import (
    BLOCK_SIZE,
    a_broker,
    a_nats,
    a_relay,
    engine_settings,
    router_app,
    serve_config,
)
from tests.stage.programs import running
from tests.stage.tcp import tcp_server
from tests.stage.waiting import until


@dataclass
class Stage:
    """An engine and a router, and no relay yet."""

    nats: NatsChild
    engine: StandIn
    router: RouterApp


@asynccontextmanager
async def an_engine_and_a_router() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(a_nats())
        config = EngineConfig("w", SchedulerConfig(block_count=2048, block_size=BLOCK_SIZE))
        (engine,) = await stack.enter_async_context(stand_ins([config], ScaledClock(100.0)))
        router, _ = await stack.enter_async_context(router_app(serve_config(nats.url)))
        yield Stage(nats, engine, router)


async def test_an_engine_that_publishes_no_events_is_told_of_by_its_heartbeats() -> None:
    async with an_engine_and_a_router() as stage:
        silent = {"events": None, "replay": None, "topic": "", "loads_loras": True}
        async with (
            a_broker(stage.nats.url) as broker,
            a_relay(stage.engine, broker, **silent) as relay,
        ):
            view = stage.router.view
            await until(
                lambda: any(
                    one.heartbeat and one.heartbeat.sampled_at_s for one in view.sources.values()
                ),
                "a heartbeat with a load",
            )
            (source,) = view.sources.values()
            await until(lambda: source.stream.state is StreamState.LIVE, "a live stream")
            assert not stage.router.core.fleet.excluded(source)
            heartbeat = source.heartbeat
            assert heartbeat is not None
            assert not heartbeat.events
            assert (heartbeat.model, heartbeat.block_size) == ("stand-in", BLOCK_SIZE)
            assert (heartbeat.total_blocks, heartbeat.total_slots) == (2048, 64)
            assert heartbeat.loads_loras
            await stage.engine.engine.complete(list(range(100)), 1)
            beat_at_s = source.stream.last_beat_s
            await until(lambda: source.stream.last_beat_s > beat_at_s, "the next beat")
            ((_, rank),) = relay.ranks
            assert rank.last_event_s is None
            assert (source.stream.seq, source.stream.complete) == (0, False)
            assert view.index.count(source.slot) == 0
            # Known by our own picks alone, and marked as such.
            core, tokens = stage.router.core, pack_tokens(range(100))
            for request_id, predicted in (("first", 0), ("again", 96)):
                request = Request(request_id, Prompt.from_tokens(tokens))
                pick = core.route(request, unix_now())
                assert isinstance(pick, Pick)
                assert pick.decision.overlap(0).predicted == predicted
            assert source.approximate


# --- engines that are none ---


@asynccontextmanager
async def a_babbler() -> AsyncIterator[int]:
    """A port of loopback that answers every connection with bytes of no protocol."""

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(bytes(range(256)) * 16)
            await writer.drain()
        writer.close()

    async with tcp_server(babble) as port:
        yield port


async def test_relays_of_engines_that_are_none_harm_no_router_and_no_other_worker() -> None:
    async with an_engine_and_a_router() as stage, a_babbler() as port:
        router = stage.router
        assert router.links.broker is not None
        url = f"http://127.0.0.1:{port}"
        hopeless = {
            "nonsense": {"events": "nonsense", "address": url},
            "no-port": {"events": "tcp://host", "address": url},
            "bad-replay": {"events": "tcp://127.0.0.1:1", "replay": "bad"},
            "bad-host": {"metrics": "http://a..b"},
            "long-label": {"metrics": f"http://{'a' * 64}"},
            "babbler": {"address": url, "events": f"tcp://127.0.0.1:{port}"},
        }
        for name, fields in hopeless.items():
            settings = EngineSettings(id=name, engine="vllm", address="http://127.0.0.1:1")
            wrong = msgspec.structs.replace(settings, **fields)
            router.relays.start(wrong, registered=False)
        router.relays.start(engine_settings(stage.engine), registered=False)

        def codes(name: str) -> set[str]:
            (source,) = router.view.ranks(name) or [None]
            if source is None:
                return set()
            return {one.code.value for one in router.core.fleet.warnings(source, unix_now())}

        for name in hopeless:
            wanted = {"nonsense", "no-port", "bad-replay"}
            code = "relay_failing" if name in wanted else "relay"
            await until(lambda n=name, c=code: c in codes(n), f"the warning {code} of {name}")
        await until(
            lambda: [router.core.fleet.excluded(one) for one in router.view.ranks("w")] == [""],
            "the engine",
        )
        await stage.engine.engine.complete(list(range(3 * BLOCK_SIZE)), 1)
        (source,) = router.view.ranks("w")
        await until(lambda: router.view.index.count(source.slot) == 3, "its blocks")
        assert router.failed is None
        assert not router.relays.trouble("w")


# --- a relay that is killed ---

A_RELAY_THAT_KEEPS_OFTEN = (
    "from events.relay import ledger_file; ledger_file.KEEP_S = 0.05;"
    " from router.app.main import main; main()"
)


@asynccontextmanager
async def relay_process(stage: Stage, state_dir: Path, log: Path) -> AsyncIterator[None]:
    """`kvroute relay` in a process of its own, which ends by SIGKILL."""
    engine = stage.engine
    command = (
        *(sys.executable, "-c", A_RELAY_THAT_KEEPS_OFTEN, "relay"),
        *("--nats", stage.nats.url, "--worker-id", "w", "--address", engine.address),
        *("--events", engine.events_endpoint, "--replay", engine.replay_endpoint),
        *("--topic", engine.topic, "--state-dir", str(state_dir)),
        *("--metrics-listen", "", "--log-format", "plain"),
    )
    with log.open("ab") as output:
        async with running(*command, stderr=output) as process:
            yield
            assert process.returncode is None, f"it left: see {log}"


async def test_a_relay_that_is_killed_goes_on_where_its_ledger_was_saved(tmp_path: Path) -> None:
    async with an_engine_and_a_router() as stage:
        publisher, view = stage.engine.publisher, stage.router.view
        publisher._ring = deque(maxlen=12)
        state_dir, log = tmp_path / "state", tmp_path / "relay.log"
        path = saved_ledger_path(state_dir, "default", WorkerKey("w", 0))
        prompts: list[list[int]] = []

        async def serve(count: int) -> None:
            for _ in range(count):
                rng = random.Random(len(prompts))
                prompts.append([rng.randrange(1000) for _ in range(3 * BLOCK_SIZE)])
                await stage.engine.engine.complete(prompts[-1], 1)

        def in_step(*, complete: bool, held: int) -> bool:
            """Whether the stream is live, says so much of itself, and holds so many blocks."""
            source = view.sources.get(WorkerKey("w", 0))
            if source is None or source.stream.state is not StreamState.LIVE:
                return False
            return (source.stream.complete, view.index.count(source.slot)) == (complete, held)

        def kept_seq() -> int:
            source = Source(WorkerKey("w", 0), "vllm", None)
            return unpack(source, path.read_bytes())[0].seq if path.exists() else -1

        async with relay_process(stage, state_dir, log):
            await until(lambda: in_step(complete=True, held=0), "the relay to be there")
            await serve(20)
            await until(lambda: in_step(complete=True, held=60), "60 blocks in the index")
            await until(lambda: kept_seq() == publisher.next_sequence - 1, "the ledger on disk")
            epoch = view.sources[WorkerKey("w", 0)].stream.epoch
            await serve(2)
        await serve(3)
        assert publisher._ring[0][0] > 0, "the replay socket has forgotten the beginning"
        async with relay_process(stage, state_dir, log):
            await until(lambda: in_step(complete=True, held=75), "all blocks in the index again")
            stream = view.sources[WorkerKey("w", 0)].stream
            assert stream.epoch is not None
            assert epoch is not None
            assert stream.epoch > epoch
            for tokens in prompts:
                packed = pack_tokens(tokens)
                hashes = prefix_hashes(block_hashes(packed, BLOCK_SIZE))
                assert int(view.index.match(hashes).run().max()) == 3
            await serve(1)
            await until(lambda: in_step(complete=True, held=78), "what came after that")
        path.unlink()
        async with relay_process(stage, state_dir, log):
            await until(lambda: in_step(complete=False, held=36), "what the replay socket has")
        assert "show that the engine has not restarted since" in log.read_text()
        assert "Traceback" not in log.read_text()
