"""A relay says at its start when its credentials allow more than it needs: a warning for those that
allow fleet commands."""

import logging
from pathlib import Path

import pytest

from events.plane.permissions import Rights, of_relay, server_config
from events.plane.settings import EngineSettings, NatsSettings
from router.app.processes.relay_process import RelayApp
from router.config.settings.configurations import RelayConfig
from router.config.settings.fleet_settings import FleetNameSettings
from tests.stage.nats_server import nats_server


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
