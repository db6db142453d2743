"""How long RouteStream calls go on: each until its age, and all until the server drains."""

import asyncio
import contextvars
from types import TracebackType
from typing import Any, Self

import grpc.aio

from router.service.calls import Context


class StreamLives:
    """The lives of a server's open streams.

    One task waits for the server to drain, however many streams are open: an asyncio.Event looks
    through all that wait for it whenever one of them leaves, so that 10,000 streams with a wait
    each would stop the event loop for tenths of a second when they end.
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        """stopping: set when the server drains."""
        self.stopping = stopping
        self._open: set[StreamLife] = set()
        self._end: asyncio.Task[None] | None = None

    def begin(self, age_s: float | None) -> "StreamLife":
        """A stream's life, which wraps its call. age_s: None is for ever."""
        return StreamLife(self, age_s)

    def add(self, life: "StreamLife") -> None:
        self._open.add(life)
        if self._end is None:
            # Not in the context of the call that happens to be the first.
            self._end = asyncio.create_task(self._end_all(), context=contextvars.Context())

    def remove(self, life: "StreamLife") -> None:
        self._open.remove(life)
        if not self._open and self._end is not None:
            self._end.cancel()
            self._end = None

    async def _end_all(self) -> None:
        await self.stopping.wait()
        for life in self._open:
            life.end()


class StreamLife:
    """One stream's.

    It ends a wait for the client's next message and nothing else, so what was received is answered,
    and the call ends with OK.
    """

    def __init__(self, lives: StreamLives, age_s: float | None) -> None:
        self._lives = lives
        self._age_s = age_s
        self._over = lives.stopping.is_set()
        self._reading: asyncio.Task[Any] | None = None
        """The wait for a message."""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._age_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._age_s, self.end)
        self._lives.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lives.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """The stream reads no further message; one that has just come is read, and answered."""
        self._over = True
        asyncio.get_running_loop().call_soon(self._stop_reading)

    async def read(self, context: Context) -> bytes | None:
        """The next batch; None when the client or we have had enough."""
        if self._over:
            return None
        reading = self._reading = asyncio.create_task(_read(context))
        try:
            batch = await reading
        except asyncio.CancelledError:
            call = asyncio.current_task()
            if self._over and call is not None and not call.cancelling():
                return None
            raise
        finally:
            self._reading = None
        return None if batch is grpc.aio.EOF else batch

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()


async def _read(context: Context) -> Any:
    return await context.read()
