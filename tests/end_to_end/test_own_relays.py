"""Relays that run in a router: what a caller registers ends nobody else, and ends."""

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq

from events.plane.settings import EngineSettings
from events.relay.relay import Relay
from router.children import own_relays
from router.children.own_relays import UNHEARD_S
from router.config.settings.fleet_settings import FleetSettings
from router.request.refusal import Reason, Refusal
from tests.stage.loopback import TurnedClock, a_stage, router_app, serve_config
from tests.stage.waiting import free_port, until

FAULTS = (
    zmq.ZMQError(22),
    UnicodeError("label too long"),
    OverflowError("int too large"),
    ValueError("a port"),
    OSError(28, "no space"),
    MemoryError(),
    RecursionError(),
    KeyError("k"),
    AssertionError(),
)


def an_engine(worker_id: str) -> EngineSettings:
    """One at whose addresses nobody answers."""
    return EngineSettings(
        id=worker_id,
        engine="vllm",
        address=f"http://127.0.0.1:{free_port()}",
        events=f"tcp://127.0.0.1:{free_port()}",
    )


@pytest.mark.parametrize("registered", [True, False])
async def test_a_relay_that_raises_anything_ends_itself_only(
    monkeypatch: pytest.MonkeyPatch, registered: bool
) -> None:
    faults = {f"w{i}": fault for i, fault in enumerate(FAULTS)}
    starts: list[str] = []
    real = Relay.start

    async def start(relay: Relay) -> None:
        worker_id = relay.settings.id
        starts.append(worker_id)
        if worker_id in faults and starts.count(worker_id) == 1:
            raise faults[worker_id]  # while it starts
        await real(relay)

    monkeypatch.setattr(Relay, "start", start)
    engines = [an_engine(worker_id) for worker_id in [*faults, "well"]]
    config = serve_config(None, workers=() if registered else tuple(engines))
    async with router_app(config) as (app, client):
        assert app.links.broker is not None
        if registered:
            await until(lambda: app.links.broker is not None and app.links.broker.connected, "NATS")
            for engine in engines:
                await app.register(engine)
        await until(
            lambda: all(starts.count(worker_id) >= 2 for worker_id in faults),
            "each failing relay to be started again",
        )
        await until(
            lambda: all(app.view.ranks(one.id) for one in engines), "heartbeats of all workers"
        )
        assert starts.count("well") == 1
        assert app.relays.failures == len(FAULTS)
        workers = {one.worker_id: one for one in await client.list_workers()}
        assert workers["well"].unschedulable_reason == "engine not answering"
        told = "; ".join(workers["w0"].warnings)
        assert "its relay in this router failed and starts again: ZMQError" in told
    # router_app asserts that the router did not end by itself


async def test_a_removal_at_any_replica_stops_the_relay_and_frees_the_id() -> None:
    loopback = FleetSettings(register_networks="127.0.0.0/8")
    async with a_stage(engine_count=1, fleet=loopback) as stage:
        await stage.relays["worker-0"].stop()
        engine = stage.engine("worker-0")
        register = partial(
            stage.client.register_worker,
            "registered",
            engine="vllm",
            address=engine.address,
            events=engine.events_endpoint,
            replay=engine.replay_endpoint,
        )
        relays = stage.router.relays
        async with router_app(serve_config(stage.nats.url)) as (there, client):
            await register()
            with pytest.raises(Refusal) as caught:
                relays.check_room("registered")
            assert caught.value.reason is Reason.WORKER_EXISTS
            await until(lambda: there.view.ranks("registered"), "the worker at both")
            (first,) = relays.running()
            assert await client.remove_worker("registered", tombstone_s=3600.0) == 1
            await until(lambda: "registered" not in relays, "the end of its relay")
            await until(lambda: not relays._closing, "its sockets closed")
            assert relays.ended == {"removed": 1}
            assert there.view.ranks("registered") == []
            await register()
            await until(lambda: relays.running(), "its second relay")
            assert relays.running() != [first]
            await until(lambda: there.view.ranks("registered"), "the worker once more, at both")
            await until(lambda: stage.router.view.ranks("registered"), "and here")


async def test_a_configured_workers_relay_is_stopped_by_its_removal() -> None:
    engine = an_engine("w0")
    async with router_app(serve_config(None, workers=(engine,))) as (app, client):
        await until(lambda: app.view.ranks("w0"), "the worker")
        await client.remove_worker("w0")
        assert len(app.relays) == 0
        assert app.relays.ended == {"removed": 1}


async def test_an_engine_is_not_registered_as_a_second_worker() -> None:
    async with router_app(serve_config(None)) as (app, _):
        await until(lambda: app.links.broker is not None and app.links.broker.connected, "NATS")
        first = an_engine("w0")
        await app.register(first)
        copied = msgspec.structs.replace(an_engine("w1"), address=first.address)
        with pytest.raises(Refusal, match="'w0'") as refused:
            await app.register(copied)
        assert (refused.value.reason, refused.value.metadata) == (
            Reason.INVALID_FIELD,
            {"field": "address"},
        )
        assert "w1" not in app.relays
        await app.register(an_engine("w1"))


async def test_a_removal_given_before_a_relay_began_does_not_stop_it() -> None:
    async with router_app(serve_config(None)) as (app, _):
        await until(lambda: app.links.broker is not None and app.links.broker.connected, "NATS")
        await app.register(an_engine("w0"))
        app.relays.on_removed("w0", app.clock() - 1.0)
        assert "w0" in app.relays
        app.relays.on_removed("w0", app.clock())
        assert "w0" not in app.relays


async def test_mistyped_engines_leave_room_for_others_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_relays, "RELAYS_MAX", 3)
    async with a_stage(engine_count=1) as stage:
        await stage.relays["worker-0"].stop()
        app, clock = stage.router, stage.clock
        engine = stage.engine("worker-0")
        await app.register(an_engine("typo-0"))
        await app.register(an_engine("typo-1"))
        await app.register(
            EngineSettings(
                id="right", engine="vllm", address=engine.address, events=engine.events_endpoint
            )
        )
        with pytest.raises(Refusal):
            app.relays.check_room("another")
        await until(lambda: any(one.heard for one in app.relays.running()), "the right one")
        clock.ahead_s += UNHEARD_S
        await until(lambda: len(app.relays) == 1, "the typos' end")
        assert "right" in app.relays
        assert app.relays.ended == {"never_answered": 2}
        app.relays.check_room("another")


async def test_a_lone_routers_drain_survives_its_restart(tmp_path: Path) -> None:
    fleet = FleetSettings(state_file=str(tmp_path / "state"))
    config = serve_config(None, workers=(an_engine("w0"),), fleet=fleet)
    async with router_app(config) as (app, client):
        await until(lambda: app.view.ranks("w0"), "the worker")
        await client.drain_worker("w0")
    async with router_app(config, TurnedClock()) as (app, client):
        await until(lambda: app.view.ranks("w0"), "the worker")
        (worker,) = await client.list_workers()
        assert worker.drained


async def test_the_routers_end_waits_for_a_relay_that_never_ends_only_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_relays, "STOP_S", 0.05)
    ended = asyncio.Event()

    async def stop(_relay: Relay) -> None:
        await ended.wait()

    async with router_app(serve_config(None, workers=(an_engine("w0"),))) as (app, _):
        await until(lambda: app.view.ranks("w0"), "the worker")
        monkeypatch.setattr(Relay, "stop", stop)
        (relay,) = app.relays.running()
        await asyncio.wait_for(app.relays.stop(), 60.0)
        assert "end of relay w0: not within 0.05 s" in caplog.text
        monkeypatch.undo()
        await relay.stop()
