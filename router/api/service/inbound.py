"""Bounds on what callers send: bytes of a message by its method, and bytes in flight.

Laws:
- a message is measured before anything is built of it;
- bytes in flight never exceed the bound, but for one message that is alone;
- a refusal names the configuration key by which the bound grows, if there is one.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from router.api.desk.methods import EXPLAIN, RENDER, REPORT, ROUTE, ROUTE_STREAM
from router.api.desk.request_codec import RouteMessage
from router.api.desk.text_codec import TEXT_BYTES_MAX
from router.api.service.grpc_bounds import GRPC_BOUNDS, GrpcBounds
from router.request.refusal import Reason, Refusal
from router.request.wire.received import text_form

ROUTE_KIB = 8192
KIB_MAX = 65_536
ASIDE_KIB = 1024
"""KiB of a request's fields beside its prompt, at most."""
TOKEN_BYTES_MAX = 5
"""Bytes of a token id as a protobuf varint, at most."""
SMALL_BYTES = 64 * 1024
"""Bytes up to which a message is not counted as in flight: its answer takes few steps."""
RETRY_S = 0.1
_UNCOUNTED = nullcontext()


@dataclass(slots=True)
class Limit:
    """The size limit of a method's messages; Limits changes it where it stands."""

    bytes_max: int
    key: str = ""
    """The configuration key by which the limit grows; empty: it is fixed."""
    text_bytes_max: int = 0
    """Bytes of a message whose prompt is a text or a body, at most; bytes_max holds if it
    is more.
    """

    def check_message(self, content: RouteMessage) -> None:
        """Checks a Route message's size as `check` does; a prompt without tokens has a limit of its
        own.
        """
        size = len(content)
        if size <= self.bytes_max or size > self.text_bytes_max or not text_form(content):
            self.check(size)

    def check(self, size: int) -> None:
        """Raises Refusal for a message of too many bytes."""
        if size > self.bytes_max:
            raise self.too_large(size)

    def too_large(self, size: int) -> Refusal:
        """The refusal of a message of too many bytes."""
        named = f" ({self.key})" if self.key else ""
        return Refusal(
            Reason.MESSAGE_TOO_LARGE,
            f"the message has {size} bytes, the limit is {self.bytes_max}{named}",
            metadata={
                **({"key": self.key} if self.key else {}),
                "limit_bytes": str(self.bytes_max),
            },
        )


class Limits:
    """The size limits of all methods."""

    def __init__(self, prompt_tokens_max: int, bounds: GrpcBounds = GRPC_BOUNDS) -> None:
        key, text_max = "routing.prompt_tokens_max", TEXT_BYTES_MAX + (ASIDE_KIB << 10)
        self._batch_kib = bounds.batch_kib_max
        self._route, self._batch = Limit(0, key, text_max), Limit(0, key)
        self.use(prompt_tokens_max)
        self._by_method = {
            ROUTE: self._route,
            EXPLAIN: self._route,
            RENDER: self._route,
            ROUTE_STREAM: self._batch,
            REPORT: Limit(bounds.report_kib_max << 10),
        }
        self._other = Limit(bounds.other_kib_max << 10)

    def use(self, prompt_tokens_max: int) -> None:
        """Puts limits for prompts of so many tokens in force."""
        needed = min(KIB_MAX, ASIDE_KIB + TOKEN_BYTES_MAX * prompt_tokens_max // 1024)
        route_kib = max(ROUTE_KIB, needed)
        self._route.bytes_max = route_kib << 10
        self._batch.bytes_max = min(KIB_MAX, max(self._batch_kib, route_kib + ASIDE_KIB)) << 10

    def of(self, method: str) -> Limit:
        """The size limit of a method, given as /package.Service/Method."""
        return self._by_method.get(method, self._other)

    @property
    def largest(self) -> int:
        """Bytes of the largest message of any method."""
        limits = (*self._by_method.values(), self._other)
        return max(max(limit.bytes_max, limit.text_bytes_max) for limit in limits)


@dataclass(slots=True)
class InFlight:
    """Bytes of the messages that are being handled, with their bound."""

    bytes_max: int
    bytes: int = field(default=0, init=False)

    def hold(self, size: int) -> AbstractContextManager[object]:
        """Counts a message while it is handled; raises Refusal when the bytes in flight would
        exceed the bound.
        """
        if size <= SMALL_BYTES:
            return _UNCOUNTED
        return self._counted(size)

    @contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        if self.bytes and self.bytes + size > self.bytes_max:
            raise Refusal(
                Reason.TOO_MANY_BYTES,
                f"messages of {self.bytes} bytes are being handled, and {size} more would exceed"
                f" the limit of {self.bytes_max}",
                RETRY_S,
                metadata={"limit_bytes": str(self.bytes_max)},
            )
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size
