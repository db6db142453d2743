"""`kvroute gateway` as a process of its own."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from router.app.processes.gateway_process import GatewayApp
from router.config.keys import ConfigError, keys
from router.config.reading import load
from router.config.settings.configurations import GatewayConfig
from router.gateway.server.counters import OUTCOMES

PAGE = Path(__file__).parents[4] / "docs" / "gateway.md"


async def test_a_signal_ends_the_process_without_an_error() -> None:
    config = load(GatewayConfig, None, {}, {("gateway", "listen"): "127.0.0.1:0"})
    app = GatewayApp(config)
    running = asyncio.create_task(app.run())
    async with asyncio.timeout(60):
        while not app.gateway.port:  # noqa: ASYNC110  # it has no event of its start
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0


async def test_wrong_addresses_are_named() -> None:
    for path, text, key in (
        (("router",), "a b", "router"),
        (("gateway", "listen"), "nowhere", "listen"),
        (("gateway", "listen"), "0.0.0.0:80", "any_address"),
    ):
        with pytest.raises(ConfigError, match=key if key != "listen" else "nowhere"):
            GatewayApp(load(GatewayConfig, None, {}, {path: text}))


def test_the_page_has_the_keys_outcomes_and_metrics_of_the_program() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(OUTCOMES) <= set(re.findall(r"`(\w+)`", page))
    known = {key.dotted for key in keys(GatewayConfig)}
    assert set(re.findall(r"`(gateway\.\w+)`", page)) <= known


async def test_the_page_names_metrics_that_a_gateway_has() -> None:
    app = GatewayApp(load(GatewayConfig, None, {}, {("gateway", "listen"): "127.0.0.1:0"}))
    families = app.gateway.counters.registry.collect()
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if family.name.startswith("kvroute_gateway")
    }
    shown = set(re.findall(r"`(kvroute_gateway_\w+)", PAGE.read_text(encoding="utf-8")))
    assert shown
    assert shown <= exported
