"""Requests through a real Envoy: what the client gets is what the engine sent."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.fleet.reservations.reservations import Ending
from tests.envoy.stage import an_envoy
from tests.stage.gateway import Worker
from tests.stage.waiting import until

BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":3}}}\n\ndata: [DONE]\n\n'
)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


async def _events(request: web.Request, body: bytes) -> web.StreamResponse:
    """A stream of as many events as the request says, a digest of its body, and the usage."""
    chunks = [event(f"token {n}") for n in range(int(request.headers.get("X-Chunks", "20")))]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.headers["X-Digest"] = hashlib.sha256(b"".join([*chunks, USAGE])).hexdigest()
    response.headers["X-Body"] = hashlib.sha256(body).hexdigest()
    await response.prepare(request)
    for chunk in [*chunks, USAGE]:
        await response.write(chunk)
    return response


async def _json(request: web.Request, body: bytes) -> web.StreamResponse:
    size = int(request.headers.get("X-Size", "100"))
    content = json.dumps(
        {
            "choices": [{"message": {"content": "x" * size}}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 4},
        }
    ).encode()
    headers = {
        "X-Digest": hashlib.sha256(content).hexdigest(),
        "X-Body": hashlib.sha256(body).hexdigest(),
    }
    return web.Response(body=content, content_type="application/json", headers=headers)


async def _play(request: web.Request, body: bytes) -> web.StreamResponse:
    if request.method == "GET" or b'"stream": true' not in body:
        return await _json(request, body)
    return await _events(request, body)


def workers(count: int) -> list[Worker]:
    return [Worker(_play) for _ in range(count)]


async def _same(answer: aiohttp.ClientResponse) -> None:
    content = await answer.read()
    assert answer.status == 200
    assert hashlib.sha256(content).hexdigest() == answer.headers["X-Digest"]


def _buffered(config: dict[str, Any]) -> None:
    """As Envoy AI Gateway may send bodies: whole; and answers a part after the other."""
    listener = config["static_resources"]["listeners"][0]
    listener["per_connection_buffer_limit_bytes"] = 1 << 25
    (filters,) = listener["filter_chains"][0]["filters"]
    mode = filters["typed_config"]["http_filters"][0]["typed_config"]["processing_mode"]
    mode |= {"request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"}
    mode |= {"request_trailer_mode": "SKIP", "response_trailer_mode": "SKIP"}


@pytest.mark.parametrize("kind", ["events", "json", "get", "buffered", "long"])
async def test_a_thousand_answers_are_the_engines_own_bytes(kind: str, tmp_path: Path) -> None:
    size = 1_000_000 if kind == "long" else 2_000
    rounds = 1_000
    changes = _buffered if kind == "buffered" else lambda config: None
    async with an_envoy(tmp_path, *workers(3), changes=changes) as envoy:
        free = asyncio.Semaphore(16)

        async def once(number: int) -> None:
            text = f"{number} " * 50 + ("x" * size if kind == "long" else "")
            body = BODY | {
                "stream": kind in ("events", "buffered"),
                "messages": [{"role": "user", "content": text}],
            }
            async with free:
                if kind == "get":
                    async with envoy.http.get(f"{envoy.base}/v1/models") as answer:
                        await _same(answer)
                    return
                content = json.dumps(body).encode()
                headers = {"Content-Type": "application/json", "X-Size": str(size)}
                async with envoy.post(content, headers=headers) as answer:
                    await _same(answer)
                    assert answer.headers["X-Body"] == hashlib.sha256(content).hexdigest()

        async with asyncio.TaskGroup() as group:
            for number in range(rounds):
                group.create_task(once(number))
        await envoy.idle()
        outcome = "blind" if kind == "get" else "finished"
        # The end of an answer's stream may reach the picker after the client has the answer.
        await until(lambda: sum(envoy.outcomes().values()) == rounds, "all counts")
        assert envoy.outcomes() == {outcome: rounds}
        if kind != "get":
            assert envoy.stage.endings == {Ending.FINISHED: rounds}
        assert envoy.stage.sample("kvroute_held_bytes", what="picker_bodies", port="") == 0


async def test_the_pick_is_followed_and_a_forged_header_is_not(tmp_path: Path) -> None:
    many = workers(3)
    async with an_envoy(tmp_path, *many) as envoy:
        envoy.stage.served.fleet.core.drain("w0")
        forged = many[0].address.removeprefix("http://")
        for number in range(30):
            headers = {"x-gateway-destination-endpoint": forged}
            body = BODY | {"messages": [{"role": "user", "content": f"{number}" * 400}]}
            async with envoy.post(body, headers=headers) as answer:
                await _same(answer)
        await envoy.idle()
        assert len(many[0].bodies) == 0
        assert sum(len(worker.bodies) for worker in many) == 30
        sample = envoy.stage.sample
        assert sample("kvroute_picker_not_followed_total", endpoint="known") == 0
        assert sample("kvroute_picker_not_followed_total", endpoint="unknown") == 0


async def test_an_endpoint_that_envoy_does_not_know_is_counted(tmp_path: Path) -> None:
    many = workers(3)
    async with an_envoy(tmp_path, *many, known=2) as envoy:
        for known in ("w0", "w1"):
            envoy.stage.served.fleet.core.drain(known)
        for number in range(9):
            body = BODY | {"messages": [{"role": "user", "content": f"{number}" * 400}]}
            async with envoy.post(body) as answer:
                await _same(answer)
        await envoy.idle()
        assert len(many[2].bodies) == 0
        assert sum(len(worker.bodies) for worker in many) == 9
        assert envoy.stage.sample("kvroute_picker_not_followed_total", endpoint="known") == 9


async def test_a_client_that_leaves_in_any_phase_leaves_no_reservation(tmp_path: Path) -> None:
    began, going = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        began.set()
        if b"prefill" in body:
            await asyncio.sleep(3600)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(event("more"))
            going.set()
            await asyncio.sleep(0.01)

    one = Worker(slow)
    async with an_envoy(tmp_path, one) as envoy:
        host, _, port = envoy.base.removeprefix("http://").rpartition(":")
        for phase in ("upload", "prefill", "streaming"):
            began.clear()
            going.clear()
            _, writer = await asyncio.open_connection(host, int(port))
            content = json.dumps(BODY | {"user": phase}).encode()
            size = len(content) + (1000 if phase == "upload" else 0)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n"
            )
            writer.write(head.encode() + content)
            await writer.drain()
            if phase == "upload":
                await until(lambda: envoy.open == 1, "it came")
            else:
                await (began if phase == "prefill" else going).wait()
                assert envoy.stage.open == 1
            writer.transport.abort()
            await envoy.idle()
        assert envoy.stage.endings == {Ending.FAILED_CANCELLED: 2}


async def test_a_refusal_reaches_the_client(tmp_path: Path) -> None:
    one = Worker(_play)
    async with an_envoy(tmp_path, one) as envoy:
        async with envoy.post(BODY | {"model": "nobody"}) as answer:
            assert answer.status == 404
            assert answer.headers["x-kvroute-reason"] == "UNKNOWN_MODEL"
            assert (await answer.json())["error"]["code"] == "model_not_found"
        assert one.bodies == []


async def test_answers_around_the_picker(tmp_path: Path) -> None:
    async with an_envoy(tmp_path, *workers(2), shows_answers=False, unobserved_s=0.2) as envoy:
        for _ in range(20):
            async with envoy.post(BODY) as answer:
                await _same(answer)
        await envoy.idle()
        assert envoy.stage.sample("kvroute_picker_requests_total", outcome="unobserved") == 20
        assert envoy.stage.endings == {Ending.FINISHED: 20}


async def test_answers_around_the_picker_end_by_the_load_of_the_engines(tmp_path: Path) -> None:
    async with an_envoy(tmp_path, *workers(2), shows_answers=False, unobserved_s=3600.0) as envoy:
        fleet = envoy.stage.served.fleet
        for _ in range(20):
            async with envoy.post(BODY) as answer:
                await _same(answer)
        await until(lambda: len(fleet.core.unobserved) == 20, "the router sees none of them")
        fleet.turn(1)  # the engines were busy until now
        fleet.turn(1)  # and run nothing any more
        assert envoy.stage.endings == {Ending.FINISHED: 20}
        assert envoy.stage.open == 0


async def test_a_dead_picker_fails_no_request_once_envoy_knows(tmp_path: Path) -> None:
    async with an_envoy(tmp_path, *workers(2)) as envoy:
        async with envoy.post(BODY) as answer:
            await _same(answer)
        await envoy.stage.picker.stop()
        async with asyncio.timeout(30):
            while True:  # until a health check says so
                async with envoy.post(BODY) as answer:
                    if answer.status == 200:
                        break
        for _ in range(20):
            async with envoy.post(BODY) as answer:
                await _same(answer)


async def test_a_drain_cuts_no_answer(tmp_path: Path) -> None:
    """200 streams through a picker that stops: each is whole, and new requests are not refused."""

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        chunks = [event(f"token {n}") for n in range(40)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["X-Digest"] = hashlib.sha256(b"".join([*chunks, USAGE])).hexdigest()
        await response.prepare(request)
        for chunk in [*chunks, USAGE]:
            await response.write(chunk)
            await asyncio.sleep(0.05)
        return response

    many = [Worker(slow), Worker(slow)]
    async with an_envoy(tmp_path, *many, accept_after_stop_s=2.5) as envoy:

        async def once(number: int) -> None:
            async with envoy.post(BODY | {"user": f"{number}"}) as answer:
                await _same(answer)

        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(once(number))
            await until(lambda: envoy.open == 200, "all are open")
            group.create_task(envoy.stage.picker.stop())
            for number in range(20):  # while health says NOT_SERVING
                group.create_task(once(number))
        await envoy.idle()
