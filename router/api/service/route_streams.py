"""RouteStream calls: sends the results of items that waited for a worker, and ends streams, at
their age or when the server drains.

A stream's handler waits for the next batch most of the time, so another task writes late results.
gRPC takes one message of a call at a time: each write has the call for itself.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from router.api.desk.stream_items import TOLD_EACH_S, RouteItems
from router.api.service.calls import Context, sent


class LateResults:
    """Sends the results of items that waited, on one RouteStream call. A context manager: at its
    end items that still wait are dropped.
    """

    def __init__(
        self,
        items: RouteItems,
        context: Context,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        read_s: float = 20.0,
    ) -> None:
        """read_s: seconds in which the client must read a message."""
        self._read_s = read_s
        self._items = items
        self._sleep = sleep
        self._context = context
        self._one_write = asyncio.Lock()
        self._came = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._teller: asyncio.Task[None] | None = None
        items.on_late = self._on_late
        items.on_told = self._on_told

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._items.on_late = self._items.on_told = lambda: None
        self._items.close()
        failures = []
        for task in (self._teller, self._writer):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))
                if not task.cancelled() and (failed := task.exception()) is not None:
                    failures.append(failed)
        if failures and error is None:
            raise failures[0]

    async def write(self, results: bytes) -> None:
        """Sends a message of results, as bytes; raises Unread if the client does not read it in
        time."""
        async with self._one_write:
            await sent(self._context, results, self._read_s)

    async def rest(self) -> None:
        """Returns once no item waits any more, and all results are sent."""
        while self._items.waiting:
            self._came.clear()
            await self._came.wait()
        if self._writer is not None:
            await self._writer
        async with self._one_write:  # waits for a message that is being sent
            pass

    def _on_late(self) -> None:
        self._came.set()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while (results := self._items.take_late()) is not None:
            await self.write(results)

    def _on_told(self) -> None:
        if self._teller is None or self._teller.done():
            self._teller = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        while (results := self._items.take_told()) is not None:
            if results:
                await self.write(results)
            await self._sleep(TOLD_EACH_S)


class StreamLives:
    """The open streams of a server.

    One task waits for the server to drain, however many streams are open: an asyncio.Event looks
    through all that wait for it whenever one of them leaves, so that 10,000 streams with a wait
    each would stop the event loop for tenths of a second when they end.
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        """stopping: set when the server drains."""
        self._stopping = stopping
        self._open: set[Context] = set()
        self._end: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, call: Context, age_s: float | None) -> Iterator[None]:
        """Wraps an RPC: age_s seconds after its begin, or when the server drains, no further batch
        is read, and batches that were read are answered. age_s None: no age ends the RPC.
        """
        timer = None
        if age_s is not None:
            timer = asyncio.get_running_loop().call_later(age_s, call.end_reading)
        if self._stopping.is_set():
            call.end_reading()
        self._open.add(call)
        if self._end is None:
            # Not in the context of the call that happens to be the first.
            self._end = asyncio.create_task(self._end_all(), context=contextvars.Context())
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._open.remove(call)
            if not self._open:
                self._end.cancel()
                self._end = None

    async def _end_all(self) -> None:
        await self._stopping.wait()
        for call in self._open:
            call.end_reading()
