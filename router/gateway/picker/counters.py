"""The picker's metrics."""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter

from router.gateway.server.counters import ProgramCounters

OUTCOMES = (
    "finished", "worker_refused", "failed", "cancelled", "refused", "unobserved", "blind",
    "repeated", "observed",
)  # fmt: skip
"""finished: the answer is whole. worker_refused: the worker's 4xx. failed: the worker's 5xx, or its
stream ended with an error. cancelled: the stream broke, by the client or by a worker. refused: by a
router, or for a slow body. unobserved: the gateway shows no answers. blind: routed by load, without
a reservation. repeated: another stream's request, which a second filter of the same gateway asks
for. observed: another router serves it, and the gateway reads no answers of the picker."""


class Early(StrEnum):
    """Why a stream ended before the headers of any request."""

    TIMEOUT = "timeout"
    """Not within HEAD_TIMEOUT_S, or the call's own deadline."""
    LEFT = "left"
    """The gateway ended it."""
    MALFORMED = "malformed"
    """Its first message can't be read, or is another one."""
    STOPPING = "stopping"
    """The picker stops."""


class PickerCounters(ProgramCounters):
    """The picker's own metrics. Bytes of bodies are those that wait for their pick, or go back
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
            "Answers of another endpoint than the picked one: known: of another worker, unknown:"
            " of an endpoint that is no worker here.",
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
        """Counts from 0 what may be counted."""
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for reason in Early:
            self.early.labels(reason)
        for kind in ("plain", "tls", "refused"):
            self.connections.labels(kind)
        for endpoint in ("known", "unknown"):
            self.not_followed.labels(endpoint)
