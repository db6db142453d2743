"""The gateway inside a router, with real NATS, relays and stand-in engines behind it."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from router.config.settings.gateway_settings import GatewaySettings
from tests.stage.loopback import a_stage
from tests.stage.waiting import until

INSIDE = GatewaySettings(listen="127.0.0.1:0", answer_headers=True)
BODY: dict[str, Any] = {
    "model": "stand-in",
    "messages": [{"role": "user", "content": "hello " * 100}],
    "max_tokens": 20,
}


async def test_chats_through_a_routers_own_gateway_are_answered_and_reported() -> None:
    async with a_stage(gateway=INSIDE) as stage, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{stage.router.listeners.gateway_port}/v1/chat/completions"
        async with http.post(url, json=BODY) as answer:
            assert answer.status == 200
            assert answer.headers["X-Kvroute-Worker"] in stage.relays
            assert (await answer.json())["usage"]["completion_tokens"] == 20
        async with http.post(url, json=BODY | {"stream": True}) as answer:
            events = (await answer.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(event[6:])["choices"] for event in events[:-2])
        core = stage.router.core
        await until(lambda: not len(core.reservations), "both reports")
        assert sum(core.endings.values()) == 2


async def test_an_engine_that_ends_in_mid_stream_is_seen_by_client_and_router() -> None:
    async with a_stage(1, speed=1.0, gateway=INSIDE) as stage, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{stage.router.listeners.gateway_port}/v1/chat/completions"
        got = b""
        async with http.post(url, json=BODY | {"stream": True, "max_tokens": 5000}) as answer:
            got += await answer.content.readany()
            stage.engine("worker-0").engine.stop()
            try:
                async for chunk in answer.content.iter_any():
                    got += chunk
            except aiohttp.ClientPayloadError:
                pass
            else:
                pytest.fail("the stream ended as if it were whole")
        assert json.loads(got.rsplit(b"data: ", 1)[1])["error"]["code"] == "WORKER_FAILED"
        await until(lambda: not len(stage.router.core.reservations), "the report")


async def test_a_client_that_leaves_ends_the_engines_work() -> None:
    async with a_stage(1, speed=1.0, gateway=INSIDE) as stage, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{stage.router.listeners.gateway_port}/v1/chat/completions"
        engine = stage.engine("worker-0").engine
        async with http.post(url, json=BODY | {"stream": True, "max_tokens": 5000}) as answer:
            await answer.content.readany()
            assert engine.load().running == 1
            answer.close()
        async with asyncio.timeout(60):
            await until(lambda: engine.load().running == 0, "the engine's end of the request")
        await until(lambda: not len(stage.router.core.reservations), "the report")
