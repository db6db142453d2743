"""A gRPC server of its own over the small HTTP/2, for handlers that grpc.aio's server takes, too.

A unary call costs it half of the CPU that it costs grpc.aio, or less: one thread, one event loop,
no task for an answer that needs no wait. Its connections: port.Http2Port.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from router.http2.calls import Call, Calls, Handler
from router.http2.gate import Gate, Open
from router.http2.port import Http2Port, ServerBounds
from router.listener.connections import Connections


class FastServer:
    """One port."""

    def __init__(
        self,
        bounds: ServerBounds,
        *,
        rng: random.Random,
        at_once: Collection[str] = (),
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        allows_plain: bool = True,
        gate: Gate | None = None,
    ) -> None:
        """rng: draws how much older or younger than age_s each connection gets. at_once: see
        Calls. gate: lets calls in by their headers; None: all. tls: in force now; None: connections
        with TLS are closed."""
        doorway = gate or Open(bounds.connection.message_max)
        self._methods: dict[str, Handler] = {}
        self._open: set[Call] = set()
        self._port = Http2Port(
            "fast_grpc",
            lambda protocol: Calls(protocol, self._methods, at_once, self._open, doorway),
            bounds,
            rng=rng,
            tls=tls,
            allows_plain=allows_plain,
        )

    @property
    def port(self) -> int:
        return self._port.port

    @property
    def connections(self) -> Connections:
        """Its open connections, and those that it closed."""
        return self._port.connections

    @property
    def calls(self) -> int:
        """Open ones."""
        return len(self._open)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """As grpc.aio's server has it."""
        self._methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self, host: str, port: int) -> None:
        """Listens; raises OSError."""
        await self._port.start(host, port)

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections and calls, and ends after the open ones and the last bytes of
        their answers, at the latest after grace_s."""
        await self._port.stop_accepting()
        self._port.go_away(last=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._open:  # noqa: ASYNC110  # ends of calls set no event
                    await asyncio.sleep(0.01)
                await self._port.until_sent()
        self._port.close()
        for call in list(self._open):
            call.reset()
        self._open.clear()
