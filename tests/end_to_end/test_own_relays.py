"""Relays that run in a router: what a caller registers ends nobody else, and ends."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from events.plane.settings import EngineSettings
from router.app.processes.router_process import RouterApp
from router.cluster.children import own_relays, relay_process
from router.cluster.children.own_relays import UNHEARD_S
from router.config.settings.fleet_settings import FleetSettings
from router.config.settings.keys_settings import ReadEnginesSettings
from router.request.refusal import Reason, Refusal
from tests.end_to_end.odd_relay_child import FAULTS
from tests.stage.loopback import BLOCK_SIZE, TurnedClock, a_stage, router_app, serve_config
from tests.stage.programs import KVROUTE, running
from tests.stage.waiting import free_port, until

ODD_CHILD = (sys.executable, "-m", "tests.end_to_end.odd_relay_child")


def an_engine(worker_id: str) -> EngineSettings:
    """One at whose addresses nobody answers."""
    return EngineSettings(
        id=worker_id,
        engine="vllm",
        address=f"http://127.0.0.1:{free_port()}",
        events=f"tcp://127.0.0.1:{free_port()}",
    )


async def connected(app: RouterApp) -> None:
    await until(lambda: app.links.broker is not None and app.links.broker.connected, "NATS")


@pytest.mark.parametrize("registered", [True, False])
async def test_a_relay_that_raises_anything_ends_itself_only(
    monkeypatch: pytest.MonkeyPatch, registered: bool
) -> None:
    monkeypatch.setattr(own_relays, "PROGRAM", (*ODD_CHILD, "raising"))
    engines = [an_engine(worker_id) for worker_id in [*(f"w{i}" for i in range(9)), "well"]]
    assert len(engines) == len(FAULTS) + 1
    config = serve_config(None, workers=() if registered else tuple(engines))
    async with router_app(config) as (app, client):
        if registered:
            await connected(app)
            for engine in engines:
                await app.register(engine)
        await until(
            lambda: all(app.view.ranks(one.id) for one in engines), "heartbeats of all workers"
        )
        assert app.relays.failures == len(FAULTS)
        assert not app.relays.trouble("well")
        workers = {one.worker_id: one for one in await client.list_workers()}
        assert workers["well"].unschedulable_reason == "engine not answering"
        shown = "; ".join(workers["w0"].warnings)
        assert "its relay in this router failed and starts again: RelayFailed: ZMQError" in shown
    # router_app asserts that the router did not end by itself


async def test_a_relay_that_is_stopped_before_its_process_is_there_frees_its_id() -> None:
    async with router_app(serve_config(None)) as (app, _):
        await connected(app)
        for _ in range(3):
            await app.register(an_engine("w"))
            await until(lambda: app.relays.pid is not None, "the child's start")
            app.relays.leave("w", "removed")
        await until(lambda: not app.relays._closing, "the ends of all three")
        await app.register(an_engine("w"))
        await until(lambda: app.relays.epoch("w"), "a relay that runs")


async def test_a_child_that_says_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = (sys.executable, "-c", "import time; time.sleep(3600)")
    monkeypatch.setattr(own_relays, "PROGRAM", hangs)
    monkeypatch.setattr(relay_process, "SILENT_S", 0.1)
    async with router_app(serve_config(None, workers=(an_engine("w"),))) as (app, _):
        await until(lambda: "ended with code -9" in app.relays.trouble("w"), "the child's end")
        assert app.relays.failures >= 1


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
            await until(lambda: relays.epoch("registered"), "the state of its relay")
            first = relays.epoch("registered")
            assert await client.remove_worker("registered", tombstone_s=3600.0) == 1
            await until(lambda: "registered" not in relays, "the end of its relay")
            await until(lambda: not relays._closing, "its sockets closed")
            assert relays.ended == {"removed": 1}
            assert there.view.ranks("registered") == []
            await register()
            await until(lambda: relays.epoch("registered") not in (None, first), "its second relay")
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
        await connected(app)
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
        await connected(app)
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
        await until(lambda: app.relays._kept["right"].answered, "the right one")
        clock.ahead_s += UNHEARD_S
        await until(lambda: len(app.relays) == 1, "the typos' end")
        assert "right" in app.relays
        assert app.relays.ended == {"never_answered": 2}
        app.relays.check_room("another")


async def test_own_numbers_come_from_the_page_of_an_engine_to_its_worker() -> None:
    numbers = {"waits": "vllm:num_requests_waiting", "none": "no_such_metric"}
    async with a_stage(engine_count=1, engines=ReadEnginesSettings(numbers=numbers)) as stage:
        await stage.relays["worker-0"].stop()  # it was given no numbers
        engine, view = stage.engine("worker-0"), stage.router.view
        own = EngineSettings(id="own", engine="vllm", address=engine.address)
        await stage.router.register(own)

        def known() -> set[str]:
            heartbeats = [source.heartbeat for source in view.sources.values()]
            return {name for each in heartbeats if each is not None for name in each.own_numbers}

        await until(lambda: known() == {"waits"}, "its number")
        workers = {each.worker_id: each for each in await stage.client.list_workers()}
        assert workers["own"].numbers["waits"] == 0.0


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
    monkeypatch.setattr(own_relays, "PROGRAM", (*ODD_CHILD, "endless"))
    monkeypatch.setattr(own_relays, "STOP_S", 0.05)
    monkeypatch.setattr(relay_process, "END_S", 0.05)
    async with router_app(serve_config(None, workers=(an_engine("w0"),))) as (app, _):
        await until(lambda: app.view.ranks("w0"), "the worker")
        pid = app.relays.pid
    assert "end of relay w0: not within 0.05 s" in caplog.text
    assert pid is not None
    assert not runs(pid)


def beats(app: RouterApp, worker_id: str) -> bool:
    """Whether the heartbeats of the relay that runs in the child come."""
    epoch = app.relays.epoch(worker_id)
    found = [source.heartbeat for source in app.view.ranks(worker_id)]
    return any(one is not None and one.epoch == epoch for one in found)


def runs(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


def relay_child_of(pid: int) -> int | None:
    """The process that runs a router's relays; None: there is none yet."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"router.app.programs.relay_child" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


async def test_a_child_that_is_killed_is_followed_by_another_with_the_same_relays() -> None:
    engines = (an_engine("w0"), an_engine("w1"))
    async with router_app(serve_config(None, workers=engines)) as (app, client):
        await until(lambda: all(app.relays.epoch(one.id) for one in engines), "both relays")
        before = {one.id: app.relays.epoch(one.id) for one in engines}
        first = app.relays.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(
            lambda: all(app.relays.epoch(one.id) not in (None, before[one.id]) for one in engines),
            "both relays once more",
        )
        assert app.relays.pid != first
        assert app.relays.failures == 2
        for engine in engines:
            await until(lambda worker_id=engine.id: beats(app, worker_id), "its heartbeat")
        workers = await client.list_workers()
        assert all(
            "the process of this router's relays ended with code -9" in "; ".join(one.warnings)
            for one in workers
        )


async def test_the_child_ends_with_a_router_that_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text(
        "grpc: {listen: '127.0.0.1:0'}\nmetrics: {listen: ''}\n"
        "workers: [{id: w0, engine: vllm, address: 'http://127.0.0.1:1'}]\n"
    )
    async with running(*KVROUTE, "serve", "--config", str(config)) as router:
        await until(lambda: relay_child_of(router.pid), "the child")
        pid = relay_child_of(router.pid)
        router.kill()
        await router.wait()
        await until(lambda: not runs(pid), "the child's end")


async def test_the_childs_counts_are_metrics_of_the_router() -> None:
    async with a_stage(engine_count=1) as stage:
        await stage.relays["worker-0"].stop()
        app, engine = stage.router, stage.engine("worker-0")
        await app.register(
            EngineSettings(
                id="w", engine="vllm", address=engine.address, events=engine.events_endpoint
            )
        )
        labels = {"worker": "w", "rank": "0"}
        value = app.registry.get_sample_value
        await until(
            lambda: value("kvroute_relay_ledger_entries", labels) is not None, "the relay's counts"
        )
        await engine.engine.complete(list(range(3 * BLOCK_SIZE)), 1)
        await until(lambda: value("kvroute_relay_ledger_entries", labels) == 3, "its blocks")
        stored = {**labels, "kind": "BlocksStored"}
        assert (value("kvroute_relay_events_total", stored) or 0) >= 1
        assert value("kvroute_broker_connected") == 1
