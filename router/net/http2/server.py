"""The gRPC server: methods and their calls on a port (port.Http2Port).

One thread, one event loop, no task for an answer that needs no wait.

Law: a handler that needs something which calls.Call does not have is refused when its method is
added, not when that is called.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from inspect import isasyncgenfunction

from router.net.http2.calls import Call, Calls, Handler
from router.net.http2.gate import Gate, Open
from router.net.http2.port import Http2Port, ServerBounds


class Http2Server(Http2Port):
    """A gRPC server on one port, and on a Unix socket beside it."""

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
        """rng: draws by how much each connection's age differs from age_s. at_once: see Calls.
        gate: checks calls' headers; None: all calls are let in. tls: returns the present context;
        None: connections with TLS are closed.
        """
        doorway = gate or Open(bounds.connection.message_max)
        self._methods: dict[str, Handler] = {}
        self._calls: set[Call] = set()
        """The open calls of all connections."""
        super().__init__(
            "grpc",
            lambda protocol: Calls(protocol, self._methods, at_once, self._calls, doorway),
            bounds,
            rng=rng,
            tls=tls,
            allows_plain=allows_plain,
        )

    @property
    def calls(self) -> int:
        """Number of open calls."""
        return len(self._calls)

    def add(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Registers the methods of a service; their handlers take and give bytes. Raises
        NotImplementedError for a handler that yields its answers, or that takes or gives other
        objects than bytes.
        """
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            if any(map(isasyncgenfunction, (handler.unary_stream, handler.stream_stream))):
                raise NotImplementedError(
                    f"the handler of {method} yields its answers; it must use `Call.send`"
                )
            if handler.request_deserializer or handler.response_serializer:
                raise NotImplementedError(
                    f"the handler of {method} takes or gives other objects than bytes"
                )
            self._methods[method] = handler

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections and calls, and stops after the open calls and the last bytes of
        their answers, or after grace_s.
        """
        await self.stop_accepting()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.farewell()
                while self._calls:  # noqa: ASYNC110  # ends of calls set no event
                    await asyncio.sleep(0.01)
                await self.until_read()
        self.close()
        for call in list(self._calls):
            call.reset()
        self._calls.clear()
