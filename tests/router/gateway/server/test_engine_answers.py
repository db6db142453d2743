"""Whatever an engine answers, its client is served by another one, or gets an answer that says why;
nobody is blamed for what another did."""

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import TCPConnector

from events.engines import connections
from router.fleet.reservations.reservations import Ending
from router.gateway.server import silent_workers, upstreams
from tests.router.gateway.server.test_gateway import BODY, CHAT, DONE, EVENTS, WHOLE
from tests.stage.gateway import GUARD_S, Stage, Worker, a_gateway, answering
from tests.stage.raw_engine import Asked, RawEngine, sends, whole

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ROOMY: dict[str, Any] = {"total_slots": 1000, "total_blocks": 100_000}
"""A worker that is picked first."""
ENDED = (Ending.FAILED_WORKER, Ending.FAILED_TIMEOUT, Ending.FAILED_REFUSED)
"""Endings that are held against a worker."""


@asynccontextmanager
async def beside(engine: RawEngine, *others: Worker, **settings: Any) -> AsyncIterator[Stage]:
    """A gateway before an engine of raw bytes, which is picked first, and workers."""
    async with engine.run() as address, a_gateway(*others, **settings) as stage:
        stage.add("raw", address, **ROOMY)
        await stage.gateway.roster.refresh()
        yield stage


def blamed(stage: Stage) -> int:
    return sum(stage.endings.get(ending, 0) for ending in ENDED)


async def asked(stage: Stage, **about: Any) -> tuple[int, dict[str, str], bytes]:
    answer = await stage.ask(CHAT, BODY, **about)
    return answer.status, dict(answer.headers), answer.body


def test_aiohttp_still_has_the_names_that_the_bounds_stand_on() -> None:
    assert hasattr(ResponseHandler, "set_response_params")
    assert hasattr(ResponseHandler, "feed_data")
    assert hasattr(TCPConnector, "connect")


async def test_connections_to_workers_are_made_with_the_bounds() -> None:
    engine = RawEngine(sends(whole(WHOLE), stays=True))
    seen: list[connections.AnswerProtocol] = []
    made = connections.AnswerProtocol.connection_made

    def connection_made(self: connections.AnswerProtocol, transport: Any) -> None:
        seen.append(self)
        made(self, transport)
        peer = transport.get_extra_info("socket")
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        dead_ms = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert dead_ms == connections.DEAD_S * 1000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections.AnswerProtocol, "connection_made", connection_made)
        async with beside(engine) as stage:
            for _ in range(2):
                assert (await asked(stage))[0] == 200
    assert [protocol.uses for protocol in seen] == [2]


async def test_interim_answers_without_end_leave_their_worker() -> None:
    async def flood(asked: Asked) -> bool:
        while True:
            await asked.send(b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 64)

    engine = RawEngine(flood)
    async with beside(engine, Worker(answering(WHOLE))) as stage:
        assert (await asked(stage))[::2] == (200, WHOLE)
        await stage.until(lambda: engine.left == len(engine.asked) == 1)
        await stage.until(lambda: blamed(stage) == 1)


@pytest.mark.parametrize("count", [1, connections.INTERIM_MAX])
async def test_a_few_interim_answers_are_none(count: int) -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n" * count
    async with beside(RawEngine(sends(interim + whole(WHOLE)))) as stage:
        assert (await asked(stage))[::2] == (200, WHOLE)


@pytest.mark.parametrize(
    "status", [b"000 Odd", b"101 Switching Protocols", b"199 x", b"301 x", b"304 x", b"307 x",
               b"399 x", b"600 x", b"999 x"],
)  # fmt: skip
async def test_a_status_that_is_no_answer_reaches_no_client(status: bytes) -> None:
    more = b"Location: http://127.0.0.1:1/", b"Set-Cookie: a=b", b"Upgrade: websocket"
    engine = RawEngine(sends(whole(b"{}", status, *more)))
    async with beside(engine) as stage:
        code, headers, body = await asked(stage)
        assert (code, headers["X-Kvroute-Reason"]) == (502, "WORKER_FAILED")
        assert headers.keys().isdisjoint({"Location", "Set-Cookie", "Upgrade"})
        assert b"Traceback" not in body
    async with beside(RawEngine(engine.answer), Worker(answering(WHOLE))) as stage:
        assert (await asked(stage))[::2] == (200, WHOLE)


async def test_a_failed_answer_that_drips_leaves_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstreams, "FAILED_BODY_S", 0.01)

    async def drip(asked: Asked) -> bool:
        await asked.send(b"HTTP/1.1 503 x\r\nContent-Length: 9\r\n\r\n{")
        await asyncio.Event().wait()
        return False

    engine = RawEngine(drip)
    async with beside(engine, Worker(answering(WHOLE))) as stage:
        assert (await asked(stage))[::2] == (200, WHOLE)
    async with beside(RawEngine(drip)) as stage:
        assert (await asked(stage))[::2] == (503, b"{")


# Connections that are used again


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_connection_that_closes_as_it_is_used_again_is_no_failure(
    reset: bool, workers: int
) -> None:
    async def closes(asked: Asked) -> bool:
        if not asked.number:
            await asked.send(whole(WHOLE))
            return True
        if reset:
            peer = asked.writer.get_extra_info("socket")
            linger = struct.pack("ii", 1, 0)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return False

    engine, other = RawEngine(closes), RawEngine(closes)
    async with other.run() as address, beside(engine) as stage:
        if workers == 2:
            stage.add("other", address, **ROOMY)
        for _ in range(8):
            assert (await asked(stage))[::2] == (200, WHOLE)
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 8})
        stale = sum(one.number > 0 for one in engine.asked + other.asked)
        assert stale >= 8 // 2 - workers
        assert stage.gateway.client.counts["retries"] == 0


@pytest.mark.parametrize("part", [b"", HEAD[:20]])
async def test_a_connection_that_closes_otherwise_is_a_failure(part: bytes) -> None:
    """A fresh one without a byte, or a used one with a part of an answer."""

    async def closes(asked: Asked) -> bool:
        if part and not asked.number:
            await asked.send(whole(WHOLE))
            return True
        await asked.send(part)
        return False

    engine = RawEngine(closes)
    async with beside(engine) as stage:
        codes = [(await asked(stage))[0] for _ in range(2)]
        assert codes == ([200, 502] if part else [502, 502])
        assert len(engine.asked) == 2, "each is sent once"
        await stage.until(lambda: blamed(stage) == codes.count(502))


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("bad", [b"zz\r\n", b"-1\r\n", b"f" * 17 + b"\r\n", b"0\r\n: a\r\n\r\n"])
async def test_an_answer_that_turns_into_no_http_ends_at_once(
    is_stream: bool, cut: int, bad: bytes
) -> None:
    """cut: bytes of the good chunk that come with the bad one."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    good = b"%x\r\n%s\r\n" % (len(event), event)
    kind = b"text/event-stream" if is_stream else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % kind
    began = asyncio.Event()

    async def answer(asked: Asked) -> bool:
        await asked.send(head + good[: len(good) - cut])
        await began.wait()
        await asked.send(good[len(good) - cut :] + bad)
        await asked.gone()
        return False

    engine = RawEngine(answer)
    async with beside(engine) as stage, stage.post(CHAT, {**BODY, "stream": is_stream}) as response:
        got = await response.content.readany()
        began.set()
        try:
            async with asyncio.timeout(GUARD_S):
                while chunk := await response.content.readany():
                    got += chunk
        except aiohttp.ClientPayloadError:
            pass
        assert (b"WORKER_FAILED" in got) == is_stream
        await stage.until(lambda: engine.left == 1 and blamed(stage) == 1)


async def test_bytes_that_no_request_waits_for_close_the_connection() -> None:
    engine = RawEngine(sends(whole(WHOLE) + whole(b"another"), stays=True))
    async with beside(engine) as stage:
        for _ in range(3):
            assert (await asked(stage))[::2] == (200, WHOLE)
        assert engine.connections == 3


async def test_a_query_goes_on_as_it_was_written() -> None:
    engine = RawEngine(sends(whole(WHOLE), stays=True))
    query = b"a=%2F%20b+c&d=~%7e"
    async with beside(engine) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.gateway.port)
        body = b'{"model":"m","messages":[]}'
        writer.write(b"POST %s?%s HTTP/1.1\r\n" % (CHAT.encode(), query))
        writer.write(b"Host: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert engine.asked[0].head.startswith(b"POST /v1/chat/completions?%s " % query)


# Heads


@pytest.mark.parametrize("size", [12_000, 16_000])
async def test_a_head_within_the_bound_passes(size: int) -> None:
    engine = RawEngine(sends(whole(WHOLE, b"200 OK", b"X-Long: " + b"a" * size)))
    async with (
        beside(engine) as stage,
        aiohttp.ClientSession(max_field_size=1 << 16) as http,
        http.post(f"{stage.base}{CHAT}", json=BODY) as answer,
    ):
        assert (answer.status, len(answer.headers["X-Long"])) == (200, size)


@pytest.mark.parametrize(
    "headers", [[b"X-Long: " + b"a" * 17_000], [b"X-%d: %s" % (i, b"a" * 100) for i in range(160)]]
)
async def test_a_good_answer_with_a_long_head_is_computed_once(headers: list[bytes]) -> None:
    engines = [RawEngine(sends(whole(WHOLE, b"200 OK", *headers))) for _ in range(2)]
    async with engines[1].run() as address, beside(engines[0]) as stage:
        stage.add("other", address, **ROOMY)
        code, about, body = await asked(stage)
        assert (code, about["X-Kvroute-Reason"]) == (502, "ANSWER_HEAD_TOO_LARGE")
        assert b"16384" in body
        assert sum(len(engine.asked) for engine in engines) == 1
        await stage.until(lambda: stage.endings == {Ending.FAILED_CLIENT: 1})


@pytest.mark.parametrize(
    "head", [HEAD + b"X-A: " + b"a" * (1 << 20), HEAD + b"X-A: b\r\n" * 100_000, b"HTTP/1.1 200 "]
)
async def test_a_head_without_end_leaves_its_worker(head: bytes) -> None:
    async def flood(asked: Asked) -> bool:
        await asked.send(head)
        while True:
            await asked.send(b"a" * 4096)

    async with beside(RawEngine(flood), Worker(answering(WHOLE))) as stage:
        assert (await asked(stage))[::2] == (200, WHOLE)
        await stage.until(lambda: blamed(stage) == 1)


# The gateway's own host


class Sockets:
    """In the place of connections._socket, which a gateway takes as it starts."""

    def __init__(self, number: int) -> None:
        self._error = OSError(number, "by the test")
        self._whole = connections._socket
        self.fails: set[int] | None = set()
        """Ports of workers; None: all."""

    def __call__(self, address: Any) -> socket.socket:
        if self.fails is None or address[4][1] in self.fails:
            raise self._error
        return self._whole(address)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_a_host_without_descriptors_blames_no_worker(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = Sockets(number)
    monkeypatch.setattr(connections, "_socket", sockets)
    async with a_gateway(Worker(answering(WHOLE)), Worker(answering(WHOLE))) as stage:
        sockets.fails = None
        code, about, _ = await asked(stage)
        assert (code, about["X-Kvroute-Reason"], about["Retry-After"]) == (503, "HOST_FAILED", "1")
        await stage.until(lambda: stage.endings == {Ending.FAILED_CLIENT: 1})
        assert stage.requests("refused") == 1
        assert stage.sample("kvroute_refusals_total", program="gateway", reason="HOST_FAILED") == 1
        sockets.fails = set()
        assert (await asked(stage))[0] == 200


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EACCES])
async def test_an_address_that_the_host_can_t_reach_blames_no_worker(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = Sockets(number)
    monkeypatch.setattr(connections, "_socket", sockets)
    near, far = RawEngine(sends(whole(WHOLE))), RawEngine(sends(whole(WHOLE)))
    async with near.run() as address, beside(far) as stage:
        stage.add("near", address)
        sockets.fails = {int(far.address.rsplit(":", 1)[1])}
        for _ in range(4):
            assert (await asked(stage))[0] == 200
        assert not far.asked
        assert not blamed(stage)


# Models that moved


async def test_a_model_that_an_engine_no_longer_has_is_served_by_another_one() -> None:
    absent = b'{"error":{"message":"The model `m` does not exist.","code":404}}'
    engine = RawEngine(sends(whole(absent, b"404 Not Found")))
    async with beside(engine, Worker(answering(WHOLE))) as stage:
        assert (await asked(stage))[::2] == (200, WHOLE)
        await stage.until(lambda: stage.endings == {Ending.FAILED_CLIENT: 1, Ending.FINISHED: 1})
    async with beside(RawEngine(engine.answer)) as stage:
        assert (await asked(stage))[::2] == (404, absent)
        assert stage.requests("worker_refused") == 1


async def test_another_404_is_the_clients() -> None:
    engine = RawEngine(sends(whole(b'{"detail":"Not Found"}', b"404 Not Found")))
    worker = Worker(answering(WHOLE))
    async with beside(engine, worker) as stage:
        assert (await asked(stage))[::2] == (404, b'{"detail":"Not Found"}')
        assert not worker.bodies


# Workers that are silent to the router


async def cut_off(asked: Asked) -> bool:
    await asked.gone()
    return False


async def headed(asked: Asked) -> bool:
    await asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
    await asked.send(b"Transfer-Encoding: chunked\r\n\r\n")
    return await cut_off(asked)


def falls_silent(stage: Stage, how: str) -> None:
    """The raw engine's relay says nothing more, or says that the engine does not answer."""
    fleet = stage.served.fleet
    (key,) = (key for key in fleet.relays if key.worker_id == "raw")
    if how == "relay":
        fleet.turn(4.0, silent=[key])
    else:
        fleet.say(key, healthy=False, probed=True)


async def looked(stage: Stage) -> None:
    await stage.gateway.silent.look(asyncio.get_running_loop().time())


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("how", ["relay", "engine"])
@pytest.mark.parametrize("answer", [cut_off, headed])
async def test_a_request_without_a_byte_leaves_a_worker_that_is_silent(
    answer: Any, how: str, in_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_workers, "LOOK_S", 3600.0)  # the test looks
    engine = RawEngine(answer)
    async with beside(engine, Worker(answering(WHOLE)), in_process=in_process) as stage:
        call = asyncio.create_task(asked(stage))
        await stage.until(lambda: len(engine.asked) == 1)
        await looked(stage)
        assert not call.done(), "its worker is well"
        falls_silent(stage, how)
        while not call.done():
            await looked(stage)
            await asyncio.sleep(0)
        assert (await call)[::2] == (200, WHOLE)
        assert stage.sample("kvroute_gateway_client_total", name="moved") == 1
        await stage.until(lambda: engine.left == 1)
        await stage.until(lambda: stage.endings == {Ending.FAILED_CANCELLED: 1, Ending.FINISHED: 1})


@pytest.mark.parametrize("alone", [False, True])
async def test_a_request_stays_where_bytes_came_or_no_other_worker_is(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_workers, "LOOK_S", 3600.0)
    go = asyncio.Event()

    async def late(asked: Asked) -> bool:
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        await asked.send(b"Content-Length: %d\r\n\r\n" % len(EVENTS[0] + DONE))
        if not alone:
            await asked.send(EVENTS[0])
        await go.wait()
        await asked.send((EVENTS[0] if alone else b"") + DONE)
        return False

    others = [] if alone else [Worker(answering(WHOLE))]
    engine = RawEngine(late)
    async with beside(engine, *others) as stage:
        call = asyncio.create_task(asked(stage))
        await stage.until(lambda: len(engine.asked) == 1)
        if not alone:
            known = stage.served.fleet.core.fleet.answers.by_pool
            await stage.until(lambda: sum(sum(pool.ttft_s.counts) for pool in known.values()) == 1)
        falls_silent(stage, "relay")
        await looked(stage)
        assert stage.sample("kvroute_gateway_client_total", name="moved") == 0
        go.set()
        assert (await call)[::2] == (200, EVENTS[0] + DONE)
