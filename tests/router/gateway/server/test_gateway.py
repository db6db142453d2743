"""Requests through the gateway: bytes, reports, retries, limits, over real sockets."""

import asyncio
import gc
import json
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvroute.client import Attempts, KvRouteClient, NoWorker, RoutedRequest, UnknownModel
from router.config.keys import ConfigError
from router.config.settings.gateway_settings import GatewaySettings
from router.fleet.reservations.reservations import Ending
from router.gateway.exchange import Exchange, Upstream
from router.net.keys.exposure import is_loopback
from tests.stage.garbage import freed_at_once
from tests.stage.gateway import Play, Worker, a_gateway, answering, begun, cut, silent, streaming

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
USAGE = (
    b'{"prompt_tokens":20,"completion_tokens":3,"total_tokens":23,'
    b'"prompt_tokens_details":{"cached_tokens":16}}'
)
WHOLE = b'{"id":"c", "choices":[ {"message":{"content":"hi"}} ], "usage":' + USAGE + b"}"
EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":"h"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"i"}}]}\n\n',
]
LAST = b'data: {"choices":[],"usage":' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"
DEAD = "http://127.0.0.1:1"


async def test_a_chat_goes_to_the_worker_of_the_pick_and_its_bytes_come_back() -> None:
    worker = Worker(answering(WHOLE, X_Engine="yes", Server="engine"))
    async with a_gateway(worker, answer_headers=True) as stage:
        headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "traceparent": "00-a"}
        body = b'{ "model":"m", "messages":[{"role":"user","content":"h\\u00e9"}] }'
        answer = await stage.ask(CHAT, body, headers=headers)
        assert (answer.status, answer.body) == (200, WHOLE)
        assert answer.headers["X_Engine"] == "yes"
        assert answer.headers["X-Request-Id"] == "mine"
        assert answer.headers["X-Kvroute-Worker"] == "w0"
        assert answer.headers["Content-Length"] == str(len(WHOLE))
        assert worker.bodies == [body]
        sent = worker.requests[0].headers
        assert (sent["Authorization"], sent["traceparent"]) == ("Bearer k", "00-a")
        assert sent["X-Request-Id"] == "mine"
        assert sent["Host"] in worker.address
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})
        assert stage.requests("finished") == 1


async def test_a_stream_comes_as_sent_less_the_usage_that_was_not_requested() -> None:
    worker = Worker(streaming(b": ping\n\n", *EVENTS, LAST, DONE))
    async with a_gateway(worker) as stage:
        answer = await stage.ask(CHAT, {**BODY, "stream": True})
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.body == b"".join([b": ping\n\n", *EVENTS, DONE])
        assert json.loads(worker.bodies[0])["stream_options"] == {"include_usage": True}
        options = {"include_usage": True}
        body = {**BODY, "stream": True, "stream_options": options}
        assert (await stage.ask(CHAT, body)).body == b"".join([b": ping\n\n", *EVENTS, LAST, DONE])
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 2})


def test_aiohttp_still_has_the_switch_that_sends_a_head_with_the_first_bytes() -> None:
    assert web.StreamResponse._send_headers_immediately is True


async def test_a_request_that_is_over_is_freed_with_its_body() -> None:
    worker = Worker(streaming(*EVENTS, LAST, DONE))
    async with a_gateway(worker) as stage, freed_at_once(RoutedRequest, Exchange, Attempts):
        for _ in range(3):
            await stage.ask(CHAT, {**BODY, "stream": True})


async def broken_off(request: web.Request, _: bytes) -> web.StreamResponse:
    response = await begun(request, EVENTS[0])
    cut(request)
    return response


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("play", [broken_off, answering(b"{}", status=500)])
async def test_a_request_that_fails_is_freed_with_its_body(play: Play, in_process: bool) -> None:
    kinds = RoutedRequest, Exchange, Attempts, NoWorker
    async with (
        a_gateway(Worker(play), Worker(play), in_process=in_process) as stage,
        freed_at_once(*kinds),
    ):
        for _ in range(3):
            with suppress(aiohttp.ClientError):
                await stage.ask(CHAT, {**BODY, "stream": True})


@pytest.mark.parametrize("in_process", [False, True])
async def test_a_request_that_is_refused_is_freed_with_its_body(in_process: bool) -> None:
    kinds = RoutedRequest, Exchange, Attempts, UnknownModel
    worker = Worker(answering(b"{}"))
    async with a_gateway(worker, in_process=in_process) as stage, freed_at_once(*kinds):
        for _ in range(3):
            assert (await stage.ask(CHAT, {**BODY, "model": "nobody"})).status == 404


async def test_a_client_that_leaves_takes_the_workers_connection_with_it() -> None:
    first = asyncio.Event()

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request, EVENTS[0])
        first.set()
        await asyncio.Event().wait()
        return response

    worker = Worker(play)
    async with a_gateway(worker) as stage:
        async with stage.post(CHAT, {**BODY, "stream": True}) as answer:
            assert await answer.content.readany() == EVENTS[0]
            answer.close()
        await stage.until(lambda: worker.left == 1)
        await stage.until(lambda: stage.endings == {Ending.FAILED_CANCELLED: 1})
        assert stage.open == 0
        await stage.until(lambda: stage.requests("cancelled") == 1)


async def test_a_client_that_leaves_before_the_first_byte_is_noticed_too() -> None:
    worker = Worker(silent)
    async with a_gateway(worker) as stage:
        call = asyncio.ensure_future(stage.post(CHAT, BODY).__aenter__())
        await stage.until(lambda: len(worker.bodies) == 1)
        call.cancel()
        await stage.until(lambda: worker.left == 1)
        await stage.until(lambda: stage.endings == {Ending.FAILED_CANCELLED: 1})


async def test_a_worker_that_refuses_the_connection_is_replaced() -> None:
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        for name in ("dead-0", "dead-1"):
            stage.add(name, DEAD, total_slots=1000, total_blocks=100_000)
        for _ in range(8):
            assert (await stage.ask(CHAT, BODY)).body == WHOLE
        await stage.until(lambda: stage.endings.get(Ending.FINISHED) == 8)
        assert stage.endings.get(Ending.FAILED_REFUSED, 0) > 0


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_worker_that_fails_before_the_first_byte_is_replaced(status: int) -> None:
    good, bad = Worker(answering(WHOLE)), Worker(answering(b'{"error":"mine"}', status))
    async with a_gateway(bad, good) as stage:
        for _ in range(6):
            assert (await stage.ask(CHAT, BODY)).body == WHOLE
        assert len(good.bodies) == 6
        assert bad.bodies


async def test_without_another_worker_the_failed_answer_is_passed_on() -> None:
    worker = Worker(answering(b'{"error":"mine"}', 503))
    async with a_gateway(worker) as stage:
        answer = await stage.ask(CHAT, BODY)
        assert (answer.status, answer.body) == (503, b'{"error":"mine"}')
        assert len(worker.bodies) == 1
        await stage.until(lambda: stage.endings == {Ending.FAILED_WORKER: 1})


async def test_a_clients_own_mistake_is_tried_once_and_blames_no_worker() -> None:
    refusal = b'{"error":{"message":"bad temperature"}}'
    first, second = Worker(answering(refusal, 400)), Worker(answering(refusal, 400))
    async with a_gateway(first, second) as stage:
        answer = await stage.ask(CHAT, BODY)
        assert (answer.status, answer.body) == (400, refusal)
        assert len(first.bodies) + len(second.bodies) == 1
        await stage.until(lambda: stage.endings == {Ending.FAILED_CLIENT: 1})
        assert stage.requests("worker_refused") == 1


async def dies(request: web.Request, _: bytes) -> web.StreamResponse:
    """A worker that dies inside its second event."""
    response = await begun(request, EVENTS[0] + EVENTS[1][:20])
    cut(request, reset=True)
    return response


async def test_a_worker_that_dies_after_the_first_byte_ends_the_stream_with_an_error() -> None:
    first, second = Worker(dies), Worker(dies)
    async with a_gateway(first, second) as stage:
        got = b""
        async with stage.post(CHAT, {**BODY, "stream": True}) as answer:
            try:
                async for chunk in answer.content.iter_any():
                    got += chunk
            except aiohttp.ClientPayloadError:
                pass
            else:
                pytest.fail("the stream ended as if it were whole")
        assert got.startswith(EVENTS[0])
        error = json.loads(got.rsplit(b"data: ", 1)[1])["error"]
        assert error["code"] == "WORKER_FAILED"
        assert not got.endswith(DONE)
        assert len(first.bodies) + len(second.bodies) == 1
        await stage.until(lambda: stage.endings == {Ending.FAILED_WORKER: 1})
        await stage.until(lambda: stage.requests("cut") == 1)


async def test_a_worker_that_dies_in_a_whole_answer_cuts_it() -> None:
    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices":')
        cut(request)
        return response

    async with a_gateway(Worker(play)) as stage, stage.post(CHAT, BODY) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_a_worker_that_sends_nothing_is_left() -> None:
    worker = Worker(silent)
    async with a_gateway(worker, silence_s=0.1) as stage:
        answer = await stage.ask(CHAT, BODY)
        assert answer.status == 504
        assert answer.error["code"] == "WORKER_SILENT"
        await stage.until(lambda: stage.endings == {Ending.FAILED_TIMEOUT: 1})
        await stage.until(lambda: worker.left == 1)


@pytest.mark.parametrize("host", ["worker..local", "a" * 64])
async def test_a_worker_whose_host_can_be_no_name_is_blamed(host: str) -> None:
    async with a_gateway() as stage:
        stage.add("w0", f"http://{host}:9000")
        answer = await stage.ask(CHAT, BODY)
        assert (answer.status, answer.error["code"]) == (502, "WORKER_FAILED")
        await stage.until(lambda: stage.endings == {Ending.FAILED_WORKER: 1})


async def test_a_slow_client_holds_the_worker_back() -> None:
    total = 1 << 26
    sent = 0
    over = asyncio.Event()

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        nonlocal sent
        response = await begun(request)
        event = b"data: " + b"x" * 65_528 + b"\n\n"
        while sent < total:
            await response.write(event)
            sent += len(event)
        over.set()
        return response

    async with a_gateway(Worker(play)) as stage:
        async with stage.post(CHAT, {**BODY, "stream": True}) as answer:
            with pytest.raises(TimeoutError):  # as long as nobody reads, it never ends
                await asyncio.wait_for(over.wait(), 0.5)
            assert sent < total
            got = 0
            async for chunk in answer.content.iter_any():
                got += len(chunk)
            assert got == total
        assert over.is_set()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "INVALID_BODY"),
        (b"[" * 100_000, 400, "INVALID_BODY"),
        (b'{"model": 7}', 400, "INVALID_BODY"),
        (b'{"model": "none", "messages": []}', 404, "model_not_found"),
        (b"x" * ((1 << 20) + 1), 413, "BODY_TOO_LARGE"),
    ],
)
async def test_hostile_bodies_get_openais_errors(body: bytes, status: int, code: str) -> None:
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker, body_mib_max=1) as stage:
        answer = await stage.ask(CHAT, body)
        assert answer.status == status
        assert answer.error["code"] == code
        assert answer.headers["X-Request-Id"]
        answer = await stage.ask("/v1/messages", body)
        assert answer.status == status
        assert answer.json()["type"] == "error"
        assert not worker.bodies
        assert stage.sample("kvroute_open_requests", program="gateway") == 0
        assert stage.sample("kvroute_held_bytes", what="gateway_bodies", port="") == 0


async def test_a_body_of_unknown_length_has_the_same_bound() -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 65_536

    async with a_gateway(body_mib_max=1) as stage, stage.post(CHAT, pieces()) as answer:
        assert answer.status == 413


async def test_requests_beyond_the_bound_are_told_to_come_back() -> None:
    go = asyncio.Event()

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        await go.wait()
        return web.Response(body=WHOLE)

    worker = Worker(play)
    async with a_gateway(worker, open_max=1) as stage:
        first = asyncio.ensure_future(stage.post(CHAT, BODY).__aenter__())
        await stage.until(lambda: len(worker.bodies) == 1)
        answer = await stage.ask(CHAT, BODY)
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert answer.error["code"] == "TOO_MANY_REQUESTS"
        go.set()
        async with await first as answer:
            assert await answer.read() == WHOLE


async def test_a_refusal_of_the_router_has_its_status_and_retry_after() -> None:
    async with a_gateway() as stage:
        stage.add("w0", DEAD, total_slots=1)
        await stage.gateway.client.route(token_ids=[1, 2, 3])
        answer = await stage.ask(CHAT, BODY)
        assert answer.status == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["X-Kvroute-Reason"] == "ALL_WORKERS_FULL"


async def test_paths_of_the_gateway_itself() -> None:
    async with a_gateway() as stage:
        assert (await stage.get("/health")).status == 200
        assert (await stage.get("/ready")).status == 503
        stage.add("w0", DEAD, lora_names=("adapter",), max_model_len=100)
        stage.add("w1", DEAD, model_aliases=("alias",), max_model_len=90)
        await stage.gateway.roster.refresh()
        assert (await stage.get("/ready")).status == 200
        cards = (await stage.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["adapter", "alias", "m"]
        assert [card["max_model_len"] for card in cards] == [100, 90, 90]
        assert cards[0]["parent"] == "m"
        assert (await stage.get("/v1/models/m")).json()["id"] == "m"
        assert (await stage.get("/v1/models/none")).status == 404
        assert "kvroute_open_requests" in (await stage.get("/metrics")).body.decode()
        assert (await stage.get(CHAT)).status == 405
        answer = await stage.ask("/v1/nothing", BODY)
        assert (answer.status, answer.error["code"]) == (404, "UNKNOWN_PATH")


@pytest.mark.parametrize("stream", [False, True])
async def test_mirrored_requests_are_decided_and_go_nowhere(stream: bool) -> None:
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker, observe=True) as stage:
        for _ in range(3):
            answer = await stage.ask(CHAT, {**BODY, "stream": stream})
            assert (answer.status, answer.body) == (204, b"")
        assert (await stage.ask("/v1/embeddings", {"model": "m", "input": "x"})).status == 204
        assert (await stage.ask(CHAT, {**BODY, "model": "none"})).status == 404
        assert (await stage.ask(CHAT, {**BODY, "messages": "none"})).status == 204, (
            "decided by load, as it would be served"
        )
        assert worker.requests == []
        assert stage.open == 0
        assert stage.endings == {}
        assert stage.served.fleet.core.fleet.observed.picks == 5
        assert stage.requests("observed") == 4
        assert stage.requests("refused") == 1


async def test_embeddings_go_by_load() -> None:
    worker = Worker(answering(b'{"data":[],"usage":{"prompt_tokens":5}}'))
    async with a_gateway(worker) as stage:
        assert (
            await stage.ask("/v1/embeddings", {"model": "m", "input": "x" * 4000})
        ).status == 200
        assert worker.requests[0].path == "/v1/embeddings"
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})


async def test_a_body_for_which_its_router_has_no_tokenizer_goes_by_load_and_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.api.service.texts.text_form", lambda _request: 0)
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        assert (await stage.ask(CHAT, BODY)).status == 200
        samples = stage.gateway.counters.by_load.collect()[0].samples
        counted = {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total")}
        assert counted == {"NO_TOKENIZER": 1}


async def test_while_routers_are_away_the_gateway_picks_by_itself() -> None:
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        for _ in range(3):
            assert (await stage.ask(CHAT, BODY)).body == WHOLE
        client = stage.gateway.client
        await stage.until(lambda: client.counts.get("worker_lists", 0) > 0)
        await stage.served.server.drain(0)
        assert (await stage.ask(CHAT, BODY)).body == WHOLE
        labels = {"name": "fallback_picks"}
        assert stage.sample("kvroute_gateway_client_total", **labels) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


async def test_other_addresses_need_a_switch() -> None:
    from prometheus_client import CollectorRegistry

    from router.gateway.server.gateway import Gateway

    settings = GatewaySettings(listen="0.0.0.0:0")
    client = KvRouteClient("127.0.0.1:1")
    with pytest.raises(ConfigError, match="any_address"):
        Gateway(settings, client, CollectorRegistry(), clock=lambda: 0, broke=print)


async def test_a_field_that_is_there_too_often_blames_no_worker() -> None:
    worker, other = Worker(answering(DONE)), Worker(answering(DONE))
    async with a_gateway(worker, other) as stage:
        many = b",".join(b'"priority": %d' % number for number in range(40))
        body = b'{"model": "m", "messages": [], ' + many + b"}"
        answer = await stage.ask(CHAT, body, headers={"Content-Type": "application/json"})
        assert answer.status == 400
        assert answer.headers["X-Kvroute-Reason"] == "INVALID_BODY"
        await stage.until(lambda: stage.open == 0)
        assert stage.endings == {Ending.FAILED_CLIENT: 1}, "tried once, and no blame"
    assert not worker.bodies
    assert not other.bodies


async def test_a_connection_that_is_kept_for_later_keeps_no_body() -> None:
    async with a_gateway(Worker(answering(DONE))) as stage:
        content = "kept? " * 1000
        await stage.ask(CHAT, {**BODY, "user": content})
        await stage.until(lambda: stage.open == 0)
        kept = [each for each in gc.get_objects() if isinstance(each, Upstream)]
        assert not [each for each in kept if content.encode() in each.body]
