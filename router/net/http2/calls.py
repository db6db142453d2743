"""gRPC calls on one HTTP/2 connection: from a request's headers to its handler's answer.

A handler takes bytes or an iterator of them, and a context: the call.

    HEADERS -> Gate -> Call -> a message, and the end of the request -> handler: its first step at
                                                     once; waits -> a task, ended by the deadline,
                                                                    the peer, or the server's end

A unary handler of `at_once` that needs no wait ends while its request's bytes are read, and no task
is made: asyncio.current_task() is None in its first step, so nothing in that step may need a task.

Laws:
- nothing is kept of a call that the gate refuses by its headers alone;
- a call ends once: by its answer, its abort, its deadline, its peer or the connection's end; the
  deadline counts from its headers, whether its request is whole or not;
- messages that a handler has not read hold the peer's window back; a handler that writes waits for
  the peer's room, and for the socket's.
"""

import asyncio
import base64
import logging
import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Mapping,
)
from contextvars import copy_context
from functools import cached_property
from math import inf
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from router.net.http2.frames import Status
from router.net.http2.gate import Gate, Metadata, RefusedError
from router.net.http2.received import Received
from router.net.http2.requests import PASSED, Head
from router.net.http2.sending import Stream
from router.net.http2.sockets import Http2Protocol
from router.net.listener.addresses import UNIX_CLIENT, unmapped

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

log = logging.getLogger("kvroute.grpc")


class Call(Received):
    """One gRPC call, which is also its handler's context."""

    __slots__ = (
        "_calls", "_deadline_s", "_entering", "_head", "_late", "_runs", "_task", "_unsent",
        "at_once", "entered", "handler",
    )  # fmt: skip

    def __init__(
        self,
        calls: "Calls",
        stream: Stream,
        handler: Handler,
        head: Head,
        deadline_s: float | None,
    ) -> None:
        """deadline_s: by the loop's clock; None: no deadline."""
        super().__init__(calls.protocol, stream, streams=handler.request_streaming)
        self._calls = calls
        self.handler = handler
        self._head = head
        self._deadline_s = deadline_s
        self.entered: Any = None
        """The caller, as the gate stored it; None: the gate stores none."""
        self._entering: asyncio.Task[None] | None = None
        """Task of the gate's check, while that waits for something."""
        self._task: asyncio.Task[None] | None = None
        self._runs = False
        """Whether `_task` has had its first turn; a task that is cancelled before runs nothing."""
        self._late: asyncio.TimerHandle | None = None
        self._unsent: Callable[[], None] | None = None
        self.at_once = False
        """Whether the first step of the handler is taken at once, outside a task."""

    # What handlers use of the call; some of it is grpc.aio.ServicerContext's

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 when it has passed; inf: there is none."""
        if self._deadline_s is None:
            return inf
        return max(0.0, self._deadline_s - self._calls.clock())

    def invocation_metadata(self) -> Metadata:
        """The call's metadata; values of `-bin` keys are bytes."""
        return self._head.metadata or ()

    @property
    def host(self) -> str:
        """The caller's address without the port, of which a caller may have many; of a Unix socket:
        UNIX_CLIENT."""
        return self._calls.host

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The caller's verified certificate, as ssl.SSLSocket.getpeercert gives it; None: none."""
        certificate: Mapping[str, Any] | None
        certificate = self._protocol.socket.get_extra_info("peercert")
        return certificate

    async def abort(
        self, code: Any, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """Ends the call with a status, by raising RefusedError. code: a grpc.StatusCode."""
        raise RefusedError(Status(code.value[0]), details, trailing_metadata)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Sends the headers of the answer with this metadata, if they were not sent before."""
        self._protocol.http2.accept(self._stream, _fields(metadata))
        self._protocol.flush()

    def send(self, content: bytes) -> bool:
        """Sends a message. Returns whether there is room for a further one; else await `room`.
        Raises asyncio.CancelledError once the call is over."""
        stream, protocol = self._stream, self._protocol
        if stream.finished:
            raise asyncio.CancelledError  # the peer has left: its call's task is being cancelled
        protocol.http2.send(stream, content)
        protocol.flush()
        return not stream.waiting and protocol.has_room

    async def room(self) -> None:
        """Returns once the peer and the socket have room for a message."""
        stream, protocol = self._stream, self._protocol
        if stream.waiting:
            room = asyncio.get_running_loop().create_future()
            stream.on_room = lambda: None if room.done() else room.set_result(None)
            try:
                await room
            finally:
                stream.on_room = None
        await protocol.room()

    def when_unsent(self, end: Callable[[], None]) -> None:
        """Has end() called if the answer can't be sent any more: the caller is gone, or the
        deadline passed.
        """
        self._unsent = end

    # What the connection brings

    def enter_after(self, entering: Coroutine[Any, Any, None]) -> None:
        """Awaits the gate's check, then lets the call in or ends it."""
        self._entering = asyncio.get_running_loop().create_task(entering)
        self._entering.add_done_callback(self._through)

    def _through(self, entering: "asyncio.Task[None]") -> None:
        self._entering = None
        if entering.cancelled() or self._stream.finished:
            return
        if (error := entering.exception()) is not None:
            self.failed(error)
        elif self._came is not None:
            self.begin_stream()
        elif self._ended:
            self.half_closed()

    @property
    def path(self) -> str:
        """Path of the call's method, /package.Service/Method."""
        return self._head.path

    def too_large(self, refused: RefusedError) -> None:
        """Ends the call, since a message has more bytes than its method may get."""
        self.failed(refused)
        self.reset()

    def begin_stream(self) -> None:
        """Runs the handler of a streaming request."""
        if self._entering is not None:
            return
        if not self._has_room():
            return
        handler: Any = self.handler
        if handler.response_streaming:
            self._spawn(lambda: handler.stream_stream(self._requests(), self))
        else:
            self._spawn(lambda: self._rest(handler.stream_unary(self._requests(), self)))

    def _has_room(self) -> bool:
        """Counts HANDLER_BYTES for a handler of a stream; False: they exceed the bound on held
        bytes, and the call was ended."""
        if self.keep_handler():
            return True
        self._protocol.http2.full(self._stream)
        self._protocol.flush()
        return False

    def message(self, content: bytes, *, packed: bool) -> None:
        """Takes a message of the request."""
        if self._came is None and self._content is not None:
            self._finish(Status.INTERNAL, "a unary request has more than one message")
        else:
            self.keep(content, packed=packed, waits=packed or self._entering is not None)

    def half_closed(self) -> None:
        """Called when the request is complete: runs a unary handler, or ends a handler's stream."""
        self._ended = True
        if self._came is not None:
            self._came.set()
            return
        if self._entering is not None:
            return
        if self._packed and self._content is not None:
            self._spawn(self._begin_packed)
            return
        content = self.take()
        if content is None:
            if not self._stream.finished:
                self._finish(Status.INTERNAL, "a unary request has no message")
        elif self.at_once:
            unary: Any = self.handler.unary_unary
            self._begin(unary(content, self))
        elif not self.handler.response_streaming or self._has_room():
            self._spawn(lambda: self._handled(content))

    async def _begin_packed(self) -> None:
        content = await self.take_packed()
        if content is not None and (not self.handler.response_streaming or self._has_room()):
            await self._handled(content)

    def _handled(self, content: bytes) -> Awaitable[Any]:
        """Runs the handler of a request of one message."""
        handler: Any = self.handler
        if handler.response_streaming:
            answers: Awaitable[Any] = handler.unary_stream(content, self)
            return answers
        return self._rest(handler.unary_unary(content, self))

    def reset(self) -> None:
        """Cancels the handler: its peer or connection is gone, or its deadline has passed."""
        self._close()
        if self._task is not None:
            if self._runs:
                self._task.cancel()
        elif self._unsent is not None:
            unsent, self._unsent = self._unsent, None
            unsent()

    # The handler's life

    def _begin(self, answer: Coroutine[Any, Any, bytes]) -> None:
        """Runs a unary handler up to its first wait, and the rest, if there is any, in a task."""
        context = copy_context()
        try:
            awaited = context.run(answer.send, None)
        except StopIteration as done:
            self._answer(done.value)
        except (Exception, asyncio.CancelledError) as error:
            self.failed(error)
        else:
            self._spawn(lambda: self._rest(_resumed(answer, awaited)), context)

    async def _rest(self, answer: Awaitable[bytes]) -> None:
        content = await answer
        self._task = None
        self._answer(content)

    def _answer(self, content: bytes) -> None:
        self._close()
        stream, protocol = self._stream, self._protocol
        if stream.finished:
            self.reset()
            return
        stream.unsent, self._unsent = self._unsent, None  # from here on it is the connection's
        self._calls.over(stream)
        protocol.http2.reply(stream, content)
        protocol.flush()

    def _spawn(self, work: Callable[[], Awaitable[Any]], context: Any = None) -> None:
        """Runs `work` as the call's task. context: that of contextvars in which a first step was
        taken; None: none was."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(work, begun=context is not None), context=context)

    async def _run(self, work: Callable[[], Awaitable[Any]], *, begun: bool) -> None:
        self._runs = True
        try:
            if self._stream.finished and self._task is not None:  # before the task's first turn
                if not begun:
                    return
                self._task.cancel()
            await work()
        except (Exception, asyncio.CancelledError) as error:
            self.failed(error)
        else:
            self._finish(Status.OK)
        finally:
            self._task = None

    def await_deadline(self) -> None:
        """Sets a timer that ends the call at its deadline, if the call is still open."""
        if self._deadline_s is not None and not self._stream.finished:
            loop = asyncio.get_running_loop()
            self._late = loop.call_at(self._deadline_s, self._past_deadline)

    def _past_deadline(self) -> None:
        self._finish(Status.DEADLINE_EXCEEDED, PASSED)
        self.reset()

    def failed(self, error: BaseException) -> None:
        """Ends the call by an exception of its handler, or of the gate."""
        if isinstance(error, RefusedError):
            self._finish(error.status, error.message, error.metadata)
        elif isinstance(error, asyncio.CancelledError):
            self._finish(Status.CANCELLED, "the call was cancelled")
        else:
            log.error("the handler of a gRPC call failed", exc_info=error)
            self._finish(Status.UNKNOWN, "the handler failed")

    def _finish(self, status: Status, message: str = "", metadata: Metadata = ()) -> None:
        self._close()
        self._protocol.http2.finish(self._stream, status, message, _fields(metadata))
        self._protocol.flush()
        self._calls.over(self._stream)

    def _close(self) -> None:
        """Drops what the call keeps, since it is over, or about to be."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._entering is not None:
            self._entering.cancel()
            self._entering = None
        self.drop()

    async def _requests(self) -> AsyncIterator[bytes]:
        while (content := await self.read()) is not grpc.aio.EOF:
            yield content


class Calls:
    """The gRPC calls of one connection."""

    def __init__(
        self,
        protocol: Http2Protocol,
        methods: Mapping[str, Handler],
        at_once: Collection[str],
        open_calls: set[Call],
        gate: Gate,
    ) -> None:
        """methods: /package.Service/Method -> handler. at_once: unary methods whose handlers' first
        steps need no task. open_calls: set of the open calls of all connections. gate: checks the
        headers of each call.
        """
        self.protocol = protocol
        self.clock = asyncio.get_running_loop().time
        self._methods = methods
        self._at_once = at_once
        self._open = open_calls
        self._gate = gate

    @cached_property
    def host(self) -> str:
        """See Call.host."""
        name = self.protocol.socket.get_extra_info("peername")
        if isinstance(name, tuple):
            return unmapped(name[0])
        return UNIX_CLIENT if isinstance(name, (str, bytes)) else "?"  # it is gone already

    def opened(self, stream: Stream, head: Head) -> None:
        """See streams.Service."""
        path = head.path
        handler = self._methods.get(path)
        if handler is None:
            self._refuse(stream, Status.UNIMPLEMENTED, f"there is no method {path[:200]}")
            return
        if head.metadata is None:
            self._refuse(stream, Status.INTERNAL, "the value of a -bin metadata key is no base64")
            return
        if head.timeout_fault:
            self._refuse(stream, Status.INTERNAL, head.timeout_fault)
            return
        deadline_s = None if head.timeout_s is None else self.clock() + head.timeout_s
        call = stream.call = Call(self, stream, handler, head, deadline_s)
        self._open.add(call)
        stream.bytes_max = self._gate.bytes_max(path)
        call.at_once = path in self._at_once
        try:
            entering = self._gate.enter(call, path)
        except RefusedError as refused:
            call.failed(refused)
            return
        if entering is not None:
            call.enter_after(entering)
        if deadline_s is not None:
            self.protocol.timed.append(call)
        if handler.request_streaming:
            call.begin_stream()

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None:
        """See streams.Service."""
        if stream.call is not None:
            stream.call.message(content, packed=packed)

    def too_large(self, stream: Stream, size: int) -> None:
        """See streams.Service."""
        call = stream.call
        if call is not None:
            call.too_large(self._gate.too_large(call, call.path, size))

    def half_closed(self, stream: Stream) -> None:
        """See streams.Service."""
        if stream.call is not None:
            stream.call.half_closed()

    def reset(self, stream: Stream) -> None:
        """See streams.Service."""
        call = stream.call
        if call is not None:
            self.over(stream)
            call.reset()

    def over(self, stream: Stream) -> None:
        """Forgets a stream's call, which has ended."""
        call, stream.call = stream.call, None
        self._open.discard(call)

    def _refuse(self, stream: Stream, status: Status, message: str) -> None:
        self.protocol.http2.finish(stream, status, message)
        self.protocol.flush()


@types.coroutine
def _resumed(work: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
    """Runs a coroutine on from its first wait to its end. awaited: what it waits for there."""
    while True:
        try:
            value = yield awaited
        except BaseException as error:
            step: Callable[..., Any] = work.throw
            given: Any = error
        else:
            step, given = work.send, value
        try:
            awaited = step(given)
        except StopIteration as done:
            return done.value
        finally:
            given = None


def _fields(metadata: Metadata) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), _packed(name, value)) for name, value in metadata]


def _packed(name: str, value: str | bytes) -> bytes:
    if name.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        return base64.b64encode(raw).rstrip(b"=")
    return value if isinstance(value, bytes) else value.encode(errors="replace")
