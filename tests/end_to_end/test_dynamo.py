"""A Dynamo fleet over real NATS: what its workers publish, to a router's Explain."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

from events.feed.stream import StreamState
from events.plane import subjects
from events.plane.facts import Control, encode
from events.plane.settings import DynamoSettings
from events.relay.dynamo.relay import INSTANCE_LABEL, DynamoRelay
from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import WorkerKey
from kvroute.client import KvRouteClient
from router.app.processes.router_process import RouterApp
from router.cluster.children.nats_server import NatsChild
from router.cluster.children.relay_messages import relay_status
from router.observe.metrics.families import export
from router.observe.metrics.of_relays import relay_metrics
from tests.stage.loopback import TurnedClock, a_broker, a_nats, router_app, serve_config
from tests.stage.programs import KVROUTE, kvroute, running
from tests.stage.waiting import until

BLOCK_SIZE = 16
EVENTS = "namespace.dyn.component.backend.endpoint.generate.kv-events"
SETTINGS = DynamoSettings(
    subject=EVENTS,
    address="http://frontend:8000/{worker_id}",
    model="the-model",
    block_size=BLOCK_SIZE,
    total_blocks=1000,
    slots=64,
)


def prompt(seed: int, blocks: int = 4) -> list[int]:
    """Tokens of full blocks, and one more, so that all of them are usable."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(blocks * BLOCK_SIZE + 1)]


class Publisher:
    """Speaks for one rank of a Dynamo worker, as its KvEventPublisher does."""

    def __init__(self, nats: Client, worker_id: int, dp_rank: int = 0, salt: int = 0) -> None:
        """salt: makes its engine's hashes differ from others' for the same tokens."""
        self.nats = nats
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.event_id = 0
        self.sequence = 0
        self._salt = salt
        self._publisher_id = random.Random(f"{worker_id}/{dp_rank}").getrandbits(53)

    def names(self, tokens: Sequence[int]) -> list[int]:
        """The engine's hashes of a prompt's full blocks: signed, and its own."""
        full = len(tokens) // BLOCK_SIZE
        seen = [hash((self._salt, *tokens[: BLOCK_SIZE * (i + 1)])) for i in range(full)]
        return [one if one < 1 << 63 else one - (1 << 64) for one in seen]

    async def store(self, tokens: Sequence[int], known: int = 0) -> None:
        """The prompt's blocks after the first `known`, which the engine has told before."""
        names = self.names(tokens)
        blocks = block_hashes(pack_tokens(list(tokens)), BLOCK_SIZE).tolist()
        stored = {
            "parent_hash": names[known - 1] if known else None,
            "start_position": None,
            "blocks": [
                {"block_hash": name, "tokens_hash": block, "mm_extra_info": None}
                for name, block in list(zip(names, blocks, strict=True))[known:]
            ],
        }
        await self.publish({"stored": stored})

    async def remove(self, names: Sequence[int]) -> None:
        await self.publish({"removed": {"block_hashes": list(names)}})

    async def publish(self, data: Any) -> None:
        self.event_id += 1
        event = {
            "worker_id": self.worker_id,
            "storage_tier": "device",
            "event": {"event_id": self.event_id, "data": data, "dp_rank": self.dp_rank},
        }
        envelope = {
            "publisher_id": self._publisher_id,
            "sequence": self.sequence,
            "published_at": 0,
            "topic": "kv-events",
            "payload": msgspec.msgpack.encode([event]),
        }
        self.sequence += 1
        await self.nats.publish(EVENTS, msgspec.msgpack.encode(envelope))


class Fleet:
    """NATS, the relay, a router and its client."""

    def __init__(
        self,
        nats: NatsChild,
        wire: Client,
        relay: DynamoRelay,
        router: RouterApp,
        client: KvRouteClient,
        clock: TurnedClock,
    ) -> None:
        self.nats = nats
        self.wire = wire
        self.relay = relay
        self.router = router
        self.client = client
        self.clock = clock

    def publisher(self, worker_id: int, dp_rank: int = 0, salt: int = 0) -> Publisher:
        return Publisher(self.wire, worker_id, dp_rank, salt)

    def held(self, worker_id: int, dp_rank: int = 0) -> int:
        """Placements that the router knows of a worker; -1 for one that it doesn't know."""
        source = self.router.view.sources.get(WorkerKey(str(worker_id), dp_rank))
        return -1 if source is None else self.router.view.index.count(source.slot)

    async def holding(self, count: int, worker_id: int, dp_rank: int = 0) -> None:
        await until(
            lambda: self.held(worker_id, dp_rank) == count and self.live(worker_id, dp_rank),
            f"{count} placements of {worker_id}/{dp_rank}",
        )

    def live(self, worker_id: int, dp_rank: int = 0) -> bool:
        source = self.router.view.sources.get(WorkerKey(str(worker_id), dp_rank))
        return (
            source is not None
            and source.heartbeat is not None
            and source.stream.state is StreamState.LIVE
        )

    async def in_step(self, worker_id: int, dp_rank: int = 0) -> None:
        """Waits until the router knows what the relay knows, and how far to trust it."""
        key = WorkerKey(str(worker_id), dp_rank)
        rank = dict(self.relay.ranks)[key]
        view = self.router.view

        def same() -> bool:
            source = view.sources.get(key)
            return (
                source is not None
                and self.live(worker_id, dp_rank)
                and source.stream.epoch == rank.outbox.epoch
                and source.stream.seq == rank.outbox.seq
                and source.stream.complete == rank.complete
                and view.index.digest(source.slot) == rank.ledger.digest()
            )

        await until(same, f"router and relay to agree on {key}")

    async def overlaps(self, tokens: Sequence[int]) -> dict[str, int]:
        """Usable overlap of each worker, as Explain says it."""
        explained = await self.client.explain(token_ids=list(tokens), model="the-model")
        return {row.worker_id: row.overlap_tokens.usable for row in explained.candidates}


@asynccontextmanager
async def a_fleet(settings: DynamoSettings = SETTINGS) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(a_nats())
        clock = TurnedClock()
        router, client = await stack.enter_async_context(router_app(serve_config(nats.url), clock))
        broker = await stack.enter_async_context(a_broker(nats.url))
        relay = DynamoRelay(settings, broker, fleet="default", clock=clock, rng=random.Random(1))
        stack.push_async_callback(relay.stop)
        await relay.start()
        wire = Client()
        await wire.connect(nats.url)
        stack.push_async_callback(wire.close)
        await until(
            lambda: router.links.feed is not None and router.links.broker is not None, "the router"
        )
        yield Fleet(nats, wire, relay, router, client, clock)
        assert not relay.failures


async def test_what_workers_publish_is_the_overlap_that_explain_shows() -> None:
    async with a_fleet() as fleet:
        one, two = fleet.publisher(11, salt=1), fleet.publisher(1 << 63, salt=2)
        tokens = prompt(1)
        await one.store(tokens)
        await two.store(tokens[: 2 * BLOCK_SIZE])
        await fleet.holding(4, 11)
        await fleet.holding(2, 1 << 63)
        assert await fleet.overlaps(tokens) == {"11": 64, str(1 << 63): 32}
        pick = await fleet.client.route(token_ids=tokens, model="the-model")
        assert (pick.worker_id, pick.address) == ("11", "http://frontend:8000/11")
        await two.store(tokens, known=2)
        await fleet.holding(4, 1 << 63)
        await one.remove(one.names(tokens)[1:])
        await fleet.holding(1, 11)
        assert await fleet.overlaps(tokens) == {"11": 16, str(1 << 63): 64}
        for worker in await fleet.client.list_workers():
            assert (worker.engine, worker.model, worker.block_size) == ("dynamo", "the-model", 16)
            await fleet.in_step(int(worker.worker_id))
            assert list(worker.warnings) == []


async def test_the_relays_metrics_tell_of_each_worker() -> None:
    async with a_fleet() as fleet:
        worker = fleet.publisher(4, dp_rank=1)
        await worker.store(prompt(1))
        await fleet.wire.publish(EVENTS, b"{}")
        await until(lambda: fleet.relay.counts["malformed"] == 1, "broken bytes")
        registry = CollectorRegistry()
        export(registry, relay_metrics, lambda: [relay_status(fleet.relay)])
        labels = {"worker": "4", "rank": "1"}

        def value(name: str, **more: str) -> float | None:
            return registry.get_sample_value(f"kvroute_relay_{name}", labels | more)

        assert value("events_total", kind="BlocksStored") == 1
        for fault in ("gap", "restart"):
            assert value("engine_faults_total", fault=fault) == 0
        assert value("ledger_entries") == 4
        wrong = registry.get_sample_value(
            "kvroute_relay_socket_errors_total", {"worker": "dynamo", "kind": "malformed"}
        )
        assert wrong == 1


async def test_a_younger_router_learns_the_fleet_from_the_relay_alone() -> None:
    async with a_fleet() as fleet:
        workers = [fleet.publisher(worker_id, salt=worker_id) for worker_id in (1, 2)]
        for i, worker in enumerate(workers):
            await worker.store(prompt(i, blocks=3 + i))
            await fleet.holding(3 + i, worker.worker_id)
        async with router_app(serve_config(fleet.nats.url)) as (young, client):
            await until(lambda: young.ready, "readiness")
            for i, worker in enumerate(workers):
                explained = await client.explain(token_ids=prompt(i, 3 + i), model="the-model")
                overlaps = {
                    row.worker_id: row.overlap_tokens.usable for row in explained.candidates
                }
                assert overlaps[str(worker.worker_id)] == 16 * (3 + i)
                assert all(row.stream_complete for row in explained.candidates)


async def test_bounds_hold_and_what_is_over_them_is_counted() -> None:
    settings = msgspec.structs.replace(
        SETTINGS, workers_max=2, hashes_max=8, message_bytes_max=4096, blocks_max=6
    )
    async with a_fleet(settings) as fleet:
        counts = fleet.relay.counts
        for worker_id in range(4):
            await fleet.publisher(worker_id).store(prompt(worker_id))
        await fleet.holding(4, 1)
        await until(lambda: counts["too_many_workers"] == 2, "the bound of workers")
        await fleet.wire.publish(EVENTS, b"x" * 4097)
        await until(lambda: counts["too_large"] == 1, "the bound of bytes")
        await fleet.wire.publish(EVENTS, b"\xc1")
        await until(lambda: counts["malformed"] == 1, "broken bytes")
        full = fleet.publisher(0)
        full.event_id = full.sequence = 1
        await full.store(prompt(9, blocks=9))
        dropped = dict(fleet.relay.ranks)[WorkerKey("0", 0)].counts
        await until(lambda: dropped["too_many_hashes"] == 1, "the bound of hashes")
        await full.store(prompt(8, blocks=4))
        await until(lambda: dropped["ledger_full"] == 2, "the bound of blocks")
        await fleet.holding(6, 0)
        assert set(fleet.router.view.sources) == {WorkerKey("0", 0), WorkerKey("1", 0)}


async def test_a_silent_worker_ends_and_one_that_is_removed_too() -> None:
    async with a_fleet() as fleet:
        silent, removed = fleet.publisher(1), fleet.publisher(2)
        for publisher in (silent, removed):
            await publisher.store(prompt(publisher.worker_id))
            await fleet.holding(4, publisher.worker_id)
        control = Control(1, "a", "remove", "2", tombstone_s=0.0)
        await fleet.wire.publish(subjects.control("default"), encode(control))
        await until(lambda: len(fleet.relay.ranks) == 1, "one worker less")
        fleet.clock.ahead_s += 100.0
        heartbeat_s = fleet.clock()
        sources = fleet.router.view.sources

        def warned() -> bool:
            source = sources.get(WorkerKey("1", 0))
            told = source.heartbeat if source is not None else None
            return told is not None and told.sent_at_s >= heartbeat_s and bool(told.warnings)

        await until(warned, "a warning of the silence")
        fleet.clock.ahead_s += 201.0
        await until(lambda: not fleet.relay.ranks, "no worker left")
        assert fleet.relay.counts["worker_timeout"] == 1
        await silent.store(prompt(5), known=0)
        await until(lambda: len(fleet.relay.ranks) == 1, "a worker that speaks again")


async def test_after_a_broker_is_back_only_what_the_next_number_proves_is_told() -> None:
    async with a_fleet() as fleet:
        kept, missed = fleet.publisher(1), fleet.publisher(2)
        for publisher in (kept, missed):
            await publisher.store(prompt(publisher.worker_id))
            await fleet.holding(4, publisher.worker_id)
        url = fleet.nats.url
        ranks = {key.worker_id: rank for key, rank in fleet.relay.ranks}
        await fleet.nats.stop()
        await until(lambda: not ranks["1"].complete and not ranks["2"].complete, "doubt")
        assert [rank.ledger.count() for rank in ranks.values()] == [0, 0]
        again = NatsChild()
        await again.start(int(url.rpartition(":")[2]))
        try:
            await until(lambda: fleet.wire.is_connected, "the workers' connections")
            await fleet.holding(0, 1)
            await fleet.holding(0, 2)
            await kept.store(prompt(1, blocks=5), known=0)
            missed.event_id += 1
            await missed.store(prompt(3))
            await until(lambda: ranks["1"].complete, "proof that nothing was missed")
            await until(lambda: ranks["2"].engine_gaps == 1, "proof that something was")
            await until(lambda: fleet.held(1) > 4, "what was put aside")
            assert (await fleet.overlaps(prompt(1)))["1"] == 64
            assert (await fleet.overlaps(prompt(2)))["2"] == 0
        finally:
            await fleet.client.close()
            await fleet.router.stop()
            await fleet.relay.stop()
            await fleet.wire.close()  # nats-py's own may fail in the middle of a reconnect
            await again.stop()


async def test_the_command_relays_a_fleet_of_another_nats(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nats, theirs = [await stack.enter_async_context(a_nats()) for _ in range(2)]
        app, client = await stack.enter_async_context(router_app(serve_config(nats.url)))
        wire = Client()
        await wire.connect(theirs.url)
        stack.push_async_callback(wire.close)
        log = tmp_path / "relay.log"
        command = (
            *(*KVROUTE, "relay", "--engine", "dynamo"),
            *("--nats", nats.url, "--dynamo-nats", theirs.url, "--subject", EVENTS),
            *("--model", "m", "--block-size", "16", "--worker-id", "dyn-{worker_id}"),
            *("--address", "http://{worker_id}:8000", "--slots", "8", "--label", "zone=a"),
            *("--metrics-listen", "127.0.0.1:0", "--log-format", "plain"),
        )
        output = stack.enter_context(log.open("wb"))
        process = await stack.enter_async_context(running(*command, stderr=output))
        await until(lambda: "relay for the Dynamo workers" in log.read_text(), "the relay")
        worker = Publisher(wire, 42)
        await worker.store(prompt(1))
        await until(
            lambda: (
                (source := app.view.sources.get(WorkerKey("dyn-42", 0)))
                and source.heartbeat
                and app.view.index.count(source.slot) == 4
            ),
            "the worker's blocks",
        )
        (row,) = (await client.explain(token_ids=prompt(1), model="m")).candidates
        assert (row.worker_id, row.overlap_tokens.usable) == ("dyn-42", 64)
        (told,) = await client.list_workers()
        labels = {"zone": "a", INSTANCE_LABEL: "42"}
        assert (told.address, dict(told.labels)) == ("http://42:8000", labels)
        process.terminate()
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "give --subject, --address, --model, --block-size too"),
        (("--worker-id", "one"), "without {worker_id} all workers have the same id"),
        (("--replay", "tcp://x:1"), "unknown key `replay`"),
        (("--address", "{worker_id}:8000"), "has no scheme (http:// or https://)"),
        (("--label", "zone"), "write NAME=VALUE"),
        (("--subject", "a b"), "$.subject"),
        (("--state-dir", "state", "--nats", "nats://127.0.0.1:1"), "leave --state-dir out"),
    ],
)
async def test_wrong_flags_end_with_one_line(flags: tuple[str, ...], told: str) -> None:
    needed = ("--subject", "a", "--address", "http://x", "--model", "m", "--block-size", "16")
    words = (*needed, *flags) if flags else ()
    code, _, err = await kvroute("relay", "--engine", "dynamo", *words)
    assert code == 2
    assert told in err
    assert len(err.strip().splitlines()) == 1
