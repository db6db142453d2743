"""Metrics of the gateway and of its kvroute.client, and those that the endpoint picker shares."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from router.gateway.server.room import Room
from router.observe.metrics.families import (
    BY_LOAD,
    HELD,
    HELD_LABELS,
    KNOWN,
    OPEN_REQUESTS,
    PICK,
    REFUSALS,
    counters,
    shared,
)
from router.observe.tracing.gateway_trace import GatewayTrace
from router.request.bodies import PATHS

PICK_S = (0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OUTCOMES = ("finished", "worker_refused", "refused", "failed", "cut", "cancelled", "observed")
"""Outcomes of requests. finished: the answer is whole. worker_refused: the worker's 4xx was passed
on. refused: by the gateway or a router. failed: no worker answered. cut: the worker failed after
the first byte. cancelled: the client left. observed: another router serves it (gateway.observe)."""

OWN_PATHS = ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/NAME")
MODEL_PATH = OWN_PATHS[-1]
OTHER_PATH = "other"
"""Label of requests for a path that the gateway does not have, and of heads that are no HTTP."""

FULL = ("TOO_MANY_REQUESTS", "TOO_MANY_BYTES")
"""Reasons of refusals at a bound on open requests or their bytes, the gateway's or one client's."""

CLIENT_NAMES = {
    "attempts": "attempts to serve a request",
    "retries": "attempts after a failed one",
    "retries_over_budget": "failures not tried again, past the retry budget",
    "retries_without_worker": "failures not tried again, with no other worker left",
    "fallback_picks": "picks by the gateway itself, without a router",
    "fallback_refused": "requests that no known worker fits, without a router",
    "outages": "times that no router could be reached",
}
"""Counter of the gateway's kvroute.client -> what it counts."""
_OWN_NAMES = {
    "moved": "requests moved away from a silent worker, before a byte of an answer",
    "unusable_hand_overs": "hand-overs after which the decode worker computed the prompt itself",
}
CLIENT = (
    "kvroute_gateway_client",
    "Counters of the gateway's client: "
    + "; ".join(f"{name}: {about}" for name, about in (CLIENT_NAMES | _OWN_NAMES).items())
    + ".",
)


class ProgramCounters:
    """The metrics that a gateway and an endpoint picker have both."""

    def __init__(self, registry: CollectorRegistry, program: str) -> None:
        """program: gateway or picker, the value of a label."""
        self.registry = registry
        self._program = program
        self.refusals = shared(registry, Counter(*REFUSALS, ["program", "reason"], registry=None))
        self.by_load = shared(registry, Counter(*BY_LOAD, ["program", "reason"], registry=None))
        opened = shared(registry, Gauge(*OPEN_REQUESTS, ["program"], registry=None))
        self.open = opened.labels(program)
        held = shared(registry, Gauge(*HELD, HELD_LABELS, registry=None))
        self.body_bytes = held.labels(f"{program}_bodies", "")
        pick = Histogram(*PICK, ["program"], buckets=PICK_S, registry=None)
        self._pick = shared(registry, pick).labels(program)

    def refused(self, reason: str) -> None:
        """Counts a refused request."""
        self.refusals.labels(self._program, reason).inc()

    def went_by_load(self, reason: str) -> None:
        """Counts a request that goes by load."""
        self.by_load.labels(self._program, reason).inc()

    def picked(self, seconds: float, trace: GatewayTrace | None) -> None:
        """Counts a pick. seconds: how long it took. trace: of the request; None: not sampled."""
        self._pick.observe(seconds, None if trace is None else trace.exemplar)


class GatewayCounters(ProgramCounters):
    """The gateway's own metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "gateway")
        self.requests = Counter(
            "kvroute_gateway_requests",
            "Requests by path and outcome.",
            ["path", "outcome"],
            registry=registry,
        )
        known = shared(registry, Gauge(*KNOWN, ["what"], registry=None))
        self.responses = known.labels("responses")
        self.sent = Counter(
            "kvroute_gateway_sent",
            "Attempts on workers, by kind: pair: a prefill worker and a decode worker get the"
            " request; with_tokens: a chat is sent with its prompt's tokens (gateway.forward).",
            ["engine", "kind"],
            registry=registry,
        )
        events = shared(registry, Counter(*CLIENT, ["name"], registry=None))
        self.unusable_hand_overs = events.labels("unusable_hand_overs")
        self.moved = events.labels("moved")
        self._begin()

    def _begin(self) -> None:
        """Creates the series at 0, which rates need before the first request."""
        for path in OWN_PATHS:
            for outcome in ("finished", "refused"):
                self.requests.labels(path, outcome)
        self.requests.labels(OTHER_PATH, "refused")
        for path in PATHS:
            for outcome in OUTCOMES:
                self.requests.labels(path, outcome)
        for reason in FULL:
            self.refusals.labels(self._program, reason)

    def watch(self, room: Room) -> None:
        """Has the gauges of open requests and of their bytes read from `room` at each scrape."""
        self.open.set_function(lambda: room.open)
        self.body_bytes.set_function(lambda: room.bytes)


def client_metrics(counts: Callable[[], Mapping[str, int]]) -> Iterator[Metric]:
    """The counters of the gateway's kvroute.client. counts: returns their values by name."""
    now = counts()
    yield counters(*CLIENT, ["name"], {(name,): now.get(name, 0) for name in CLIENT_NAMES})
