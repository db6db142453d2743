"""Bytes that no well-behaved client or worker sends, and what the gateway keeps of them."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from kvroute.client import RoutedRequest
from router.fleet.reservations.reservations import Ending
from router.gateway.usage import AnswerReader
from tests.router.gateway.server.test_gateway import BODY, CHAT, DONE, EVENTS, LAST, WHOLE
from tests.stage.gateway import Worker, a_gateway, answering, begun, streaming
from tests.stage.tcp import exchanged, tcp_server

STREAMED = {**BODY, "stream": True}
CONTENT = json.dumps(BODY).encode()


async def read_into(got: bytearray, answer: aiohttp.ClientResponse) -> None:
    async for chunk in answer.content.iter_any():
        got += chunk


def post(*headers: bytes, length: int = len(CONTENT)) -> bytes:
    lines = (
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: gateway",
        b"Connection: close",
        b"Content-Length: %d" % length,
        *headers,
    )
    return b"\r\n".join(lines) + b"\r\n\r\n"


@asynccontextmanager
async def raw_worker(answer: bytes) -> AsyncIterator[str]:
    """A worker that sends these bytes as its answer, then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with tcp_server(serve) as port:
        yield f"http://127.0.0.1:{port}"


async def test_a_query_goes_on_to_the_worker() -> None:
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        assert (await stage.ask(f"{CHAT}?beta=true&x=%20%26", BODY)).status == 200
        assert worker.requests[0].rel_url.raw_query_string == "beta=true&x=%20%26"


async def test_headers_that_are_no_utf8_pass_as_latin_1() -> None:
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        head = post(b"X-Title: caf\xe9", b"X-Session-Id: \xff", b"X-Request-Id: \xfe")
        answer = await exchanged(stage.gateway.port, head, CONTENT)
        assert answer.startswith(b"HTTP/1.1 200")
        assert worker.requests[0].headers["X-Title"] == "caf\xe9"
        assert worker.requests[0].headers["X-Request-Id"].isascii()
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})


async def test_a_workers_headers_that_are_no_utf8_come_back_too() -> None:
    answer = b"HTTP/1.1 200 Caf\xe9\r\nX-A: caf\xe9\r\nX-Own: 1\r\nConnection: X-Own\r\n"
    async with raw_worker(answer + b"Content-Length: 2\r\n\r\n{}") as address, a_gateway() as stage:
        stage.add("raw", address)
        passed = await stage.ask(CHAT, BODY)
        assert (passed.status, passed.body) == (200, b"{}")
        assert passed.headers["X-A"] == "caf\xe9"
        assert "X-Own" not in passed.headers, "a header of the worker's connection alone"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_an_answer_that_breaks_before_its_first_byte_is_tried_elsewhere(
    answer: bytes,
) -> None:
    worker = Worker(answering(WHOLE))
    async with raw_worker(answer) as address, a_gateway(worker) as stage:
        stage.add("raw", address, total_slots=1000, total_blocks=100_000)
        for _ in range(4):
            passed = await stage.ask(CHAT, BODY)
            assert (passed.status, passed.body) == (200, WHOLE)
        await stage.until(lambda: stage.endings.get(Ending.FINISHED) == 4)
        assert stage.open == 0


@pytest.mark.parametrize("rest", [b"5\r\nda", b""], ids=["inside a chunk", "between chunks"])
async def test_an_answer_that_breaks_after_its_first_byte_is_cut(rest: bytes) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    first = b"%x\r\n%s\r\n" % (len(EVENTS[0]), EVENTS[0])
    got = bytearray()
    async with raw_worker(head + first + rest) as address, a_gateway() as stage:
        stage.add("raw", address)
        async with stage.post(CHAT, STREAMED) as passed:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_into(got, passed)
        assert got.startswith(EVENTS[0])
        assert b"WORKER_FAILED" in got
        await stage.until(lambda: stage.endings == {Ending.FAILED_WORKER: 1})


async def test_a_body_of_unknown_length_counts_by_its_length_once_it_is_read() -> None:
    go = asyncio.Event()

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        await go.wait()
        return web.Response(body=WHOLE)

    async def pieces() -> AsyncIterator[bytes]:
        yield CONTENT

    worker = Worker(play)
    async with a_gateway(worker, body_mib_max=1, bodies_mib_max=2) as stage:
        calls = []
        for number in (1, 2, 3):
            calls.append(asyncio.ensure_future(stage.post(CHAT, pieces()).__aenter__()))
            await stage.until(lambda number=number: len(worker.bodies) == number)  # type: ignore[misc]
        assert stage.sample("kvroute_held_bytes", what="gateway_bodies", port="") == 3 * len(
            CONTENT
        )
        go.set()
        for call in calls:
            async with await call as answer:
                assert answer.status == 200
        await stage.until(
            lambda: stage.sample("kvroute_held_bytes", what="gateway_bodies", port="") == 0
        )


async def test_a_body_that_does_not_come_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gateway.server.pace.GRACE_S", 0.05)
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        answer = await exchanged(stage.gateway.port, post(), CONTENT[:10])
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"BODY_TOO_SLOW" in answer
        assert b"\r\nConnection: close\r\n" in answer
        assert not worker.bodies
        assert stage.sample("kvroute_open_requests", program="gateway") == 0


async def test_a_compressed_answer_passes_unread() -> None:
    whole = b"".join([*EVENTS, LAST, DONE])

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
        return web.Response(body=gzip.compress(whole), headers=headers)

    async with a_gateway(Worker(play)) as stage:
        assert (await stage.ask(CHAT, STREAMED)).body == whole
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})


@pytest.mark.parametrize(
    ("code", "ending", "outcome"),
    [
        (b"500", Ending.FAILED_WORKER, "cut"),
        (b'"internal"', Ending.FAILED_WORKER, "cut"),
        (b"400", Ending.FAILED_CLIENT, "worker_refused"),
    ],
)
async def test_a_stream_that_its_engine_ends_with_an_error_is_no_success(
    code: bytes, ending: Ending, outcome: str
) -> None:
    error = b'data: {"error":{"message":"gone","code":' + code + b"}}\n\n"
    chunks = [EVENTS[0], error, DONE]
    async with a_gateway(Worker(streaming(*chunks))) as stage:
        assert (await stage.ask(CHAT, STREAMED)).body == b"".join(chunks)
        await stage.until(lambda: stage.endings == {ending: 1})
        labels = {"path": CHAT, "outcome": outcome}
        await stage.until(lambda: stage.sample("kvroute_gateway_requests_total", **labels) == 1)


async def test_a_fault_of_the_gateway_after_the_first_byte_cuts_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = AnswerReader.feed

    def feed(self: AnswerReader, chunk: bytes) -> bytes:
        if self.passed:
            raise RuntimeError("a fault")
        return whole(self, chunk)

    go = asyncio.Event()

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request, EVENTS[0])
        await go.wait()
        await response.write(EVENTS[1])
        return response

    monkeypatch.setattr(AnswerReader, "feed", feed)
    async with a_gateway(Worker(play)) as stage, stage.post(CHAT, STREAMED) as answer:
        got = await answer.content.readany()
        go.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            got += await answer.content.read()
        assert got == EVENTS[0]
        await stage.until(lambda: stage.open == 0)


async def test_a_whole_answer_is_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[bool] = []
    done = RoutedRequest.prefill_done

    async def counted(self: RoutedRequest, *, answering: bool = True) -> None:
        reported.append(answering)
        await done(self, answering=answering)

    monkeypatch.setattr(RoutedRequest, "prefill_done", counted)
    worker = Worker(answering(WHOLE))
    async with a_gateway(worker) as stage:
        assert (await stage.ask(CHAT, BODY)).body == WHOLE
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})
        assert not reported
        worker.play = streaming(*EVENTS, DONE)
        await stage.ask(CHAT, STREAMED)
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 2})
        assert reported == [True]


async def test_a_worker_that_falls_silent_inside_a_stream_is_left() -> None:
    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request, EVENTS[0])
        await asyncio.Event().wait()
        return response

    worker, got = Worker(play), bytearray()
    async with a_gateway(worker, silence_s=0.1) as stage:
        async with stage.post(CHAT, STREAMED) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_into(got, answer)
        assert got.startswith(EVENTS[0])
        assert b"WORKER_SILENT" in got
        await stage.until(lambda: stage.endings == {Ending.FAILED_TIMEOUT: 1})
        await stage.until(lambda: worker.left == 1)


LONG_EVENT = b"data: " + b"x" * 65_528 + b"\n\n"


async def test_a_client_that_takes_nothing_of_its_answer_leaves_its_place() -> None:
    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request)
        while True:
            await response.write(LONG_EVENT)

    worker = Worker(play)
    async with a_gateway(worker) as stage:
        server = stage.gateway.server
        server._http._bounds = replace(server._http._bounds, read_s=0.05)
        async with stage.post(CHAT, STREAMED):
            await stage.until(lambda: stage.endings == {Ending.FAILED_CANCELLED: 1})
        await stage.until(lambda: worker.left == 1)
        assert server.connections.closed["unread"] == 1
        assert server._entrance.room.open == 0
        assert stage.requests("cancelled") == 1


async def test_a_slow_client_is_no_silence_of_its_worker() -> None:
    total, sent = 1 << 25, 0

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        nonlocal sent
        response = await begun(request)
        while sent < total:
            await response.write(LONG_EVENT)
            sent += len(LONG_EVENT)
        return response

    silence_s = 0.2
    async with (
        a_gateway(Worker(play), silence_s=silence_s) as stage,
        stage.post(CHAT, STREAMED) as answer,
    ):
        loop = asyncio.get_running_loop()
        seen, since_s = -1, loop.time()
        while loop.time() < since_s + 5 * silence_s:  # nothing has moved for so long
            if sent != seen:
                seen, since_s = sent, loop.time()
            await asyncio.sleep(0.01)
        assert sent < total
        assert len(await answer.read()) == total
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})
