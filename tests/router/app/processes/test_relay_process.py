"""The process of `kvroute relay`: when its relays start, that none starts while it ends, and that
it says at its start when its credentials allow more than it needs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from events.plane.permissions import Rights, of_relay, server_config
from events.plane.settings import DynamoSettings, EngineSettings, NatsSettings
from events.relay.dynamo.relay import DynamoRelay
from events.relay.relay import Relay
from router.app.processes.relay_process import RelayApp
from router.cluster.children.nats_server import NatsChild
from router.config.settings.configurations import RelayConfig
from router.config.settings.fleet_settings import FleetNameSettings
from router.config.settings.keys_settings import ReadEnginesSettings
from router.config.settings.serving_settings import MetricsSettings
from tests.stage.nats_server import nats_server
from tests.stage.waiting import free_port, until


@pytest.fixture
async def config() -> AsyncIterator[RelayConfig]:
    nats = NatsChild()
    await nats.start()
    engines = tuple(
        EngineSettings(id=name, engine="vllm", address=f"http://{name}") for name in ("a", "b")
    )
    try:
        yield RelayConfig(
            nats=NatsSettings(url=nats.url), metrics=MetricsSettings(listen=""), workers=engines
        )
    finally:
        await nats.stop()


def dynamo(name: str, nats_url: str | None) -> DynamoSettings:
    return DynamoSettings(
        id=name, subject=name, address="x", model="m", block_size=16, nats_url=nats_url
    )


async def test_a_dynamo_fleet_whose_nats_server_is_away_delays_no_other_relay(
    monkeypatch: pytest.MonkeyPatch, config: RelayConfig
) -> None:
    started: list[str] = []

    async def start(relay: Relay | DynamoRelay) -> None:
        started.append(relay.settings.id)

    monkeypatch.setattr(Relay, "start", start)
    monkeypatch.setattr(DynamoRelay, "start", start)
    away = f"nats://127.0.0.1:{free_port()}"
    fleets = [dynamo("away", away), dynamo("own", config.nats.url), dynamo("shared", None)]
    app = RelayApp(config, fleets)
    running = asyncio.create_task(app.run())
    await until(lambda: len(started) >= 4, "all relays but one")
    app._stop.set()
    assert await running == 0
    assert sorted(started) == ["a", "b", "own", "shared"]


async def test_no_relay_starts_while_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, config: RelayConfig
) -> None:
    happened: list[str] = []
    stopped = asyncio.Event()
    really_stop = Relay.stop

    async def start(relay: Relay) -> None:
        happened.append(f"start {relay.settings.id}")
        app._stop.set()
        await stopped.wait()

    async def stop(relay: Relay) -> None:
        happened.append(f"stop {relay.settings.id}")
        stopped.set()
        await really_stop(relay)

    monkeypatch.setattr(Relay, "start", start)
    monkeypatch.setattr(Relay, "stop", stop)
    app = RelayApp(config)
    assert await asyncio.wait_for(app.run(), 30.0) == 0
    assert happened == ["start a", "stop a", "stop b"]


async def test_its_relays_read_the_numbers_that_the_configuration_names(
    config: RelayConfig,
) -> None:
    async def metrics(_request: web.Request) -> web.Response:
        load = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
        return web.Response(text=load + "room_celsius 21\n")

    engine = web.Application()
    engine.router.add_get("/metrics", metrics)
    async with TestServer(engine) as server:
        worker = EngineSettings(id="w", engine="vllm", address=f"http://127.0.0.1:{server.port}")
        numbers = ReadEnginesSettings(numbers={"celsius": "room_celsius"})
        app = RelayApp(msgspec.structs.replace(config, workers=(worker,), engines=numbers))
        running = asyncio.create_task(app.run())
        (relay,) = app._relays
        await until(lambda: relay._shells[0].own_numbers == {"celsius": 21.0}, "the number")
        app._stop.set()
        assert await running == 0


@pytest.mark.parametrize("user", ["relay-a", "shared", "wide", None])
async def test_credentials_that_allow_more_are_named(
    user: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = "kvroute.v1.default"
    users = {
        "relay-a": of_relay("default", ["a"]),
        "shared": Rights(  # as in the chart
            (f"{base}.facts.*.*", f"{base}.load.*.*"),
            (f"{base}.snapshot.*.*", f"{base}.warm.*.*", f"{base}.hello"),
        ),
        "wide": Rights((">",), (">",)),
    }
    for name in ("RELAY_A", "SHARED", "WIDE"):
        monkeypatch.setenv(f"{name}_PASSWORD", "secret")
    rules = server_config("default", users) if user else ""
    async with nats_server(tmp_path, rules) as server:
        nats = NatsSettings(url=server.url, user=user, password=user and "secret")
        worker = EngineSettings(id="a", engine="vllm", address="http://127.0.0.1:9")
        app = RelayApp(RelayConfig(nats=nats, workers=(worker,), fleet=FleetNameSettings()))
        await app._broker.connect()
        with caplog.at_level(logging.INFO):
            await app._check_rights()
        for relay in app._all:
            await relay.stop()
        await app._broker.close()
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
    texts = [one.getMessage() for one in warnings if "allow more" in one.getMessage()]
    assert len(texts) == (user == "wide")
    shared = [one for one in caplog.records if "relays share the NATS user" in one.getMessage()]
    assert len(shared) == (user == "shared")
    for text in texts:
        assert "publish facts of other workers, " in text
        assert "drain and remove workers" in text
