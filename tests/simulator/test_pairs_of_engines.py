"""Engines with SGLang's HTTP: what a router reads of them, and prefill and decode apart."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from msgspec import structs

from events.engines.access import EngineAccess
from events.engines.pages.probe import Answer, Probe
from events.engines.sglang.pages import sglang_metrics
from kvroute.client import KvRouteClient
from simulator.cli.gateway import gateway_config, workers_ready
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig, Half
from simulator.live.rooms import WAIT_S, BootstrapServer, HandOverFailed, fetch
from simulator.live.run import live_engines
from simulator.live.stand_ins import StandIn, stand_ins
from simulator.schedulers.sglang.config import SglangConfig
from tests.stage.loopback import router_app
from tests.stage.waiting import DEADLINE_S

RECORDED = Path(__file__).parents[1] / "golden" / "sglang-0.5.23" / "server-single"
SCHEDULER = SglangConfig(block_count=512, block_size=16, max_num_seqs=32)
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello " * 200}],
    "max_tokens": 5,
}


def config(number: int, half: Half | None = None) -> EngineConfig:
    scheduler = replace(SCHEDULER, hash_seed=number, radix_cache=half != "decode")
    return EngineConfig(f"{half}-{number}", scheduler, "m", "sglang", half)


@asynccontextmanager
async def a_pair() -> AsyncIterator[tuple[StandIn, StandIn, aiohttp.ClientSession]]:
    configs = [config(1, "prefill"), config(2, "decode")]
    async with (
        stand_ins(configs, ScaledClock(100.0)) as (prefill, decode),
        aiohttp.ClientSession() as http,
    ):
        yield prefill, decode, http


async def post(
    http: aiohttp.ClientSession, engine: StandIn, **body: Any
) -> tuple[int, dict[str, Any]]:
    async with http.post(f"{engine.address}/v1/chat/completions", json=CHAT | body) as answer:
        return answer.status, await answer.json()


async def room(http: aiohttp.ClientSession, prefill: StandIn, number: int) -> dict[str, Any]:
    async with http.get(f"{prefill.address}/server_info") as answer:
        port = (await answer.json())["disaggregation_bootstrap_port"]
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": number}


async def test_a_router_reads_its_pages_as_sglangs() -> None:
    async with (
        stand_ins([config(1), config(2, "prefill")], ScaledClock(100.0)) as engines,
        aiohttp.ClientSession() as http,
    ):
        for engine, role in zip(engines, (None, "prefill"), strict=True):
            probe = Probe(http, "sglang", EngineAccess(engine.address))
            assert await probe.ask_identity() is Answer.USABLE
            assert await probe.ask_load() is Answer.USABLE
            assert not probe.trouble
            told = probe.identity
            assert told is not None
            assert (told.model, told.version, told.role) == ("m", "0.5.23", role)
            assert (told.block_size, told.total_blocks, told.total_slots) == (16, 512, 32)
            assert (told.bootstrap_port is None) == (role is None)
            assert (told.max_model_len, told.dp_ranks) == (8192, 1)
            load = probe.loads[0]
            assert (load.running, load.waiting, load.total_slots) == (0, 0, 32)
        async with http.get(f"{engines[0].address}/metrics") as answer:
            of_metrics = sglang_metrics(await answer.text())[0]
        assert (of_metrics.running, of_metrics.total_blocks) == (0, 512)


async def test_its_pages_have_no_field_that_sglangs_lack() -> None:
    async with (
        stand_ins([config(1)], ScaledClock(100.0)) as [engine],
        aiohttp.ClientSession(engine.address) as http,
    ):
        assert (await post(http, engine))[0] == 200
        for path, file in (
            ("/model_info", "model_info.json"),
            ("/v1/loads", "loads-under-load.json"),
        ):
            async with http.get(path) as answer:
                made = await answer.json()
            recorded = json.loads((RECORDED / file).read_text())
            if path == "/v1/loads":
                assert made.keys() <= recorded.keys()
                made, recorded = made["loads"][0], recorded["loads"][0]
            assert made.keys() <= recorded.keys()
        async with http.post("/flush_cache") as answer:
            assert answer.status == 200


async def test_both_halves_answer_once_they_meet_in_a_room() -> None:
    async with a_pair() as (prefill, decode, http):
        shared = await room(http, prefill, 7)
        (status, first), (other_status, second) = await asyncio.gather(
            post(http, prefill, **shared, **{"max_tokens": 1}), post(http, decode, **shared)
        )
        assert (status, other_status) == (200, 200)
        assert first["usage"]["completion_tokens"] == 1
        assert second["usage"]["completion_tokens"] == 5
        # The decode engine has computed none of the prompt, and publishes nothing.
        assert decode.engine.load().external_hit_tokens == second["usage"]["prompt_tokens"]
        assert prefill.publisher.next_sequence > 0
        assert decode.publisher.next_sequence == 0
        # The prompt is in the prefill engine's cache for the next one.
        again = await room(http, prefill, 8)
        (_, first), _ = await asyncio.gather(
            post(http, prefill, **again, **{"max_tokens": 1}), post(http, decode, **again)
        )
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


async def test_a_half_without_the_other_is_not_answered() -> None:
    async with a_pair() as (prefill, decode, http):
        for engine in (prefill, decode):
            status, body = await post(http, engine)
            assert status == 400
            assert "without bootstrap room" in body["error"]["message"]
        shared = await room(http, prefill, 7)
        alone = asyncio.create_task(post(http, prefill, **shared))
        other = shared | {"bootstrap_room": 8}
        apart = asyncio.create_task(post(http, decode, **other))
        # Two rooms: each half waits in its own, until the other one comes.
        assert (await post(http, decode, **shared))[0] == 200
        assert (await alone)[0] == 200
        assert not apart.done()
        status, body = await post(http, prefill, **other, **{"max_tokens": 100_000})
        assert status == 400
        assert (await apart)[0] == 500
        gone = shared | {"bootstrap_port": 1}
        status, body = await post(http, decode, **gone)
        assert status == 500
        assert "no prefill engine at 127.0.0.1:1" in body["error"]["message"]


async def test_many_prompts_that_are_waited_for_keep_no_other_waiting() -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        a_pair() as (prefill, decode, http),
        aiohttp.ClientSession(connector=connector) as many,
    ):
        shared = await room(http, prefill, 0)
        waiting = [
            asyncio.create_task(post(many, decode, **shared | {"bootstrap_room": number}))
            for number in range(101)
        ]
        last = shared | {"bootstrap_room": 100}
        assert (await post(many, prefill, **last, **{"max_tokens": 1}))[0] == 200
        assert (await waiting.pop())[0] == 200
        for task in waiting:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_half_waits_no_longer_than_its_limit() -> None:
    rooms = BootstrapServer(wait_s=0.0)
    await rooms.start("127.0.0.1", 0)
    try:
        with pytest.raises(HandOverFailed, match="no decode engine came to room 1"):
            async with rooms.prefilling(1):
                raise AssertionError("the other half is not there")
        async with aiohttp.ClientSession() as http:
            with pytest.raises(HandOverFailed, match="Gateway Timeout"):
                await fetch(http, "127.0.0.1", rooms.port, 2)
    finally:
        await rooms.stop()


async def test_a_decode_half_does_not_give_up_before_the_bootstrap_server_answers() -> None:
    patience_s: list[float] = []

    class Session:
        def post(self, url: str, timeout: aiohttp.ClientTimeout, **_: Any) -> None:
            patience_s.append(timeout.total or 0.0)
            raise aiohttp.ClientConnectionError("gone")

    with pytest.raises(HandOverFailed, match="no prefill engine at h:1: gone"):
        await fetch(cast(aiohttp.ClientSession, Session()), "h", 1, 2)
    assert patience_s[0] > WAIT_S


@asynccontextmanager
async def behind_a_gateway(
    folder: Path, revisions: Sequence[str] = ("v1",) * 4
) -> AsyncIterator[tuple[list[StandIn], KvRouteClient, aiohttp.ClientSession]]:
    """Two pairs of engines, each with a revision; clients of their router and of its gateway."""
    configs = [config(i, half) for i, half in enumerate(("prefill", "decode") * 2)]
    async with live_engines(configs, speed=100.0) as engines:
        settings = gateway_config(engines, "127.0.0.1:0", "127.0.0.1:0", folder / "socket")
        labelled = [
            structs.replace(worker, labels={"revision": revision})
            for worker, revision in zip(settings.workers, revisions, strict=True)
        ]
        settings = structs.replace(settings, workers=tuple(labelled))
        async with router_app(settings) as (router, client):
            await workers_ready(client, len(engines))
            base = f"http://127.0.0.1:{router.listeners.gateway_port}"
            async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(base) as http:
                yield engines, client, http


async def chat(http: aiohttp.ClientSession, **body: Any) -> tuple[str, Mapping[str, str]]:
    """The text and the headers of an answer, once the gateway has listed the workers."""
    while True:
        async with http.post("/v1/chat/completions", json=CHAT | body) as answer:
            if answer.status != 503:
                assert answer.status == 200, await answer.text()
                return await answer.text(), answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_served_by_a_pair_behind_the_gateway(tmp_path: Path, stream: bool) -> None:
    async with behind_a_gateway(tmp_path) as (engines, client, http):
        roles = {one.worker_id: one.role for one in await client.list_workers()}
        assert roles == {each.engine_id: each.engine.config.half for each in engines}
        text, headers = await chat(http, stream=stream)
        assert headers["X-Kvroute-Worker"].startswith("decode-")
        assert ("data: [DONE]" in text) is stream
        served = [each for each in engines if each.engine.load().finished]
        assert sorted(str(each.engine.config.half) for each in served) == ["decode", "prefill"]


async def test_pairs_are_of_one_revision_while_a_half_of_one_comes_and_goes(
    tmp_path: Path,
) -> None:
    """Two revisions, as in the middle of a rollout. The engines say who computed for whom."""
    versions = ("v1", "v1", "v2", "v2")
    async with behind_a_gateway(tmp_path, versions) as (engines, client, http):
        ids = [engine.engine_id for engine in engines]
        revisions = dict(zip(ids, versions, strict=True))

        async def pair_of(number: int) -> tuple[str, str]:
            _, headers = await chat(
                http, messages=[{"role": "user", "content": f"{number} " * 400}]
            )
            prefill, decode = (
                headers[name] for name in ("X-Kvroute-Prefill-Worker", "X-Kvroute-Worker")
            )
            return revisions[prefill], revisions[decode]

        both = [await pair_of(number) for number in range(24)]
        await client.drain_worker(ids[0])
        one = [await pair_of(number) for number in range(24, 32)]
        await client.undrain_worker(ids[0])
        back = [await pair_of(number) for number in range(32, 56)]
        assert set(both) == set(back) == {("v1", "v1"), ("v2", "v2")}
        assert set(one) == {("v2", "v2")}


async def test_an_engine_on_its_way_out_finishes_what_has_begun() -> None:
    async with (
        stand_ins([config(1)], ScaledClock(100.0)) as [engine],
        aiohttp.ClientSession(engine.address) as http,
    ):
        async with http.post(
            "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 300}
        ) as begun:
            await begun.content.readline()
            draining = asyncio.create_task(engine.api.drain(60.0))
            async with http.get("/health") as answer:
                while answer.status == 200:
                    async with http.get("/health") as answer:
                        pass
            assert (await post(http, engine))[0] == 503
            rest = await begun.text()
            assert rest.rstrip().endswith("data: [DONE]")
        await draining
        await engine.api.drain(0.0)
