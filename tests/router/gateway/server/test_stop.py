"""The end of a gateway: what becomes of open connections, and of requests on them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from tests.router.gateway.server.test_gateway import BODY, CHAT, EVENTS, WHOLE
from tests.stage.gateway import GUARD_S, Stage, Worker, a_gateway, answering, begun

FOREVER_S = 300.0
"""Nothing waits this long."""


class Line:
    """A client's connection that is kept for many requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def get(self, path: str = "/v1/models") -> tuple[int, bool]:
        """The status of a request, and whether its answer says that the connection ends."""
        self.writer.write(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
        return await self.answer()

    async def answer(self) -> tuple[int, bool]:
        async with asyncio.timeout(GUARD_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await self.reader.readexactly(int(length or b"0"))
        return int(head.split()[1]), b"connection: close" in head

    async def post(self) -> tuple[int, bool]:
        body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
        head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        self.writer.write(head % (CHAT.encode(), len(body)) + body)
        return await self.answer()

    async def ended(self) -> bool:
        """Whether the gateway closes it, without a byte more."""
        return await asyncio.wait_for(self.reader.read(), GUARD_S) == b""


@asynccontextmanager
async def lines(
    worker: Worker, **about: Any
) -> AsyncIterator[tuple[Stage, Callable[[], Awaitable[Line]]]]:
    """A gateway, and how a client connects to it."""
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(a_gateway(worker, **about))

        async def connected() -> Line:
            line = Line(*await asyncio.open_connection("127.0.0.1", stage.gateway.port))
            stack.callback(line.writer.close)
            return line

        yield stage, connected


def waiting(go: asyncio.Event) -> Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]:
    async def play(_request: web.Request, _: bytes) -> web.StreamResponse:
        await go.wait()
        return web.Response(body=WHOLE)

    return play


async def test_requests_on_open_connections_are_served_and_end_them() -> None:
    async with lines(Worker(answering(WHOLE)), accept_after_stop_s=FOREVER_S) as (stage, line):
        kept = [await line() for _ in range(20)]
        for each in kept:
            assert await each.post() == (200, False)
        stopping = asyncio.create_task(stage.gateway.server.stop(FOREVER_S))
        await asyncio.sleep(0)
        assert await (await line()).get("/ready") == (503, True)
        kept.append(await line())
        assert await asyncio.gather(*(each.post() for each in kept)) == [(200, True)] * 21
        assert all(await asyncio.gather(*(each.ended() for each in kept)))
        await asyncio.wait_for(stopping, GUARD_S)  # nobody is left, so that nothing is waited for


async def test_under_load_no_request_fails_while_a_gateway_stops() -> None:
    """Each client uses its connection again and again, as long as answers let it."""
    async with lines(Worker(answering(WHOLE)), accept_after_stop_s=FOREVER_S) as (stage, line):
        served = 0

        async def client() -> None:
            nonlocal served
            own, closes = await line(), False
            while not closes:
                status, closes = await own.post()
                assert status == 200
                served += 1
            assert await own.ended()

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await stage.until(lambda: served > 40)
        await stage.gateway.server.stop(FOREVER_S)
        await asyncio.gather(*clients)
        assert stage.requests("finished") == served


async def test_then_idle_connections_are_closed_and_those_of_new_ones_refused() -> None:
    go = asyncio.Event()
    worker = Worker(waiting(go))
    async with lines(worker, accept_after_stop_s=0) as (stage, line):
        idle, busy, began = [await line() for _ in range(3)]
        assert await idle.get() == (200, False)
        assert await began.get() == (200, False)
        began.writer.write(b"POST ")
        first = asyncio.create_task(busy.post())
        await stage.until(lambda: len(worker.bodies) == 1)
        stopping = asyncio.create_task(stage.gateway.server.stop(FOREVER_S))
        assert await idle.ended()
        body = b"{}"
        began.writer.write(b"%s HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n" % CHAT.encode())
        began.writer.write(body)
        late = await line()
        assert await late.post() == (503, True)
        assert stage.sample("kvroute_refusals_total", program="gateway", reason="STOPPING") == 1
        go.set()
        assert (await first)[0] == 200
        assert await began.answer() == (200, True)
        await asyncio.wait_for(stopping, GUARD_S)


async def test_a_stream_that_began_before_is_whole_and_ends_its_connection() -> None:
    go = asyncio.Event()

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request, EVENTS[0])
        await go.wait()
        await response.write(EVENTS[1])
        return response

    async with a_gateway(Worker(play), accept_after_stop_s=0) as stage:
        async with stage.post(CHAT, {**BODY, "stream": True}) as answer:
            assert await answer.content.readany() == EVENTS[0]
            stopping = asyncio.create_task(stage.gateway.server.stop(FOREVER_S))
            await stage.until(lambda: stage.gateway.server._stopping)
            go.set()
            assert await answer.content.read() == EVENTS[1]
        await asyncio.wait_for(stopping, GUARD_S)


async def test_what_never_ends_is_cut_when_the_time_is_over() -> None:
    worker = Worker(waiting(asyncio.Event()))
    async with lines(worker, accept_after_stop_s=FOREVER_S) as (stage, line):
        call = asyncio.create_task((await line()).post())
        await stage.until(lambda: len(worker.bodies) == 1)
        await asyncio.wait_for(stage.gateway.server.stop(0.05), GUARD_S)
        failed = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(failed[0], asyncio.IncompleteReadError)
        await stage.until(lambda: worker.left == 1)
