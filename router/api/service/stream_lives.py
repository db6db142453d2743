"""Ends RouteStream calls: each at its age, and all when the server drains."""

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

from router.api.service.calls import Context


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
        """Wraps an RPC: at its age, or when the server drains, received batches are answered, and
        no further one is read. age_s None: no age ends it.
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
