"""Functions that make metric families for collectors, and the families that collectors share.

A shared family has its text here; each collector gives its own series, and a scrape joins them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router.observe.audit.shadow_policy import Balance

P = ParamSpec("P")
Values = Mapping[Any, float]
"""Values of series by the values of their labels, a tuple each."""


class Read(Collector):
    """Collects the families that a function returns, at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    @override
    def collect(self) -> Iterable[Metric]:
        return self._read()


def export(
    registry: CollectorRegistry,
    read: Callable[P, Iterable[Metric]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Has `read` called with these arguments at each scrape of a registry."""
    registry.register(Read(partial(read, *args, **kwargs)))


def gauge(name: str, description: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, description, value=value)


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets of a histogram. bounds: their upper bounds; counts: the numbers within each, and
    above the last."""
    named = (*map(str, bounds), "+Inf")
    return list(zip(named, map(float, accumulate(counts)), strict=True))


def counters(
    name: str, description: str, labels: Sequence[str], values: Values
) -> CounterMetricFamily:
    """A counter family with the series of `values`."""
    family = CounterMetricFamily(name, description, labels=labels)
    for names, value in values.items():
        family.add_metric(names, value)
    return family


def gauges(name: str, description: str, labels: Sequence[str], values: Values) -> GaugeMetricFamily:
    """A gauge family with the series of `values`."""
    family = GaugeMetricFamily(name, description, labels=labels)
    for names, value in values.items():
        family.add_metric(names, value)
    return family


def change(name: str, description: str, balance: Balance) -> CounterMetricFamily:
    """A counter family with two series, the gains and the losses, since a counter of their
    difference could fall.
    """
    return counter(name, description, "change", {"gain": balance.gain, "loss": balance.loss})


def counter(
    name: str, description: str, label: str, counts: Mapping[str, float], known: Iterable[str] = ()
) -> CounterMetricFamily:
    """A counter family of one label; known values start at 0, so that alerts see their first
    increase.
    """
    values = dict.fromkeys((*known, *sorted(counts)))
    return counters(name, description, [label], {(each,): counts.get(each, 0) for each in values})


def forgotten(what: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    """A counter family of entries of the table `what` that were forgotten. counts: by reason."""
    return counters(
        "kvroute_forgotten",
        "Entries of bounded tables that were forgotten: for want of room (no_room), for their age"
        " (expired), or with their worker (silent, removed). The index counts placements of blocks,"
        " working_sets sampled blocks, replica_workers workers without room in a message about our"
        " reserved load. Tables are not for adding up, reasons are.",
        ["what", "reason"],
        {(what, reason): count for reason, count in counts.items()},
    )


FAILURES = (
    "kvroute_failures",
    "Failures that end no request: of an answer that could not be sent (answer), the check of a key"
    " (key), an operator's own policy (policy, by kind; dynamo-adaptive decided), the shadow policy"
    " or decision log (watch), a round of the console, a killed child process of prompts"
    " (prompt_child, by kind), the router's relay or NATS server (relay, nats; started again).",
)
"""Name and help of the family."""


def failures(what: str, counts: Mapping[tuple[str, str], int]) -> CounterMetricFamily:
    """A counter family of failures of the part `what`. counts: by kind and policy, each empty where
    there is none."""
    values = {(what, *kind): count for kind, count in counts.items()}
    return counters(*FAILURES, ["what", "kind", "policy"], values)


def failed(what: str, count: int) -> CounterMetricFamily:
    """A counter family of failures of a part `what` that has no kinds."""
    return failures(what, {("", ""): count})


HELD = (
    "kvroute_held_bytes",
    "Bytes that this process holds: estimated memory of the index, of waiting requests (queue) and"
    " of hot_prefixes; gRPC messages over 64 KiB that are being handled (messages); bodies of"
    " requests in a gateway or an endpoint picker; by port of HTTP/2, messages and answers that"
    " wait, and open streams (connections).",
)
"""Name and help of the family."""
HELD_LABELS = ("what", "port")


def held(what: str, size: float, port: str = "") -> GaugeMetricFamily:
    """A gauge family of the bytes of one kind; port: for kind `connections` alone."""
    return gauges(*HELD, HELD_LABELS, {(what, port): size})


def held_at_most(what: str, size: float) -> GaugeMetricFamily:
    """A gauge family of the bound of `held(what)`, in bytes."""
    return gauges(
        "kvroute_held_bytes_max",
        "Bounds of kvroute_held_bytes: of the index (index.memory_mib), of the queue"
        " (queue.max_mib), of messages (128 MiB).",
        ["what"],
        {(what,): size},
    )


READS = (
    "kvroute_reads",
    "Reads of a source that changed, by result: the configuration (config), certificates and keys,"
    " keys of token issuers (issuers); and reads and writes of fleet.state_file (fleet_state).",
)
"""Name and help of the family."""
READS_LABELS = ("source", "result")


KNOWN = (
    "kvroute_known",
    "Entries of bounded tables now: sessions with a known worker, those whose last request went"
    " through another replica (sessions_elsewhere), hot_prefixes, prompts whose tokens are being"
    " made, renders at child processes, responses of /v1/responses whose worker a gateway knows,"
    " other replicas that send messages, calls of WatchWorkers (watch_calls), pages that watch the"
    " console (console_pages). Tables are not for adding up.",
)
"""Name and help of the family."""


def known(what: str, count: float) -> GaugeMetricFamily:
    """A gauge family of the number of entries in the table `what`."""
    return gauges(*KNOWN, ["what"], {(what,): count})


def records(what: str, counts: Mapping[str, int], results: Iterable[str]) -> CounterMetricFamily:
    """A counter family of one kind of records by result. results: those exported from 0 on."""
    return counters(
        "kvroute_records",
        "Lines for the decision log, and spans of sampled requests, by what became of them: sent to"
        " the disk or the collector (written, exported), dropped because too many waited, or failed"
        " there.",
        ["what", "result"],
        {(what, result): counts.get(result, 0) for result in results},
    )


REFUSALS = (
    "kvroute_refusals",
    "Requests that a program (gateway, picker) or a router refused, or whose body came too slowly,"
    " by reason.",
)
BY_LOAD = (
    "kvroute_by_load",
    "Requests that went by load alone, since the router had no tokens of them, by its reason;"
    " fault: a fault of the picker itself.",
)
OPEN_REQUESTS = (
    "kvroute_open_requests",
    "Open requests for workers in a gateway; requests under way in a picker, from their headers to"
    " the end of their answers.",
)
PICK = (
    "kvroute_pick_seconds",
    "Time until a request's first pick, tokens and the router's queue included: in a gateway from"
    " the request's head, in a picker from the whole body.",
)
"""Names and helps of the families that gateway and endpoint picker share."""


Kind = TypeVar("Kind", Counter, Gauge, Histogram)


def shared(registry: CollectorRegistry, metric: Kind) -> Kind:
    """Registers a metric of a family that others give series of, too, and returns it. A registry
    would refuse the second metric of that name, and takes any number of collectors.

    metric: made with registry=None.
    """
    export(registry, metric.collect)
    return metric
