"""Pairs: a prefill worker and a decode worker for one request, as vLLM and SGLang want it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.fleet.reservations.reservations import Ending
from tests.router.gateway.server.test_gateway import BODY, CHAT, DONE, EVENTS, LAST, USAGE, WHOLE
from tests.stage.gateway import Stage, Worker, a_gateway, answering, begun, silent, streaming
from tests.stage.raw_engine import RawEngine

LONG = {**BODY, "messages": [{"role": "user", "content": "hello " * 4000}]}
HANDED: dict[str, Any] = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
PREFILLED = b'{"usage":%s,"kv_transfer_params":%s}' % (USAGE, json.dumps(HANDED).encode())


VLLM: dict[str, Any] = {"engine": "vllm", "kv_connector": "NixlConnector"}
SGLANG: dict[str, Any] = {"engine": "sglang", "bootstrap_port": 8998}


@asynccontextmanager
async def paired(
    prefill: Worker | RawEngine, decode: Worker, about: dict[str, Any], **settings: Any
) -> AsyncIterator[Stage]:
    """A gateway before these two workers. about: both."""
    async with prefill.run(), decode.run(), a_gateway(**settings) as stage:
        stage.add("p", prefill.address, role="prefill", max_model_len=100_000, **about)
        stage.add("d", decode.address, role="decode", max_model_len=100_000, **about)
        await stage.gateway.roster.refresh()
        yield stage


async def test_vllms_prefill_worker_answers_first_and_hands_over() -> None:
    prefill, decode = Worker(answering(PREFILLED)), Worker(streaming(*EVENTS, LAST, DONE))
    async with paired(prefill, decode, VLLM) as stage:
        body = {**LONG, "stream": True, "max_tokens": 50}
        answer = await stage.ask(CHAT, body, headers={"X-Request-Id": "mine"})
        assert answer.body == b"".join([*EVENTS, DONE])
        assert answer.headers["X-Request-Id"] == "mine"
        first, second = json.loads(prefill.bodies[0]), json.loads(decode.bodies[0])
        assert (first["n"], first["max_tokens"], first["stream"]) == (1, 1, False)
        assert not {"stream_options", "stop", "best_of"} & first.keys()
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert second["kv_transfer_params"] == HANDED
        assert (second["max_tokens"], second["stream"]) == (50, True)
        assert second["messages"] == LONG["messages"]
        ids = {worker.requests[0].headers["X-Request-Id"] for worker in (prefill, decode)}
        assert len(ids) == 1, "by which the two halves meet"
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})
        assert stage.sample("kvroute_gateway_sent_total", kind="pair", engine="vllm") == 1


async def test_a_prefill_worker_that_fails_is_replaced_and_blamed() -> None:
    broken, decode = Worker(answering(b"{}", 500)), Worker(answering(WHOLE))
    async with paired(broken, decode, VLLM) as stage:
        assert (await stage.ask(CHAT, LONG)).status == 500, "there is no other prefill worker"
        assert not decode.bodies
        outcomes = stage.served.fleet.core.fleet.outcomes_of
        keys = {key.worker_id: key for key in stage.served.fleet.relays}
        await stage.until(lambda: bool(outcomes(keys["p"])))
        assert not outcomes(keys["d"])


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
async def test_a_prefill_worker_that_does_not_answer_in_time_is_silent(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gateway.server.attempt.PREFILL_TIMEOUT_S", 0.1)
    async with paired(Worker(silent), Worker(silent), engine) as stage:
        answer = await stage.ask(CHAT, LONG)
        assert (answer.status, answer.error["code"]) == (504, "WORKER_SILENT")
        await stage.until(lambda: stage.endings == {Ending.FAILED_TIMEOUT: 1})
        outcomes = stage.served.fleet.core.fleet.outcomes_of
        keys = {key.worker_id: key for key in stage.served.fleet.relays}
        assert outcomes(keys["p"])
        assert not outcomes(keys["d"])


async def test_a_clients_mistake_comes_back_from_the_prefill_worker() -> None:
    prefill, decode = Worker(answering(b'{"error":"bad"}', 400)), Worker(answering(WHOLE))
    async with paired(prefill, decode, VLLM) as stage:
        answer = await stage.ask(CHAT, LONG)
        assert (answer.status, answer.body) == (400, b'{"error":"bad"}')
        assert not decode.bodies
        await stage.until(lambda: stage.endings == {Ending.FAILED_CLIENT: 1})


async def test_sglangs_workers_get_the_request_at_once() -> None:
    both = asyncio.Barrier(2)

    async def meets(request: web.Request, _: bytes) -> web.StreamResponse:
        await both.wait()
        return web.Response(body=WHOLE, headers={"Content-Type": "application/json"})

    prefill, decode = Worker(meets), Worker(meets)
    async with paired(prefill, decode, SGLANG) as stage:
        assert (await stage.ask(CHAT, LONG)).body == WHOLE
        first, second = json.loads(prefill.bodies[0]), json.loads(decode.bodies[0])
        for sent in (first, second):
            assert sent["bootstrap_port"] == 8998
        assert first["bootstrap_room"] == second["bootstrap_room"]
        assert (first["n"], first["max_tokens"], first["ignore_eos"]) == (1, 1, True)
        assert second.keys() - LONG.keys() == {"bootstrap_host", "bootstrap_port", "bootstrap_room"}
        assert first["messages"] == LONG["messages"]
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})


async def test_an_sglang_prefill_worker_that_fails_ends_the_decode_workers_request() -> None:
    prefill, decode = Worker(answering(b"{}", 503)), Worker(silent)
    async with paired(prefill, decode, SGLANG) as stage:
        assert (await stage.ask(CHAT, LONG)).status == 503
        await stage.until(lambda: decode.left == len(decode.bodies))


async def test_a_prefill_worker_that_fails_late_does_not_have_bytes_sent_twice() -> None:
    began, failed = asyncio.Event(), asyncio.Event()

    async def fails(request: web.Request, _: bytes) -> web.StreamResponse:
        await began.wait()
        return web.Response(status=503)

    async def serves(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request, b": no token yet\n\n")
        await failed.wait()
        await response.write(EVENTS[0] + DONE)
        return response

    prefill, decode = Worker(fails), Worker(serves)
    async with paired(prefill, decode, SGLANG) as stage:
        async with stage.post(CHAT, {**LONG, "stream": True}) as answer:
            got = await answer.content.readany()
            began.set()
            await stage.until(lambda: len(prefill.bodies) == 1)
            failed.set()
            assert got + await answer.content.read() == b": no token yet\n\n" + EVENTS[0] + DONE
        assert len(decode.bodies) == 1


async def test_vllm_serves_messages_and_responses_in_pairs_too() -> None:
    prefill, decode = Worker(answering(PREFILLED)), Worker(answering(b"{}"))
    async with paired(prefill, decode, VLLM) as stage:
        messages = {**LONG, "max_tokens": 50, "stream": False}
        assert (await stage.ask("/v1/messages", messages)).status == 200
        response = {"model": "m", "input": "hello " * 4000, "max_output_tokens": 50}
        assert (await stage.ask("/v1/responses", response)).status == 200
        paths = ["/v1/messages", "/v1/responses"]
        for worker in (prefill, decode):
            assert [request.path for request in worker.requests] == paths
        of_prefill = [json.loads(body) for body in prefill.bodies]
        of_decode = [json.loads(body) for body in decode.bodies]
        assert [body["kv_transfer_params"] for body in of_decode] == [HANDED, HANDED]
        assert (of_prefill[0]["max_tokens"], of_decode[0]["max_tokens"]) == (1, 50)
        assert (of_prefill[1]["max_output_tokens"], of_decode[1]["max_output_tokens"]) == (1, 50)
        assert (of_prefill[1]["store"], "store" in of_decode[1]) == (False, False)
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 2})
        assert stage.sample("kvroute_gateway_sent_total", kind="pair", engine="vllm") == 2


async def test_sglang_serves_responses_in_pairs_and_messages_are_refused_clearly() -> None:
    prefill, decode = Worker(answering(WHOLE)), Worker(answering(WHOLE))
    async with paired(prefill, decode, SGLANG) as stage:
        assert (
            await stage.ask("/v1/responses", {"model": "m", "input": "hello " * 4000})
        ).status == 200
        assert json.loads(decode.bodies[0])["bootstrap_port"] == 8998
        for path, more in (("/v1/messages", {}), ("/v1/responses", {"background": True})):
            answer = await stage.ask(path, {**LONG, **more})
            assert answer.status == 501
            assert answer.headers["X-Kvroute-Reason"] == "PAIR_UNSUPPORTED"
        assert len(decode.bodies) == 1
        await stage.until(lambda: stage.open == 0)
