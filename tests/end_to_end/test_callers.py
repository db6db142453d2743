"""What callers see of workers that fail and of routers that are gone: nothing."""

import asyncio
import random
import signal
from collections import Counter

import aiohttp
import pytest
from aiohttp import web

from kvroute.client import KvRouteClient, cached_tokens
from router.cluster.children.process import end
from simulator.live.http_api import Form, HttpApi
from tests.stage.loopback import a_prompt, a_stage, router_process
from tests.stage.waiting import free_port, until

FIRST_BYTE_S = 3.0
"""After which an engine counts as hung; far above what a well one takes on a busy machine."""


async def ask(
    client: KvRouteClient, http: aiohttp.ClientSession, tokens: list[int]
) -> tuple[str, bool]:
    """A request as a gateway makes it; the worker that served it, and if the client picked it."""
    body = {"model": "stand-in", "prompt": tokens, "max_tokens": 2}
    async for attempt in client.attempts(token_ids=tokens):
        async with attempt as request:
            pick = request.pick
            url = f"{pick.address}/v1/completions"
            async with asyncio.timeout(FIRST_BYTE_S), http.post(url, json=body) as answer:
                answer.raise_for_status()
                usage = (await answer.json())["usage"]
            await request.prefill_done()
            request.output_tokens = usage["completion_tokens"]
            request.cached_tokens = cached_tokens(usage, details_enabled=True)
            return pick.worker_id, pick.fallback
    raise AssertionError("attempts ended without an answer or an error")


async def test_attempts_hide_an_engine_that_fails_and_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(1)
    met: Counter[str] = Counter()
    serve = HttpApi._answer

    async def answer(api: HttpApi, form: Form, request: web.Request) -> web.StreamResponse:
        worker_id = api._engine.config.engine_id
        met[worker_id] += 1
        if worker_id == "worker-0" and met[worker_id] % 2:
            raise web.HTTPInternalServerError
        if worker_id == "worker-1":
            await asyncio.Event().wait()
        return await serve(api, form, request)

    monkeypatch.setattr(HttpApi, "_answer", answer)
    async with a_stage(engine_count=4) as stage, aiohttp.ClientSession() as http:
        client = stage.client
        served = await asyncio.gather(*(ask(client, http, a_prompt(rng)) for _ in range(40)))
        assert met["worker-0"] > 0
        assert met["worker-1"] > 0, "or this shows nothing"
        assert "worker-1" not in {worker_id for worker_id, _ in served}
        assert client.counts["retries"] >= met["worker-1"]
        await until(lambda: len(stage.router.core.reservations) == 0, "no reservation left")


async def _served_by_a_router(
    client: KvRouteClient, http: aiohttp.ClientSession, rng: random.Random
) -> None:
    async with asyncio.timeout(60.0):
        while (await ask(client, http, a_prompt(rng)))[1]:
            pass


async def test_with_all_routers_killed_the_client_goes_on_until_one_is_back() -> None:
    rng = random.Random(2)
    port = free_port()
    async with a_stage(engine_count=4) as stage, aiohttp.ClientSession() as http:
        process = await router_process(stage.nats.url, f"127.0.0.1:{port}")
        try:
            async with KvRouteClient(f"127.0.0.1:{port}", rng=rng) as client:
                await client.wait_ready(60.0)
                await _served_by_a_router(client, http, rng)
                assert (await ask(client, http, a_prompt(rng)))[1] is False
                await until(lambda: client.counts["worker_lists"], "a list of workers")
                process.kill()
                await process.wait()
                served = await asyncio.gather(
                    *(ask(client, http, a_prompt(rng)) for _ in range(24))
                )
                assert all(fallback for _, fallback in served)
                assert len({worker_id for worker_id, _ in served}) == 4
                process = await router_process(stage.nats.url, f"127.0.0.1:{port}")
                await _served_by_a_router(client, http, rng)
                assert client.counts["outages"] == 1
        finally:
            await end(process)


async def test_with_the_only_router_stopped_the_client_goes_on_until_it_is_continued() -> None:
    """SIGSTOP: the kernel accepts and acknowledges everything, and nothing is answered."""
    rng = random.Random(3)
    port = free_port()
    async with a_stage(engine_count=4) as stage, aiohttp.ClientSession() as http:
        process = await router_process(stage.nats.url, f"127.0.0.1:{port}")
        try:
            settings = {"silent_s": 1.0, "timeout_s": 60.0}
            async with KvRouteClient(f"127.0.0.1:{port}", rng=rng, **settings) as client:
                await client.wait_ready(60.0)
                await _served_by_a_router(client, http, rng)
                assert (await ask(client, http, a_prompt(rng)))[1] is False
                await until(lambda: client.counts["worker_lists"], "a list of workers")
                process.send_signal(signal.SIGSTOP)
                for _ in range(2):  # those that are open as it goes silent, and later ones
                    asked = (ask(client, http, a_prompt(rng)) for _ in range(12))
                    assert all(fallback for _, fallback in await asyncio.gather(*asked))
                assert client.counts["picks_moved"]
                process.send_signal(signal.SIGCONT)
                await _served_by_a_router(client, http, rng)
                assert client.counts["silences_over"]
        finally:
            process.send_signal(signal.SIGCONT)
            await end(process)
