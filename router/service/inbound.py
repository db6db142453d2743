"""How much of what callers send is taken: bytes of a message by its method, and bytes in flight.

Laws:
- a message is measured before anything is built of it;
- bytes in flight never exceed the bound, but for one message that is alone;
- a refusal names the configuration key that it comes from.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from router.config.settings.serving_settings import GrpcSettings
from router.desk.methods import EXPLAIN, RENDER, REPORT, ROUTE, ROUTE_STREAM
from router.desk.request_codec import RouteMessage
from router.desk.text_codec import TEXT_BYTES_MAX
from router.request.refusal import Reason, Refusal
from router.wire.received import text_form

ROUTE_KIB = 8192
BATCH_KIB = 16_384
KIB_MAX = 65_536
ASIDE_KIB = 1024
"""What a request may hold beside its prompt."""
TOKEN_BYTES_MAX = 5
"""A token id as a varint."""
SMALL_BYTES = 64 * 1024
"""A message up to this size is not counted as in flight: its answer takes a few steps at most."""
RETRY_S = 0.1
_UNCOUNTED = nullcontext()


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest message of a method."""

    bytes_max: int
    key: str
    text_bytes_max: int = 0
    """Of a message whose prompt is a text or a body; less than bytes_max: no more than others."""

    def check_message(self, content: RouteMessage) -> None:
        """As `check`; a prompt without tokens has a limit of its own."""
        size = len(content)
        if size <= self.bytes_max or size > self.text_bytes_max or not text_form(content):
            self.check(size)

    def check(self, size: int) -> None:
        """Raises Refusal for a message of too many bytes."""
        if size > self.bytes_max:
            raise self.too_large(size)

    def too_large(self, size: int) -> Refusal:
        """Of a message of too many bytes."""
        return Refusal(
            Reason.MESSAGE_TOO_LARGE,
            f"the message has {size} bytes, the limit is {self.bytes_max} ({self.key})",
            metadata={"key": self.key, "limit_bytes": str(self.bytes_max)},
        )


class Limits:
    """The limit of every method."""

    def __init__(self, settings: GrpcSettings, prompt_tokens_max: int) -> None:
        needed = min(KIB_MAX, ASIDE_KIB + TOKEN_BYTES_MAX * prompt_tokens_max // 1024)
        route = settings.route_kib_max or max(ROUTE_KIB, needed)
        explain = settings.explain_kib_max or route
        batch = settings.batch_kib_max or min(KIB_MAX, max(BATCH_KIB, route + ASIDE_KIB))
        self._mib_max = settings.max_message_mib
        self._by_method = {
            ROUTE: self._with_text(
                self._limit(route, "grpc.route_kib_max"), settings.route_kib_max
            ),
            EXPLAIN: self._with_text(
                self._limit(explain, "grpc.explain_kib_max"),
                settings.explain_kib_max or settings.route_kib_max,
            ),
            RENDER: self._with_text(
                self._limit(route, "grpc.route_kib_max"), settings.route_kib_max
            ),
            ROUTE_STREAM: self._limit(batch, "grpc.batch_kib_max"),
            REPORT: self._limit(settings.report_kib_max, "grpc.report_kib_max"),
        }
        self._other = self._limit(settings.message_kib_max, "grpc.message_kib_max")

    def of(self, method: str) -> Limit:
        """method: /package.Service/Method."""
        return self._by_method.get(method, self._other)

    @property
    def largest(self) -> int:
        """Bytes of the largest message of any method."""
        limits = (*self._by_method.values(), self._other)
        return max(max(limit.bytes_max, limit.text_bytes_max) for limit in limits)

    def _with_text(self, limit: Limit, configured_kib: int | None) -> Limit:
        """With the limit for texts and bodies, where the key that bounds all messages isn't set."""
        if configured_kib:
            return limit
        most = TEXT_BYTES_MAX + (ASIDE_KIB << 10)
        if self._mib_max is not None:
            most = min(most, self._mib_max << 20)
        return replace(limit, text_bytes_max=most)

    def _limit(self, kib: int, key: str) -> Limit:
        if self._mib_max is not None and self._mib_max * 1024 < kib:
            return Limit(self._mib_max << 20, "grpc.max_message_mib")
        return Limit(kib << 10, key)


@dataclass(slots=True)
class InFlight:
    """The bytes of the messages that are being handled."""

    bytes_max: int
    bytes: int = field(default=0, init=False)

    def hold(self, size: int) -> AbstractContextManager[object]:
        """Counts a message while it is handled; raises Refusal when there are too many bytes."""
        if size <= SMALL_BYTES:
            return _UNCOUNTED
        return self._counted(size)

    @contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        if self.bytes and self.bytes + size > self.bytes_max:
            raise Refusal(
                Reason.TOO_MANY_BYTES,
                f"messages of {self.bytes} bytes are being handled, and {size} more would exceed"
                f" {self.bytes_max} (grpc.in_flight_mib_max)",
                RETRY_S,
                metadata={"key": "grpc.in_flight_mib_max", "limit_bytes": str(self.bytes_max)},
            )
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size
