"""Reads the body of a request that was let in: bytes as they come, unpacked in steps.

Laws:
- a byte of the body counts once it has come, and packed bytes by what they unpack to;
- the loop gets a turn after each step of unpacking;
- time counts against the client only while its bytes are waited for.
"""

import asyncio

from aiohttp import HttpVersion11, web

from router.gateway.refusals import GatewayRefusal
from router.gateway.server.pace import too_slow, wait_s
from router.gateway.server.room import Place
from router.gateway.server.unpacking import CannotUnpack, Unpacker

UNPACKED_FREE = 1 << 20
"""Bytes of a body that are unpacked at once. The rest waits for the bodies that the same client
sent before, so that many packed bodies of one client are not large at the same time."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyReader:
    """Reads one request's body."""

    def __init__(self, request: web.Request, place: Place, encoding: str) -> None:
        """encoding: one of unpacking.ENCODINGS; empty: the body is not packed."""
        self._request = request
        self._content = request.content
        self._place = place
        self._unpacker = Unpacker(encoding) if encoding else None
        self._parts: list[bytes] = []
        self._came = 0
        """Bytes that have come, before unpacking."""
        self._waited_s = 0.0

    @property
    def taken(self) -> int:
        """Bytes so far: those that came, or what they became if that is more."""
        return max(self._came, self._place.bytes)

    async def read(self) -> bytes:
        """Reads the whole body and unpacks it; raises GatewayRefusal."""
        try:
            while chunk := await self._next():
                self._came += len(chunk)
                if self._unpacker is None:
                    self._take(chunk)
                else:
                    await self._unpack(self._unpacker, chunk)
            if self._unpacker is not None:
                self._unpacker.end()
        except CannotUnpack as error:
            raise _ending("INVALID_BODY", str(error)) from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise _ending("INVALID_BODY", f"the body can't be read: {error}") from None
        return b"".join(self._parts)

    async def _next(self) -> bytes:
        """The next bytes of the body; empty: there are no more."""
        content = self._content
        if chunk := content.read_nowait():
            return chunk
        if content.at_eof():
            return b""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout(wait_s(self._came) - self._waited_s):
                return await content.readany()
        except TimeoutError:
            message = too_slow(self._waited_s + clock() - began_s)
            raise _ending("BODY_TOO_SLOW", message) from None
        finally:
            self._waited_s += clock() - began_s

    async def _unpack(self, unpacker: Unpacker, packed: bytes) -> None:
        self._place.room.check_size(self._came)  # packed bytes may bring nothing
        steps = unpacker.steps(packed)
        for given in steps:
            self._take(given)
            await asyncio.sleep(0)
            if self._place.bytes >= UNPACKED_FREE:
                break
        async with self._place.turn:
            for given in steps:
                self._take(given)
                await asyncio.sleep(0)

    def _take(self, chunk: bytes) -> None:
        if chunk:
            self._place.add(len(chunk))
            self._parts.append(chunk)


async def go_on(request: web.Request) -> None:
    """Sends 100 Continue if the request has an `Expect`, unless bytes of the body have come."""
    content, is_old = request.content, request.version < HttpVersion11
    if "Expect" in request.headers and not (is_old or content.total_bytes or content.is_eof()):
        writer = request.writer
        await writer.write(_CONTINUE)
        writer.output_size = 0  # the answer has not begun


def _ending(reason: str, message: str) -> GatewayRefusal:
    """A refusal after which the connection is closed, since its next bytes can't be read."""
    refusal = GatewayRefusal(reason, message)
    refusal.closes = True
    return refusal
