"""What fails at a Dynamo fleet's relay costs one message or one worker a pause."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from events.plane import supervisor
from events.plane.facts import Control, Heartbeat, encode
from events.plane.settings import DynamoSettings
from events.relay import stream_publisher
from events.relay.dynamo import relay as module
from events.relay.dynamo.rank import DynamoRank
from events.relay.dynamo.relay import DynamoRelay
from tests.events.relay.test_relay_failures import breaking, errors, failing_first
from tests.stage.waiting import until
from tests.stage.wire import Wire

EVENTS = "namespace.n.component.c.endpoint.e.kv-events"


class Fleet:
    """A relay that follows workers 1 and 2."""

    def __init__(self) -> None:
        self.wire = Wire()
        settings = DynamoSettings(
            subject=EVENTS, address="http://{worker_id}", model="m", block_size=16
        )
        self.relay = DynamoRelay(
            settings, self.wire, fleet="f", clock=lambda: 100.0, rng=random.Random(1)
        )
        self.event_ids = Counter[int]()

    async def store(self, worker_id: int, dp_rank: int = 0) -> None:
        self.event_ids[worker_id] += 1
        event_id = self.event_ids[worker_id]
        block = {"block_hash": event_id, "tokens_hash": event_id}
        stored = {"stored": {"parent_hash": None, "blocks": [block]}}
        event = {"event_id": event_id, "data": stored, "dp_rank": dp_rank}
        await self.wire.say(EVENTS, msgspec.json.encode({"worker_id": worker_id, "event": event}))

    def rank(self, worker_id: int) -> DynamoRank:
        return next(rank for key, rank in self.relay.ranks if key.worker_id == str(worker_id))

    async def warned(self, worker_id: int, work: str) -> None:
        def telling() -> bool:
            heartbeats = self.wire.heartbeats(str(worker_id))
            return bool(heartbeats) and any(work in one for one in heartbeats[-1].warnings)

        await until(telling, f"a warning of {worker_id} about {work}")
        assert self.last(worker_id).warning_codes == ("relay_failing",)
        await self.beating(worker_id)

    async def beating(self, worker_id: int) -> None:
        count = len(self.wire.beats(str(worker_id)))
        await until(lambda: len(self.wire.beats(str(worker_id))) > count + 2, "beats")

    def last(self, worker_id: int) -> Heartbeat:
        return self.wire.heartbeats(str(worker_id))[-1]


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.001)
    monkeypatch.setattr(stream_publisher, "BEAT_S", 0.01)
    monkeypatch.setattr(stream_publisher, "HELLO_JITTER_S", 0.0)
    fleet = Fleet()
    await fleet.relay.start()
    for worker_id in (1, 2):
        await fleet.store(worker_id)
        await fleet.beating(worker_id)
    yield fleet
    await fleet.relay.stop()
    assert not fleet.wire.listeners


@errors
async def test_an_event_that_fails_empties_its_worker_alone(
    fleet: Fleet, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = fleet.rank(1)
    monkeypatch.setattr(rank, "on_event", failing_first(rank.on_event, error, times=1))
    await fleet.store(1)
    await fleet.warned(1, "events")
    assert fleet.wire.beats("1")[-1].blocks == 0
    assert not fleet.wire.beats("1")[-1].complete
    await fleet.store(2)
    await fleet.beating(2)
    assert fleet.wire.beats("2")[-1].blocks == 2
    assert not fleet.last(2).warning_codes


@errors
async def test_a_beat_or_heartbeat_that_fails_is_that_workers_alone(
    fleet: Fleet, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, heartbeat = fleet.rank(1), fleet.relay._heartbeat
    failing = failing_first(heartbeat, error)

    def heartbeats(worker: module._Worker, *args: Any) -> Heartbeat:
        of_1 = worker.key.worker_id == "1"
        return (failing if of_1 else heartbeat)(worker, *args)  # type: ignore[no-any-return]

    monkeypatch.setattr(rank, "beat", failing_first(rank.beat, error))
    monkeypatch.setattr(fleet.relay, "_heartbeat", heartbeats)
    await until(lambda: fleet.relay.failures["heartbeat"] == 3, "all failures")
    await until(lambda: fleet.relay.failures["beats"] == 3, "all failures")
    await fleet.beating(1)
    await fleet.beating(2)
    assert not fleet.last(2).warning_codes
    assert "relay_failing" in fleet.last(1).warning_codes


@errors
async def test_a_callback_that_fails_costs_its_message(
    fleet: Fleet, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "decode_dynamo", failing_first(module.decode_dynamo, error))
    for _ in range(4):
        await fleet.store(2)
    assert fleet.relay.failures == {"events": 3}
    await fleet.warned(1, "events")
    await fleet.warned(2, "events")


@errors
async def test_a_broker_that_raises_is_tried_again(fleet: Fleet, error: Exception) -> None:
    breaks = breaking(error)
    fleet.wire.on_publish = lambda _: breaks()
    await until(lambda: sum(fleet.relay.failures.values()) == 3, "all failures")
    await fleet.beating(1)
    await fleet.beating(2)


async def test_a_worker_has_several_ranks_for_as_long_as_one_above_0_is_there(
    fleet: Fleet,
) -> None:
    await fleet.store(1, dp_rank=1)
    await until(lambda: fleet.last(1).multi_rank, "a heartbeat with several ranks")
    assert not fleet.last(2).multi_rank
    removal = Control(v=1, id="x", action="remove", worker_id="1")
    await fleet.wire.say("kvroute.v1.f.control", encode(removal))
    assert {key.worker_id for key, _ in fleet.relay.ranks} == {"2"}
    assert not fleet.relay._higher_ranks
    await fleet.store(1)
    await until(lambda: not fleet.last(1).multi_rank, "a heartbeat with one rank")
