"""Wraps every handler of the gRPC server: measures messages, and ends RPCs that fail.

Laws:
- a call is let in by its headers: without a key, or without the right, nothing of it is read;
- a message is measured and its fields are counted before protobuf builds objects of it;
- whatever a handler raises ends its own call, with INTERNAL, and no other: it is counted, and
  logged once in seldom.LOG_S for each method.
"""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from router.api.desk import statuses
from router.api.desk.counters import Metrics
from router.api.desk.methods import REPORT
from router.api.desk.request_codec import RouteMessage
from router.api.service.entrance import Entrance, short
from router.api.service.grpc_bounds import GRPC_BOUNDS, GrpcBounds
from router.api.service.inbound import InFlight, Limits
from router.net.http2.calls import Call, Handler
from router.net.http2.frames import Status
from router.net.http2.gate import RefusedError
from router.net.http2.server import Http2Server
from router.net.keys.door import Door
from router.net.keys.issuers import UnknownKeyError
from router.net.listener.seldom import Seldom
from router.request.refusal import Reason, Refusal
from router.request.wire.received import TooMuch, check_fields

FIELDS_MAX = 8192
"""Fields of a message that has no bound of its own, at most."""
REPORTS_SHARE = 8
"""Divisor of the bound of bytes in flight; the quotient bounds Report's messages, beside it."""

UNREAD = "UNREAD"
"""The reason in metrics of a stream whose client doesn't read."""

log = logging.getLogger("kvroute.grpc")

Context: TypeAlias = Call
"""The RPC that a handler answers."""


class Unread(Refusal):
    """A client does not read the messages that it is sent."""

    def __init__(self, read_s: float) -> None:
        super().__init__(
            Reason.DEADLINE_EXCEEDED,
            f"results were not read for {read_s:g} s",
        )


async def sent(context: Context, content: bytes, read_s: float) -> None:
    """Writes a message to a stream; raises Unread when the client reads nothing for read_s
    seconds.
    """
    if context.send(content):
        return
    try:
        async with asyncio.timeout(read_s):
            await context.room()
    except TimeoutError as error:
        raise Unread(read_s) from error


class Guard:
    """Checks of one server before and around its handlers: rights, sizes, and bytes in flight."""

    def __init__(
        self,
        limits: Limits,
        in_flight: InFlight,
        metrics: Metrics,
        clock: Callable[[], float] = monotonic,
        *,
        read_s: float = 20.0,
        entrance: Entrance | None = None,
    ) -> None:
        """clock: monotonic seconds. read_s: seconds in which a client must read a message of a
        stream. entrance: checks callers' keys; None: every caller is let in.
        """
        self.read_s = read_s
        self._entrance = entrance
        self.limits = limits
        self.in_flight = in_flight
        self.reports_in_flight = InFlight(in_flight.bytes_max // REPORTS_SHARE)
        """Bytes in flight of Report's messages, so that reservations end while requests hold all
        the rest."""
        self.metrics = metrics
        self._clock = clock
        self._faults: dict[str, Seldom] = {}
        """Method -> log lines about its faults."""
        self.methods: set[str] = set()
        """All methods that are served, as /package.Service/Method."""
        self._entrances: dict[str, Entrance] = {}
        """Entrances by method, of methods that need a key."""
        self._bytes_max: dict[str, int] = {}
        """Bytes of a message by method, at most: only of methods in `methods`."""

    @classmethod
    def of(
        cls,
        prompt_tokens_max: int,
        metrics: Metrics,
        door: Door | None = None,
        bounds: GrpcBounds = GRPC_BOUNDS,
    ) -> "Guard":
        """Makes the guard with the configured bounds."""
        limits = Limits(prompt_tokens_max, bounds)
        in_flight = InFlight(bounds.in_flight_mib_max << 20)
        entrance = None if door is None else Entrance(door, metrics)
        return cls(limits, in_flight, metrics, read_s=bounds.read_timeout_s, entrance=entrance)

    def use(self, prompt_tokens_max: int) -> None:
        """Puts another configured bound of prompts in force, from the next call on."""
        self.limits.use(prompt_tokens_max)
        self._bytes_max.clear()

    def add(self, server: Http2Server, service: str, handlers: Mapping[str, Handler]) -> None:
        """Registers the methods of a service at a server, each wrapped by this guard."""
        guarded = {
            name: self._guarded(f"/{service}/{name}", handler) for name, handler in handlers.items()
        }
        self.methods |= {f"/{service}/{name}" for name in guarded}
        server.add(service, guarded)

    def fault(
        self, method: str, error: BaseException, effect: str = "its call ends with INTERNAL"
    ) -> Refusal:
        """Counts a handler's exception, and logs it with its effect; returns the refusal that the
        caller gets."""
        self.metrics.calls_refused.labels(short(method), Reason.INTERNAL).inc()
        seldom = self._faults.setdefault(method, Seldom(log, logging.ERROR))
        seldom.log(self._clock(), "%s failed; %s", method, effect, error=error)
        return Refusal(Reason.INTERNAL, "the router failed on this request; its log says how")

    @contextmanager
    def message(self, method: str, content: RouteMessage) -> Iterator[None]:
        """Measures a request from this process's own gateway or picker, and counts its bytes as in
        flight meanwhile; raises Refusal, which is counted.
        """
        try:
            self.limits.of(method).check_message(content)
            with self.in_flight.hold(len(content)):
                yield
        except Refusal as refusal:
            if refusal.reason in _BY_SIZE:
                self.metrics.calls_refused.labels(short(method), refusal.reason).inc()
            raise

    # See router.net.http2.gate.Gate

    def enter(self, call: Call, method: str) -> Coroutine[Any, Any, None] | None:
        """Checks an RPC's headers; raises RefusedError. Returns a coroutine if keys of the token's
        issuer must be fetched first.
        """
        entrance = self._entrances.get(method)
        if entrance is None:
            return None
        try:
            entrance.enter_by_head(call, method)
        except UnknownKeyError as error:
            return self._enter_after(entrance, call, method, error)
        except Refusal as refusal:
            raise self._ending(call, method, refusal) from None
        return None

    def bytes_max(self, method: str) -> int:
        """Most bytes that a message of a method may have, text prompts included."""
        most = self._bytes_max.get(method)
        if most is None:
            limit = self.limits.of(method)
            most = self._bytes_max[method] = max(limit.bytes_max, limit.text_bytes_max)
        return most

    def too_large(self, call: Call, method: str, size: int) -> RefusedError:
        """The error that ends an RPC with a message of `size` bytes."""
        return self._ending(call, method, self.limits.of(method).too_large(size))

    async def _enter_after(
        self, entrance: Entrance, call: Call, method: str, unknown: UnknownKeyError
    ) -> None:
        try:
            await entrance.enter_after(call, method, unknown)
        except Exception as error:
            raise self._ending(call, method, error) from None

    def _ending(self, call: Call, method: str, error: BaseException) -> RefusedError:
        """The error that ends a call which is refused, or whose handler raised an error."""
        if isinstance(error, Unread):
            self.metrics.calls_refused.labels(short(method), UNREAD).inc()
        refusal = error if isinstance(error, Refusal) else self.fault(method, error)
        if refusal.reason in _BY_SIZE:
            self.metrics.calls_refused.labels(short(method), refusal.reason).inc()
        elif refusal.reason in _BY_KEY and self._entrance is not None:
            self._entrance.refused(method, refusal, call)
        status = rpc_status.to_status(statuses.write_status(refusal))
        return RefusedError(
            Status(status.code.value[0]), status.details, status.trailing_metadata or ()
        )

    def _guarded(self, method: str, handler: Handler) -> Handler:
        name = short(method)
        for reason in (*_BY_SIZE, Reason.INTERNAL):
            self.metrics.calls_refused.labels(name, reason)
        if not handler.response_streaming:
            if handler.request_streaming:
                raise NotImplementedError(
                    f"{method} takes a stream of requests and gives a single answer: not supported"
                )
            return grpc.unary_unary_rpc_method_handler(self._answer(method, handler))
        self.metrics.calls_refused.labels(name, UNREAD)
        limit, parse = self.limits.of(method), _reader(handler)

        def read(content: bytes) -> Any:
            limit.check(len(content))
            return parse(content)

        if not handler.request_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._answers(method, handler, handler.unary_stream, read)
            )
        if handler.request_deserializer is None:  # the handler reads and measures messages
            read_all: Callable[[Any], Any] = _same
        else:
            read_all = partial(_each, read)
        return grpc.stream_stream_rpc_method_handler(
            self._answers(method, handler, handler.stream_stream, read_all)
        )

    def _answer(self, method: str, handler: Handler) -> Callable[..., Awaitable[bytes]]:
        limit = self.limits.of(method)
        hold = (self.reports_in_flight if method == REPORT else self.in_flight).hold
        parse, write = _reader(handler), _writer(handler)
        behaviour: Any = handler.unary_unary
        entrance = self._entrance_of(method)

        async def answer(content: bytes, context: Context) -> bytes:
            try:
                if entrance is not None:
                    entrance.enter(context, len(content))
                limit.check_message(content)
                with hold(len(content)):
                    return write(await behaviour(parse(content), context))
            except (Exception, asyncio.CancelledError) as error:
                if gone(error):
                    raise
                raise self._ending(context, method, error) from None

        return answer

    def _answers(
        self, method: str, handler: Handler, behaviour: Any, read: Callable[[Any], Any]
    ) -> Callable[..., Awaitable[None]]:
        """Wraps a handler whose answer is a stream. read: makes the handler's argument of what
        came."""
        write, entrance = _writer(handler), self._entrance_of(method)

        async def answers(came: Any, context: Context) -> None:
            try:
                with _entered(entrance, context):
                    done = behaviour(read(came), context)
                    await _written(done, context, write, self.read_s)
            except (Exception, asyncio.CancelledError) as error:
                if gone(error):
                    raise
                raise self._ending(context, method, error) from None

        return answers

    def _entrance_of(self, method: str) -> Entrance | None:
        """The check of callers for a method; None: the method needs no key."""
        entrance = self._entrance
        if entrance is None or not entrance.guards(method):
            return None
        self._entrances[method] = entrance
        return entrance


def gone(error: BaseException) -> bool:
    """Whether an error only means that the RPC is over."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        # Of a task that nobody cancels it is a fault like any other.
        return task is not None and task.cancelling() > 0
    return isinstance(error, RefusedError)


def _entered(entrance: Entrance | None, context: Context) -> AbstractContextManager[object]:
    """Counts a stream of its caller while it is open; raises Refusal when too many are open."""
    return nullcontext() if entrance is None else entrance.enter(context).stream()


def _reader(handler: Handler) -> Callable[[bytes], Any]:
    """The function that makes a handler's request of a message's bytes; it raises Refusal."""
    parse = handler.request_deserializer
    if parse is None:
        return _same

    def read(content: bytes) -> Any:
        try:
            check_fields(content, FIELDS_MAX)
            return parse(content)
        except TooMuch as error:
            raise Refusal(
                Reason.INVALID_FIELD, f"the message has more than {FIELDS_MAX} fields"
            ) from error
        except (ValueError, DecodeError) as error:
            raise Refusal(Reason.INVALID_FIELD, f"the message can't be read: {error}") from error

    return read


def _writer(handler: Handler) -> Callable[[Any], bytes]:
    """The function that makes bytes of a handler's answer, which may be bytes already."""
    serialize = handler.response_serializer
    if serialize is None:
        return _same
    return lambda answer: answer if isinstance(answer, bytes) else serialize(answer)


def _same(content: Any) -> Any:
    return content


async def _each(read: Callable[[bytes], Any], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Reads the messages of a client's stream into the form that their handler takes, and yields
    them."""
    async for content in requests:
        yield read(content)


async def _written(
    done: Any, context: Context, write: Callable[[Any], bytes], read_s: float
) -> None:
    """Writes the messages that a handler yields, or awaits a handler that writes its
    own messages.
    """
    if isinstance(done, AsyncGenerator):
        async with aclosing(done):
            async for message in done:
                await sent(context, write(message), read_s)
    else:
        await done


_BY_SIZE = (
    Reason.MESSAGE_TOO_LARGE,
    Reason.TOO_MANY_BYTES,
    Reason.TOO_MANY_WATCHES,
    Reason.KEY_LIMIT,
)
_BY_KEY = (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED)


def handlers_of(
    add: Callable[[Any, Any], None], servicer: object, raw: Collection[str] = ()
) -> dict[str, Handler]:
    """The handlers that generated code registers for a servicer, by method. add: the generated
    function. raw: methods that take their messages as bytes.
    """
    collected = _Collected()
    add(servicer, collected)
    for name in raw:
        handler: Any = collected.handlers[name]
        collected.handlers[name] = handler._replace(request_deserializer=None)
    return collected.handlers


class _Collected:
    """Takes the place of a gRPC server, to collect the handlers that generated code registers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignores these handlers: add_registered_method_handlers gets the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Handler]) -> None:
        self.handlers |= handlers
