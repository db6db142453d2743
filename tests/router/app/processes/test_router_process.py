"""A router process that ends: the order in which its parts do."""

import pytest

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
