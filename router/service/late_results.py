"""Results of a stream's items that waited for a worker, sent when they come.

A stream's handler waits for the next batch most of the time, so another task writes these. gRPC
takes one message of a call at a time: each write has the call for itself.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc.aio

from router.desk.stream_items import RouteItems


class LateResults:
    """Of one RouteStream call. Wraps it: items that still wait when it ends are left."""

    def __init__(self, items: RouteItems, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self._items = items
        self._context = context
        self._one_write = asyncio.Lock()
        self._came = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        items.on_late = self._on_late

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._items.on_late = lambda: None
        self._items.close()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait((self._writer,))
            failed = None if self._writer.cancelled() else self._writer.exception()
            if failed is not None and error is None:
                raise failed

    async def write(self, results: bytes) -> None:
        """Sends a message."""
        async with self._one_write:
            await self._context.write(results)

    async def rest(self) -> None:
        """Returns once no item waits any more, and all results are sent."""
        while self._items.waiting:
            self._came.clear()
            await self._came.wait()
        if self._writer is not None:
            await self._writer

    def _on_late(self) -> None:
        self._came.set()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while (results := self._items.take_late()) is not None:
            await self.write(results)
