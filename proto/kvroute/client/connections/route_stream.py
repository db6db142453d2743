"""Route calls of many tasks as batches on one open RouteStream.

No call waits for others to fill a batch: all calls that wait when the stream is free go as one
batch. A batch holds the next batch back until the router begins to answer it, so that batches grow
with the load:

    call ──> waiting ──(stream free)──> sent ──> answer
                 ^                        │
                 └──── stream ended ──────┘

Law: every call gets its answer, its own error or its deadline; items that a stream leaves
unanswered are sent again on the next stream, which is safe because every request has an id.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from enum import Enum, auto
from typing import TypeAlias

import grpc
import grpc.aio
from typing_extensions import override

from kvroute.client.connections.route_stream_items import (
    BATCH_BYTES_MAX,
    SENDINGS_MAX,
    Item,
    RouteStreamItems,
)
from kvroute.client.errors import (
    CUT,
    ClientClosed,
    DeadlineExceeded,
    KvRouteError,
    PermissionDenied,
    Unavailable,
    broken_by,
    error_from_call,
    error_from_status,
    unreachable,
    unreadable,
)
from kvroute.client.messages.options import OnQueued, RouteBytes
from kvroute.v1 import RouteResponse, RouteResults

HOLD_S = 0.02
"""Longest that a batch holds the next batch back, seconds. The router answers every batch at once,
so only a distant router takes that long; its batches needn't grow with the distance."""
OPEN_TIMEOUT_S = 10.0
"""Longest wait for the initial metadata of a stream, seconds. A proxy that buffers a whole call
before it forwards the call never sends them."""
CLOSE_TIMEOUT_S = 1.0
"""Longest wait for the router to end a stream that has nothing more to answer, seconds."""
PAUSE_S = 1.0
"""Seconds before another stream is tried after a refused stream; doubles each time."""
PAUSE_S_MAX = 60.0

log = logging.getLogger("kvroute.client")

StreamCall: TypeAlias = grpc.aio.StreamStreamCall[bytes, RouteResults]
"""A RouteStream call. Batches go as bytes: their requests' prompts are not copied into messages."""


class _State(Enum):
    UNPROVEN = auto()
    """No stream was accepted yet, or the last stream was refused: calls go one by one meanwhile."""
    OPEN = auto()
    """A stream is open, or the last stream was accepted; the next call opens it again."""
    OFF = auto()
    """The router has no RouteStream: calls go one by one for good."""


class RouteStream:
    """The RouteStream to one router, which is opened again after its end while items wait."""

    def __init__(
        self,
        open_stream: Callable[[], StreamCall],
        items: RouteStreamItems,
        counts: Counter[str],
    ) -> None:
        """counts: `batches` and `items` written, items to be written again after a stream's end
        (`again`), `cancels`, `late` answers, `overflows`, `streams` opened, `streams_refused`;
        `stream_failures`, exceptions in the stream itself."""
        self._open_stream = open_stream
        self._items = items
        self._counts = counts
        self._state = _State.UNPROVEN
        self._called = False
        self._pause_s = PAUSE_S
        self._next_try_s = 0.0
        self._warned = False
        self._unanswered = 0
        """Number of streams in a row that ended without a message, which idle streams may do."""
        self._closed = False
        self._broken: Exception | None = None
        """The exception that ended the writing of a stream, unless it was the stream's end."""
        self._task: asyncio.Task[None] | None = None
        self._call: StreamCall | None = None
        """The stream that is open: the router has accepted it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The running loop, kept: in Python 3.11 getting it is a system call."""
        self._free = asyncio.Event()
        """Set while items wait to be written and no batch holds them back."""
        self._hold: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf
        """Time of `_alarm` on the loop's clock, no later than the first item's deadline."""
        self._newest: frozenset[int] = frozenset()
        """Indexes of the batch that holds back the next batch."""

    @override
    def __repr__(self) -> str:
        return f"<RouteStream {self._state.name.lower()}, {self._items!r}>"

    def takes(self, size: int) -> bool:
        """Whether a request of this many bytes goes over the stream now; if not, it is a call.

        Opens a stream while that call runs, but not at a program's first call, which may be its
        last.
        """
        if self._state is _State.OPEN:
            return size <= BATCH_BYTES_MAX
        if self._state is _State.UNPROVEN and self._called and not self._closed:
            due = asyncio.get_running_loop().time() >= self._next_try_s
            if due and self._task is None:
                self._start()
        return False

    def called(self) -> None:
        """Records that a call was answered without the stream."""
        self._called = True

    async def route(
        self, request: RouteBytes, timeout_s: float, on_queued: OnQueued | None = None
    ) -> RouteResponse:
        """Routes a request over the stream within timeout_s seconds; raises KvRouteError. A
        cancelled caller drops the item."""
        if self._closed:
            raise ClientClosed
        loop = self._loop = self._loop or asyncio.get_running_loop()
        answer: asyncio.Future[RouteResponse] = loop.create_future()
        try:
            item = self._items.add(request, timeout_s, loop.time(), answer, on_queued)
        except KvRouteError:
            self._counts["overflows"] += 1
            raise
        if item.deadline_s < self._alarm_s:
            self._set_alarm(item.deadline_s)
        if self._task is None:
            self._start()
        self._wake_writer()
        try:
            return await answer
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and not answer.cancelled():
                # The answer had come, but its caller won't get it.
                self._items.cancel(item.index)
            if self._items.drop(item):
                self._counts["cancels"] += 1
            self._wake_writer()
            raise
        finally:
            # An error's frames lead here, and the future has the error: a cycle with the request,
            # which a process with few looks of the collector would keep for hours.
            del answer, item

    def give_up(self, error: KvRouteError) -> int:
        """Fails all calls that wait for the router, which gets cancels for them. Returns how many
        there were."""
        items = self._items.drop_all()
        self._counts["cancels"] += len(items)
        self._fail(items, error)
        self._wake_writer()
        return len(items)

    async def close(self) -> None:
        """Ends the stream; calls that still wait raise ClientClosed.

        Without such calls the router ends the stream, after its last answer: a reset from here may
        come before the router knows that its last answer is out, and then it takes that answer
        back.
        """
        self._closed = True
        self._set_alarm(math.inf)
        task = self._task
        if task is None:
            return
        if self._call is not None and not len(self._items) and not self._items.to_write:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended
                await self._call.done_writing()
            await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
        task.cancel()
        await asyncio.wait({task})

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Runs one stream after another, while items wait.

        An exception here, also from a bug, fails the waiting calls and nothing else: the next call
        starts this task again.
        """
        broken: KvRouteError = unreachable("the stream to the router broke")
        try:
            while True:
                refused = await self._carry()
                if refused is not None:
                    self._refused(refused)
                    broken = _as_of_a_call(refused)
                    return
                self._counts["again"] += self._items.sent_count
                given_up = self._items.put_back()
                self._fail(given_up, unreachable("the router's streams end before they answer"))
                if not len(self._items):
                    return
        except Exception as failure:
            self._counts["stream_failures"] += 1
            log.warning("the stream to a router broke and is opened again", exc_info=failure)
            broken = broken_by(failure)
        finally:
            self._task = None
            self._fail(self._items.clear(), ClientClosed() if self._closed else broken)

    async def _carry(self) -> KvRouteError | None:
        """Opens a stream and reads it to its end. Returns why it was refused; None: accepted.

        The status at the end of an accepted stream is ignored, since gRPC does not always have the
        router's status: for a write that meets the router's end of the call it gives INTERNAL.
        """
        self._release()
        self._broken = None
        proven = self._state is _State.OPEN
        call = self._open_stream()
        writer = asyncio.create_task(self._write(call))
        refused: KvRouteError | None = None
        opened = answered = False
        self._unanswered += 1
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await call.initial_metadata()
            if not call.done():
                opened = True
                self._call = call
                self._state = _State.OPEN
                self._pause_s = PAUSE_S
                self._counts["streams"] += 1
            while isinstance(results := await call.read(), RouteResults):
                answered = True
                self._unanswered = 0
                self._answer(results)
        except grpc.aio.AioRpcError as failure:
            met_the_end = proven and failure.code() is grpc.StatusCode.INTERNAL
            # A refusal may come in two parts, of which the first looks like an accepted stream.
            refused_late = not answered and failure.code() not in CUT
            if (not opened and not met_the_end) or refused_late:
                refused = error_from_call(failure)
        except TimeoutError:
            message = f"a stream's opening was not answered in {OPEN_TIMEOUT_S:g} s"
            refused = DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, message)
        finally:
            self._call = None
            call.cancel()
            writer.cancel()
            await asyncio.wait({writer})
            if self._broken is not None:
                raise self._broken
        if refused is None and self._unanswered > SENDINGS_MAX:
            refused = unreachable("the router's streams end before they answer")
        return refused

    async def _write(self, call: StreamCall) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._free.wait()
                batch, indexes = self._items.batch(loop.time())
                if not self._items.full_batch:  # full batches gain nothing from waiting
                    self._hold = loop.call_later(HOLD_S, self._release)
                    self._newest = frozenset(indexes)
                self._wake_writer()
                self._counts["batches"] += 1
                self._counts["items"] += len(indexes)
                await call.write(batch)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended; the reader handles that
        except Exception as failure:
            self._broken = failure
            call.cancel()  # which ends the reading

    def _answer(self, results: RouteResults) -> None:
        taken = not results.results  # an empty message: a batch was read
        for result in results.results:
            taken = taken or result.index in self._newest
            item = self._items.sent(result.index)
            if result.HasField("waiting"):
                if item is not None and item.on_queued is not None:
                    # An exception of on_queued must not end the stream.
                    asyncio.get_running_loop().call_soon(item.on_queued, result.waiting)
                continue
            if item is None or item.answer.done():  # its caller is about to drop it
                self._counts["late"] += 1
                continue
            self._items.answered(item)
            if result.HasField("response"):
                item.answer.set_result(result.response)
            elif result.HasField("status"):
                item.answer.set_exception(error_from_status(result.status))
            else:
                item.answer.set_exception(unreadable("Route"))
        if taken:
            # After the tasks that have their answers now, so that their next calls join the batch.
            asyncio.get_running_loop().call_soon(self._release)

    def _set_alarm(self, at_s: float) -> None:
        """Sets the timer to the first item's deadline; inf: no timer."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._alarm_s = at_s
        if at_s < math.inf:
            self._alarm = asyncio.get_running_loop().call_at(at_s, self._ring)

    def _ring(self) -> None:
        over, next_s = self._items.expired(asyncio.get_running_loop().time())
        for item in over:
            if not item.answer.done():
                message = f"the request had no answer in {item.timeout_s:g} s"
                error = DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, message)
                item.answer.set_exception(error)
        self._set_alarm(next_s)

    def _release(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        self._wake_writer()

    def _wake_writer(self) -> None:
        """Wakes the writer if items wait and no batch holds them back."""
        if self._items.to_write and self._hold is None:
            self._free.set()
        else:
            self._free.clear()

    def _refused(self, error: KvRouteError) -> None:
        """A stream was refused: calls go one by one, for a while or for good."""
        self._counts["streams_refused"] += 1
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            self._state = _State.OFF
            log.warning("the router has no RouteStream, so calls go one by one: %s", error)
            return
        self._state = _State.UNPROVEN
        self._next_try_s = asyncio.get_running_loop().time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        if error.code is not grpc.StatusCode.UNAVAILABLE and not self._warned:
            self._warned = True
            log.warning("streams are refused, so calls go one by one: %s", error)

    def _fail(self, items: list[Item], error: KvRouteError) -> None:
        for item in items:
            if not item.answer.done():
                item.answer.set_exception(copy(error))  # each with a traceback of its own


def _as_of_a_call(refused: KvRouteError) -> KvRouteError:
    """The error of a call that waited for a refused stream. PermissionDenied holds for calls, too;
    after any other error the call is worth another attempt."""
    if isinstance(refused, (Unavailable, PermissionDenied)):
        return refused
    return unreachable(f"a stream was refused: {refused}")
