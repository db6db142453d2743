"""Sends spans to an OpenTelemetry collector, by OTLP over gRPC.

    Span -> queue, bounded -> a batch a second -> OTLPSpanExporter, in a thread

Law: a collector that is away, or slow, costs requests nothing: what is over the bound is dropped
and counted, and what can't be sent is lost and counted.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from router.config.keys import ConfigError
from router.config.settings.tracing_settings import TracingSettings
from router.observe.tracing.otel_spans import converter
from router.observe.tracing.spans import Span

EVERY_S = 1.0
"""Seconds between two batches."""
BATCH_MAX = 512
"""Most spans of a batch."""
SPANS_MAX = 4096
"""Most spans that wait for the collector; more are dropped."""
EXPORT_TIMEOUT_S = 5.0
"""Time limit of one batch with its retries, seconds."""
LAST_S = 2.0
"""Most seconds for sending the spans that wait when the process ends."""
RESULTS = ("exported", "failed", "dropped")
EXTRA = "pip install 'kvroute[otel]'"

log = logging.getLogger("kvroute.tracing")

Send = Callable[[Sequence[Span]], bool]
"""Sends a batch and says whether the collector took it; blocks its thread."""


class SpanExport:
    """The spans of one process that wait to be sent to a collector."""

    def __init__(self, send: Send, spans_max: int = SPANS_MAX) -> None:
        self._send = send
        self._spans_max = spans_max
        self._queue: deque[Span] = deque()
        self._failing = False
        self.counts = Counter(dict.fromkeys(RESULTS, 0))

    @classmethod
    def of(cls, settings: TracingSettings, process: str, version: str) -> "SpanExport | None":
        """Makes the configured export; None: no endpoint is set. process: `service.name` of the
        spans. Raises ConfigError for an invalid endpoint, a CA file that can't be read, and where
        OpenTelemetry is not installed.
        """
        if not settings.endpoint:
            return None
        return cls(_otlp(settings, process, version))

    def __len__(self) -> int:
        return len(self._queue)

    def record(self, span: Span) -> None:
        """Queues a span; never waits."""
        if len(self._queue) >= self._spans_max:
            self.counts["dropped"] += 1
        else:
            self._queue.append(span)

    async def run(self) -> None:
        """Sends queued spans, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Sends all queued spans, batch by batch; stops at a batch that the collector refuses."""
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
            try:
                taken = await asyncio.to_thread(self._sent, batch)
            except asyncio.CancelledError:  # the thread goes on, and nobody hears what came of it
                self.counts["failed"] += len(batch)
                raise
            self.counts["exported" if taken else "failed"] += len(batch)
            if taken and self._failing:
                log.info("the collector takes spans again")
            self._failing = not taken
            if not taken:
                return

    async def stop(self) -> None:
        """Sends the last spans, for LAST_S at most; the others count as failed."""
        try:
            async with asyncio.timeout(LAST_S):
                await self.flush()
        except TimeoutError:
            log.warning("the collector did not take the last spans in %g s", LAST_S)
        self.counts["failed"] += len(self._queue)
        self._queue.clear()

    def _sent(self, batch: Sequence[Span]) -> bool:
        try:
            taken = self._send(batch)
        except Exception as error:  # a fault of the exporter costs spans, and no request
            if not self._failing:
                log.warning("spans can't be exported: %s: %s", type(error).__name__, error)
            return False
        if not taken and not self._failing:
            log.warning("the collector takes no spans; requests go on without spans")
        return taken


def _otlp(settings: TracingSettings, process: str, version: str) -> Send:
    """A function that sends spans by OpenTelemetry's own exporter. Raises ConfigError."""
    try:
        import grpc
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        readable = converter(process, version)
    except ImportError as error:
        raise ConfigError(f"{error}: {EXTRA} - at `$.tracing.endpoint`") from error
    parts = urlsplit(settings.endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(
            f"{settings.endpoint!r} is no http://host:port or https://host:port"
            " - at `$.tracing.endpoint`"
        )
    credentials: Any = None
    if parts.scheme == "https":
        try:
            authorities = Path(settings.ca_file).read_bytes() if settings.ca_file else None
        except OSError as error:
            message = f"{settings.ca_file}: {error.strerror} - at `$.tracing.ca_file`"
            raise ConfigError(message) from error
        if authorities == b"":  # which would stand for the system's CAs
            raise ConfigError(f"{settings.ca_file} is empty - at `$.tracing.ca_file`")
        credentials = grpc.ssl_channel_credentials(authorities)
    exporter = OTLPSpanExporter(
        settings.endpoint,
        insecure=credentials is None,
        credentials=credentials,
        timeout=EXPORT_TIMEOUT_S,
    )

    def send(batch: Sequence[Span]) -> bool:
        result = exporter.export([readable(span) for span in batch])
        return result is SpanExportResult.SUCCESS

    return send
