"""The picker's metrics."""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter

from router.gateway.server.counters import ProgramCounters

OUTCOMES = (
    "finished", "worker_refused", "failed", "cancelled", "refused", "unobserved", "blind",
    "repeated", "observed",
)  # fmt: skip
"""Outcomes of requests. finished: the answer is whole. worker_refused: the worker's 4xx. failed:
the worker's 5xx, or its stream ended with an error. cancelled: the stream broke, by the client or a
worker. refused: by a router, or for a slow body. unobserved: Envoy shows no answers. blind: routed
by load, without a reservation. repeated: another stream's request, for which a second filter of the
same Envoy asks. observed: another router serves it, and Envoy reads no answers of the picker."""


class Early(StrEnum):
    """Why a stream ended before the headers of any request."""

    TIMEOUT = "timeout"
    """No headers came within HEAD_TIMEOUT_S, or before the call's own deadline."""
    LEFT = "left"
    """Envoy ended the stream."""
    MALFORMED = "malformed"
    """The stream's first message can't be read, or is not a request's headers."""
    STOPPING = "stopping"
    """The picker stops."""


class PickerCounters(ProgramCounters):
    """The picker's own metrics. body_bytes counts bodies that wait for their pick, or are sent back
    after it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "picker")
        self.requests = Counter(
            "kvroute_picker_requests", "Requests by outcome.", ["outcome"], registry=registry
        )
        self.early = Counter(
            "kvroute_picker_streams_without_request",
            "Streams that ended before a request's headers, by reason: timeout, left, malformed or"
            " stopping.",
            ["reason"],
            registry=registry,
        )
        self.not_followed = Counter(
            "kvroute_picker_not_followed",
            "Answers from another endpoint than the picked one. known: that of another worker;"
            " unknown: of no worker in the picker's list.",
            ["endpoint"],
            registry=registry,
        )
        self.connections = Counter(
            "kvroute_picker_connections",
            "Connections by kind: plain, tls or refused.",
            ["kind"],
            registry=registry,
        )
        self._name_labels()

    def _name_labels(self) -> None:
        """Creates all series at 0, so that rates see each first increase."""
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for reason in Early:
            self.early.labels(reason)
        for kind in ("plain", "tls", "refused"):
            self.connections.labels(kind)
        for endpoint in ("known", "unknown"):
            self.not_followed.labels(endpoint)
