"""A router process that starts and ends: the order in which its parts do."""

from typing import Any

import msgspec
import pytest

from router.app.processes.router_process import RouterApp
from router.config.settings.configurations import ServeConfig
from router.config.settings.routing_settings import HotPrefixSettings, RoutingSettings
from tests.stage.loopback import router_app, serve_config
from tests.stage.waiting import until


async def test_what_starts_relays_and_copies_has_ended_before_they_are_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with router_app(serve_config(None)) as (app, _):
        await until(lambda: app.links.broker is not None and app.links.broker.connected, "NATS")
        running = app._tasks._running
        left: list[int] = []
        stop = app.relays.stop

        async def relays_stop() -> None:
            left.append(len(running))
            await stop()

        monkeypatch.setattr(app.relays, "stop", relays_stop)
        assert running
    assert left == [0]


async def test_a_reload_during_the_start_stays_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    base = serve_config("nats://127.0.0.1:1")
    on = RoutingSettings(hot_prefixes=HotPrefixSettings(enabled=True))
    read = msgspec.structs.replace(base, routing=on)
    app = RouterApp(base, read_again=lambda: read)
    open_links = app.links.open

    async def reloaded_meanwhile(*about: Any) -> Any:
        await app.reload()
        return await open_links(*about)

    use, shadow = app.watchers.use, msgspec.structs.replace(on, shadow_policy="round-robin")
    first = msgspec.structs.replace(base, routing=shadow)

    async def waits_for_the_disk(config: ServeConfig) -> None:
        await use(config)
        if config is first:
            await app.reload()
            await use(config)  # the start's comes back last

    monkeypatch.setattr(app.links, "open", reloaded_meanwhile)
    monkeypatch.setattr(app.watchers, "use", waits_for_the_disk)
    app.config = first
    try:
        await app.start()
        assert app.watchers.shadow is None
        assert app.config.routing.hot_prefixes.enabled
        assert app.links.hot.enabled
        assert app.links.copies is not None
    finally:
        await app.stop()
