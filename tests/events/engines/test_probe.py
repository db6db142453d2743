"""Asking an engine over HTTP: whole pages, bounded, and silence told as silence."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from events.engines.access import EngineAccess
from events.engines.pages import probe
from events.engines.pages.probe import DOCUMENT_BYTES_MAX, EngineHttp, EngineSilent, Probe

Serve = Callable[[str, web.Response], Awaitable[EngineHttp]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves one page, and gives an engine to ask for it."""
    runners: list[web.AppRunner] = []
    session = aiohttp.ClientSession()

    async def start(path: str, response: web.Response) -> EngineHttp:
        async def page(_request: web.Request) -> web.Response:
            return response

        app = web.Application()
        app.router.add_get(path, page)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        return EngineHttp(session, EngineAccess(f"http://{host}:{port}"))

    yield start
    await session.close()
    for runner in runners:
        await runner.cleanup()


async def test_a_page_of_many_packets_is_read_to_its_end(serve: Serve) -> None:
    body = bytes(range(256)) * 12_000
    engine = await serve("/metrics", web.Response(body=body))
    assert await engine.page("/metrics") == body


async def test_a_page_over_the_bound_is_no_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "DOCUMENT_BYTES_MAX", 1000)
    engine = await serve("/metrics", web.Response(body=bytes(1001)))
    with pytest.raises(EngineSilent, match="more than 1000 bytes"):
        await engine.page("/metrics")
    engine = await serve("/metrics", web.Response(body=bytes(1000)))
    assert len(await engine.page("/metrics")) == 1000
    assert DOCUMENT_BYTES_MAX >= 1 << 20


async def test_an_error_page_is_no_answer(serve: Serve) -> None:
    engine = await serve("/health", web.Response(status=503))
    with pytest.raises(EngineSilent, match="status 503"):
        await engine.page("/health")
    assert await engine.optional_page("/version") is None


async def test_an_engine_that_is_away_is_trouble_and_not_an_error() -> None:
    async with aiohttp.ClientSession() as session:
        asked = Probe(session, "vllm", EngineAccess("http://127.0.0.1:1/"))
        assert not await asked.ask_identity()
        assert asked.trouble.startswith("the engine's page /v1/models: ")
        assert not await asked.ask_load()
        assert asked.trouble.startswith("the engine's page /metrics: ")
        assert asked.identity is None


async def test_an_engine_that_takes_too_long_is_told_as_such() -> None:
    async def never(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/metrics", never)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        access = EngineAccess(str(server.make_url("")), timeout_s=0.01)
        engine = EngineHttp(session, access)
        with pytest.raises(EngineSilent, match=r"page /metrics: \w*TimeoutError$"):
            await engine.page("/metrics")


async def test_mooncakes_bootstrap_server_names_the_engine(serve: Serve) -> None:
    engine = await serve("/v1/models", web.json_response({"data": [{"id": "m"}]}))
    told = {"0": {"engine_id": "e7_dp0", "worker_addr": {"0": {"0": "tcp://10.0.0.7:3"}}}}
    bootstrap = await serve("/query", web.json_response(told))
    asked = Probe(engine.session, "vllm", engine.access, bootstrap.access.url(""))
    assert await asked.ask_mooncake()
    assert await asked.ask_identity()
    assert asked.identity is not None
    assert asked.identity.kv_engine_ids == {0: "e7_dp0"}


@pytest.mark.parametrize("engine_id", ["a\nb", "e" * 1025])
async def test_an_engine_id_that_no_heartbeat_takes_is_left_out(
    serve: Serve, engine_id: str
) -> None:
    bootstrap = await serve("/query", web.json_response({"0": {"engine_id": engine_id}}))
    asked = Probe(bootstrap.session, "vllm", bootstrap.access, bootstrap.access.url(""))
    assert not await asked.ask_mooncake()
    assert asked._kv_engine_ids == {}
    assert "/query" in asked.trouble


async def test_without_mooncakes_bootstrap_server_the_rest_is_known(serve: Serve) -> None:
    engine = await serve("/v1/models", web.json_response({"data": [{"id": "m"}]}))
    asked = Probe(engine.session, "vllm", engine.access, engine.access.url(""))
    assert not await asked.ask_mooncake()
    assert await asked.ask_identity()
    assert asked.identity is not None
    assert (asked.identity.model, asked.identity.kv_engine_ids) == ("m", {})
