"""The gRPC methods on the picker's port: ext_proc's, and health by all names that proxies ask for.

/envoy.service.ext_proc.v3.ExternalProcessor/Process
/grpc.health.v1.Health/Check, /grpc.health.v1.Health/Watch
"""

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from router.gateway.picker.picks import PickedRequest, Picker
from router.gateway.picker.repeats import Repeats
from router.net.http2.frames import Status
from router.net.http2.requests import Head
from router.net.http2.sending import Stream
from router.net.http2.sockets import Http2Protocol
from router.net.listener.seldom import Seldom

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS = f"/{EXT_PROC}/Process"
HEALTH = "/grpc.health.v1.Health/"
LIVENESS = "liveness"
READY_NAMES = ("", "readiness", EXT_PROC, "inference-extension")
"""Names of services whose health is the picker's, as llm-d, GKE and the protocol name them."""

_HEALTH_BYTES = 1 << 16
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

log = logging.getLogger("kvroute.picker")
_broken = Seldom(log)
"""Log line, written seldom, for messages that can't be read."""
_faults = Seldom(log, logging.ERROR)
"""Log line, written seldom, for messages at which the picker failed."""


class Health:
    """The picker's serving state, for all connections."""

    def __init__(self) -> None:
        self.serving = False
        self.watchers: dict[Stream, Calls] = {}

    def set(self, *, serving: bool) -> None:
        """Sets the state, and sends it to all clients that watch."""
        if serving == self.serving:
            return
        self.serving = serving
        for stream, calls in list(self.watchers.items()):
            name = stream.call
            if isinstance(name, str) and name != LIVENESS:
                calls.send(stream, self.of(name))

    def of(self, name: str) -> bytes:
        """Bytes of a service's HealthCheckResponse; raises KeyError for an unknown name."""
        if name != LIVENESS and name not in READY_NAMES:
            raise KeyError(name)
        status = _SERVING if self.serving or name == LIVENESS else _NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status).SerializeToString()


class _Channel:
    """One stream of a connection, as a Channel (picks.py)."""

    __slots__ = ("_calls", "_stream")

    def __init__(self, calls: "Calls", stream: Stream) -> None:
        self._calls, self._stream = calls, stream

    def send(self, message: bytes) -> None:
        self._calls.send(self._stream, message)

    def close(self) -> None:
        self._calls.finish(self._stream)

    def end(self, status: Status, about: str) -> None:
        self._calls.abandon(self._stream, self._stream.call, status, about)

    def when_room(self, go_on: Callable[[], None]) -> None:
        stream, loop = self._stream, asyncio.get_running_loop()

        def on_room() -> None:
            stream.on_room = None
            loop.call_soon(go_on)

        self._calls.hold(stream, held=True)
        if stream.waiting:
            stream.on_room = on_room
        else:
            on_room()

    def resume(self) -> None:
        self._calls.hold(self._stream, held=False)


class Calls:
    """The gRPC calls of one connection."""

    def __init__(self, protocol: Http2Protocol, picker: Picker, health: Health) -> None:
        self._protocol = protocol
        self._picker = picker
        self._health = health
        self._repeats = Repeats()

    def send(self, stream: Stream, message: bytes) -> None:
        """Queues a message; messages of the same turn of the loop are written together."""
        self._protocol.http2.send(stream, message)
        self._protocol.flush()

    def opened(self, stream: Stream, head: Head) -> None:
        """Begins a call by its method: see streams.Service."""
        path = head.path
        if head.encoding != "identity":
            self.finish(stream, Status.UNIMPLEMENTED, "grpc-encoding must be identity on this port")
        elif path == PROCESS:
            self._process(stream, head)
        elif path in (HEALTH + "Check", HEALTH + "Watch"):
            stream.bytes_max = _HEALTH_BYTES
            stream.call = path
        else:
            self.finish(stream, Status.UNIMPLEMENTED, f"there is no method {path[:200]}")

    def _process(self, stream: Stream, head: Head) -> None:
        if head.timeout_fault:
            self.finish(stream, Status.INTERNAL, head.timeout_fault)
            return
        timeout_s = inf if head.timeout_s is None else head.timeout_s
        due_s = asyncio.get_running_loop().time() + timeout_s
        call = PickedRequest(self._picker, _Channel(self, stream), self._repeats, due_s)
        stream.call = call
        self._protocol.timed.append(call)

    def too_large(self, stream: Stream, size: int) -> None:
        """Ends a call whose message is too large: see streams.Service."""
        about = f"a message of {size} bytes; {stream.bytes_max} bytes are the most"
        self._protocol.http2.end(stream, Status.RESOURCE_EXHAUSTED, about)

    def message(self, stream: Stream, content: bytes, *, packed: bool) -> None:
        """Handles a message of a call: see streams.Service."""
        if packed:
            about = "a compressed message of a call without a grpc-encoding"
            self._protocol.http2.end(stream, Status.INTERNAL, about)
            return
        call: Any = stream.call
        if isinstance(call, PickedRequest):
            try:
                call.message(content)
            except ValueError as error:
                now_s = asyncio.get_running_loop().time()
                _broken.log(now_s, "%s: %s", self._protocol.peer, error)
                call.malformed(str(error))
            except Exception as error:
                now_s = asyncio.get_running_loop().time()
                _faults.log(now_s, "a message of Envoy's was not answered", error=error)
                self.abandon(stream, call, Status.INTERNAL, "the picker failed")
        elif isinstance(call, str) and call.startswith(HEALTH):
            self._check(stream, content, watches=call.endswith("Watch"))

    def half_closed(self, stream: Stream) -> None:
        """Handles the end of the messages of a call: see streams.Service."""
        call = stream.call
        if isinstance(call, PickedRequest):
            call.half_closed()
            if call.is_over:
                call.left()
        elif isinstance(call, str) and call.startswith(HEALTH):
            self.finish(stream, Status.INTERNAL, "a unary request without a message")

    def reset(self, stream: Stream) -> None:
        """Handles the end of a broken call: see streams.Service."""
        call = stream.call
        if isinstance(call, PickedRequest):
            call.reset()
            call.left()
        else:
            self._health.watchers.pop(stream, None)

    def hold(self, stream: Stream, *, held: bool) -> None:
        """Sets whether Envoy may send on a stream no more than its window has room for."""
        if not stream.finished:
            self._protocol.http2.hold(stream, held=held)
            self._protocol.flush()

    def abandon(self, stream: Stream, call: PickedRequest, status: Status, message: str) -> None:
        """Ends a stream and its request with an error."""
        call.reset()
        call.left()
        self.finish(stream, status, message)

    def _check(self, stream: Stream, content: bytes, *, watches: bool) -> None:
        try:
            name = health_pb2.HealthCheckRequest.FromString(content).service
        except DecodeError:
            self.finish(stream, Status.INVALID_ARGUMENT, "the message is no HealthCheckRequest")
            return
        try:
            answer = self._health.of(name)
        except KeyError:
            if watches:  # as gRPC's health protocol has it: unknown for now, and the call stays
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                unknown = health_pb2.HealthCheckResponse(status=status)
                self.send(stream, unknown.SerializeToString())
                stream.call = None
                return
            self.finish(stream, Status.NOT_FOUND, f"there is no service {name[:200]!r}")
            return
        self.send(stream, answer)
        if watches:
            stream.call = name
            self._health.watchers[stream] = self
        else:
            self.finish(stream)

    def finish(self, stream: Stream, status: Status = Status.OK, message: str = "") -> None:
        """Ends this side of a stream, after the messages that were sent before."""
        call = stream.call
        self._protocol.http2.finish(stream, status, message)
        self._protocol.flush()
        if isinstance(call, PickedRequest) and call.is_over:
            call.left()
