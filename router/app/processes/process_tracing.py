"""Makes the spans of one process, and sends them to a collector."""

import asyncio
import contextlib
import random

from prometheus_client import CollectorRegistry

from router.api.desk.counters import kvroute_version
from router.config.settings.tracing_settings import TracingSettings
from router.observe.metrics.families import export
from router.observe.metrics.of_audit import span_metrics
from router.observe.tracing.export import SpanExport
from router.observe.tracing.spans import Tracing


class ProcessTracing:
    """Makes spans if a collector is configured."""

    def __init__(
        self, settings: TracingSettings, process: str, registry: CollectorRegistry
    ) -> None:
        """process: `service.name` of the spans. Raises ConfigError."""
        self._export = SpanExport.of(settings, process, kvroute_version())
        self._task: asyncio.Task[None] | None = None
        self.spans: Tracing | None = None
        """None: no request has spans."""
        if self._export is not None:
            self.spans = Tracing(self._export.record, settings.share, random.Random())
            export(registry, span_metrics, self._export)

    def start(self) -> None:
        """Begins to send spans."""
        if self._export is not None:
            self._task = asyncio.create_task(self._export.run(), name="spans")

    async def stop(self) -> None:
        """Sends the last spans. Safe before `start`."""
        if self._task is None or self._export is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        await self._export.stop()
