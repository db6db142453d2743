"""Spans of requests. Pure but for `export` and `otel_spans`, which need OpenTelemetry."""
