"""Workers of a Dynamo fleet are known by any of their messages, before their first request too."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from events.plane.facts import Heartbeat
from events.plane.settings import DynamoSettings
from events.relay import stream_publisher
from events.relay.dynamo import relay as module
from events.relay.dynamo.relay import DynamoRelay
from kvroute.client.messages import pick
from tests.stage.waiting import until
from tests.stage.wire import Wire

GOLDEN = Path(__file__).parents[3] / "golden" / "dynamo-1.6.1" / "load.jsonl"
CAPTURED = [msgspec.json.decode(line) for line in GOLDEN.read_bytes().splitlines()]
BASE = "namespace.dynamo.component.backend.endpoint.generate"


class Stage:
    """A relay, its wire, and a clock that is turned by hand."""

    def __init__(self, subject: str = f"{BASE}.kv-events") -> None:
        self.now_s = 1000.0
        self.wire = Wire()
        settings = DynamoSettings(
            subject=subject,
            address="http://frontend/{worker_id}",
            model="m",
            block_size=16,
            total_blocks=1000,
            slots=64,
        )
        self.relay = DynamoRelay(
            settings, self.wire, fleet="f", clock=lambda: self.now_s, rng=random.Random(1)
        )

    async def say_captured(self, *, idle: bool = False) -> None:
        """idle: only what ranks without requests sent."""
        for one in CAPTURED:
            said = one["decoded"]["payload"].get("scheduled_requests", {"": 1})
            if not (idle and any(said.values())):
                await self.wire.say(one["subject"], bytes.fromhex(one["data"]))

    async def beat(self) -> dict[str, Heartbeat]:
        """The next heartbeat of each rank."""
        keys = [key for key, _ in self.relay.ranks]
        before = {key: len(self.wire.heartbeats(*key)) for key in keys}

        def beaten() -> bool:
            return all(len(self.wire.heartbeats(*key)) > before[key] + 1 for key in keys)

        await until(beaten, "a heartbeat of each rank")
        return {str(key): self.wire.heartbeats(*key)[-1] for key in keys}


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(stream_publisher, "BEAT_S", 0.01)
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    stage = Stage()
    await stage.relay.start()
    yield stage
    await stage.relay.stop()


RANKS = {
    f"{worker}/{rank}"
    for worker in ("3174583025616352320", "15329331346676883140")
    for rank in "01"
}


async def test_a_cold_fleet_is_known_before_its_first_event(stage: Stage) -> None:
    await stage.say_captured(idle=True)
    heartbeats = await stage.beat()
    assert set(heartbeats) == RANKS
    for name, heartbeat in heartbeats.items():
        assert heartbeat.address == f"http://frontend/{name.partition('/')[0]}"
        assert (heartbeat.running, heartbeat.waiting) == (0, 0)
        assert (heartbeat.total_blocks, heartbeat.total_slots) == (1000, 64)
        assert heartbeat.sampled_at_s == stage.now_s
        assert heartbeat.labels[pick.INSTANCE_LABEL] == name.partition("/")[0]
        assert heartbeat.healthy
        assert heartbeat.multi_rank
        assert heartbeat.warnings == ()


async def test_running_and_waiting_requests_are_those_of_the_last_pass(stage: Stage) -> None:
    await stage.say_captured()
    last: dict[str, tuple[int, int]] = {}
    for one in CAPTURED:
        said = one["decoded"]["payload"]
        if "scheduled_requests" in said:
            last[f"{said['worker_id']}/{said['dp_rank']}"] = (
                sum(said["scheduled_requests"][f"num_{half}_requests"] for half in HALVES),
                sum(said["queued_requests"][f"num_{half}_requests"] for half in HALVES),
            )
    assert {running for running, _ in last.values()} == {0, 1}
    heartbeats = await stage.beat()
    assert {name: (one.running, one.waiting) for name, one in heartbeats.items()} == last


HALVES = ("prefill", "decode")


async def test_an_idle_fleet_is_never_lost_and_one_that_is_gone_is(stage: Stage) -> None:
    timeout_s = stage.relay.settings.worker_timeout_s
    await stage.say_captured(idle=True)
    for _ in range(4):
        stage.now_s += timeout_s - 1
        await stage.say_captured(idle=True)
        heartbeats = await stage.beat()
        assert set(heartbeats) == RANKS
        assert all(one.warnings == () for one in heartbeats.values())
    stage.now_s += timeout_s + 1
    await until(lambda: not stage.relay.ranks, "the streams' end")
    assert stage.relay.counts["worker_timeout"] == len(RANKS)


async def test_a_worker_without_passes_warns_of_what_it_costs(stage: Stage) -> None:
    (load,) = [one for one in CAPTURED if one["subject"].endswith("kv_metrics")]
    for _ in range(2):
        await stage.wire.say(load["subject"], bytes.fromhex(load["data"]))
        stage.now_s += module.QUIET_S - 1
    (heartbeat,) = (await stage.beat()).values()
    assert heartbeat.used_blocks == load["decoded"]["payload"]["kv_used_blocks"]
    assert all(not rank.complete for _, rank in stage.relay.ranks), "what it holds is not known"
    (warning,) = heartbeat.warnings
    assert "DYN_FORWARDPASS_METRIC_PORT" in warning
    await stage.say_captured(idle=True)
    assert all(one.warnings == () for one in (await stage.beat()).values())


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (f"{BASE}.kv-events", {f"{BASE}.kv_metrics", f"{BASE}.forward-pass-metrics"}),
        (
            "namespace.*.component.*.endpoint.*.kv-events",
            {
                "namespace.*.component.*.endpoint.*.kv_metrics",
                "namespace.*.component.*.endpoint.*.forward-pass-metrics",
            },
        ),
        ("namespace.dynamo.>", set()),  # has them already
    ],
)
async def test_the_subjects_of_load_are_beside_that_of_the_events(
    subject: str, expected: set[str]
) -> None:
    stage = Stage(subject)
    await stage.relay.start()
    try:
        heard = {one.subject for one, _ in stage.wire.listeners} - {subject}
        assert {one for one in heard if not one.startswith("kvroute.")} == expected
        if not expected:
            await stage.say_captured(idle=True)
            assert {str(key) for key, _ in stage.relay.ranks} == RANKS
    finally:
        await stage.relay.stop()
