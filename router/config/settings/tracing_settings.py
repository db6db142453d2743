"""Spans of requests, by OpenTelemetry."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings


class TracingSettings(Settings, frozen=True):
    """Where spans go, and which requests have some."""

    endpoint: Annotated[
        str,
        Meta(
            description="OTLP collector for spans, over gRPC: http://host:4317, or https:// for"
            " TLS; empty: no spans"
        ),
    ] = ""
    ca_file: Annotated[
        str | None, Meta(description="PEM file of the collector's CAs; none: the system's")
    ] = None
    share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the requests without a traceparent that the gateway and the"
            " endpoint picker begin a trace for; others are sampled as their callers' spans are",
        ),
    ] = 0.01
