"""Rooms, in which a prefill engine and a decode engine meet for one request, as SGLang's do.

Both engines get the request at once, with the address of the prefill engine's bootstrap server and
the number of a room. The prefill engine computes the prompt once the decode engine has come to that
room, and the decode engine goes on once the prompt is computed. One call stands for SGLang's
registration, handshake and transfer of blocks: POST /rooms/NUMBER at the bootstrap server.

Laws (a half is one of the two engines with its part of the request):
- no prompt is computed before its decode half is there, and no answer begun before its prompt is
  computed: a half fails if the other half does not come within WAIT_S, and the decode half fails if
  the prompt does;
- a room lasts while one of its halves is in it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
from aiohttp import web

from router.net.listener.addresses import listening

WAIT_S = 300.0
"""Longest wait of a half for the other half, in seconds, as in SGLang."""
_REACH_S = 10.0
"""Seconds for a decode engine to reach the bootstrap server, and for its answer after its wait."""
_SHUTDOWN_S = 0.1
"""Seconds for open requests to end at a stop, when the engine has already answered all of them."""


async def serve(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Serves `app` at host and port; 0: any free port. The caller cleans the runner up. Raises
    OSError when the address can't be bound."""
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    for socket in await listening(host, port):
        await web.SockSite(runner, socket).start()
    return runner


class HandOverFailed(RuntimeError):
    """The other engine of a request did not come to the room, or failed; the message says why."""


class _Room:
    def __init__(self) -> None:
        self.halves = 0
        self.has_prefill = False
        self.decode_came = asyncio.Event()
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the prompt is computed."""


class BootstrapServer:
    """The rooms of one prefill engine, and the port at which decode engines enter them."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.port = 0
        self._rooms: dict[int, _Room] = {}
        self._wait_s = wait_s
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens at host and port; 0: any free port. Raises OSError when the address can't be
        bound."""
        app = web.Application()
        app.add_routes([web.post(r"/rooms/{number:\d{1,20}}", self._enter)])
        self._runner = await serve(app, host, port)
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def prefilling(self, number: int) -> AsyncIterator[None]:
        """The prefill half: the block begins once the decode half is there, and must compute the
        prompt; leaving it without an exception hands the prompt over. Raises HandOverFailed."""
        with self._inside(number) as room:
            if room.has_prefill:
                raise HandOverFailed(
                    f"room {number} of the bootstrap server has another prompt already"
                )
            room.has_prefill = True
            computed = False
            try:
                await self._decode_half(room, number)
                yield
                computed = True
            finally:
                room.over.set_result(computed)

    async def _decode_half(self, room: _Room, number: int) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await room.decode_came.wait()
        except TimeoutError:
            raise HandOverFailed(
                f"no decode engine came to room {number} within {self._wait_s:g} s"
            ) from None

    async def _enter(self, request: web.Request) -> web.Response:
        """Answers a decode engine once the prompt is computed: 200; 409: the room has a decode
        engine already; 410: the prompt failed; 504: the wait was too long."""
        with self._inside(int(request.match_info["number"])) as room:
            if room.decode_came.is_set():
                raise web.HTTPConflict
            room.decode_came.set()
            try:
                async with asyncio.timeout(self._wait_s):
                    computed = await asyncio.shield(room.over)
            except TimeoutError:
                raise web.HTTPGatewayTimeout from None
            if not computed:
                raise web.HTTPGone
            return web.Response()

    @contextmanager
    def _inside(self, number: int) -> Iterator[_Room]:
        room = self._rooms.setdefault(number, _Room())
        room.halves += 1
        try:
            yield room
        finally:
            room.halves -= 1
            if not room.halves:
                del self._rooms[number]


async def fetch(session: aiohttp.ClientSession, host: str, port: int, number: int) -> None:
    """The decode half: returns once the prefill engine has computed the prompt. Raises
    HandOverFailed."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/rooms/{number}"
    timeout = aiohttp.ClientTimeout(total=WAIT_S + _REACH_S)
    try:
        async with session.post(url, allow_redirects=False, timeout=timeout) as answer:
            if answer.status != 200:
                raise HandOverFailed(
                    f"the prefill engine at {host}:{port} did not compute the prompt of room"
                    f" {number}: {answer.reason}"
                )
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise HandOverFailed(f"no prefill engine at {host}:{port}: {why}") from error
