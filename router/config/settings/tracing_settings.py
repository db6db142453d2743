"""Spans of requests, by OpenTelemetry."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings


class TracingSettings(Settings, frozen=True):
    """Export of spans, and which requests are sampled."""

    endpoint: Annotated[
        str,
        Meta(
            description="URL of the OTLP collector that spans are sent to by gRPC:"
            " http://host:4317, or https:// for TLS; empty: no spans"
        ),
    ] = ""
    ca_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the CAs of the collector's certificate; none: the CAs of the"
            " system"
        ),
    ] = None
    share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share (0 to 1) of the requests without a traceparent header for which"
            " gateway and picker begin a trace; those with the header are sampled as it"
            " says",
        ),
    ] = 0.01
