"""The counters that a router keeps while it serves calls."""

from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from router.decide.core.counts import Counts
from router.decide.core.tally import (
    BUCKETS_S,
    RATIO_DECISIONS,
    TIERS,
    PickTally,
)
from router.fleet.answers import LENGTHS, POOLS_MAX
from router.observe.metrics.families import (
    READS,
    READS_LABELS,
    buckets,
    export,
    failed,
    held,
    held_at_most,
    known,
    shared,
)
from router.request.refusal import Reason

OUTCOMES = ("picked", "repeated", "refused", "explained", "cancelled")


class Metrics:
    """All metrics that a router exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Declares each metric once, with its name and help."""
        self.registry = registry
        self.requests = Counter(
            "kvroute_requests",
            "Requests by outcome; reason is empty unless refused.",
            ["outcome", "reason"],
            registry=None,
        )
        """Requests by outcome and reason. The outcome `picked` is missing: `tally` counts it."""
        self.cached_tokens = Counter(
            "kvroute_cached_tokens",
            "Cached tokens that engines reported for routed requests (reported), that the index had"
            " predicted for the same requests (predicted), and by how much each prediction was over"
            " or under; kinds are not for adding up.",
            ["kind"],
            registry=registry,
        )
        for kind in ("reported", "predicted", "over", "under"):
            self.cached_tokens.labels(kind)
        self.reads = shared(registry, Counter(*READS, READS_LABELS, registry=None))
        self.calls_refused = Counter(
            "kvroute_calls_refused",
            "gRPC calls and messages refused before a decision: for their size, or for the bytes or"
            " calls open already; for their key (UNAUTHENTICATED) or its rights"
            " (PERMISSION_DENIED); for a fault of the router, which the log has (INTERNAL).",
            ["method", "reason"],
            registry=registry,
        )
        self.answers_unsent = 0
        """Answers of Route, and of RouteStream's items, that could not be sent; their reservations
        ended at once."""
        self.bytes_in_flight: Callable[[], float] = float
        """Returns the bytes of gRPC messages over 64 KiB that are being handled."""
        self.bytes_in_flight_max = 0
        """Bound of `bytes_in_flight`, in bytes."""
        self.watches: Callable[[], float] = float
        """Returns the number of open WatchWorkers calls."""
        for result in ("ok", "failed"):
            self.reads.labels("config", result)
        self.index_bytes_max = 0
        """Bytes that the index may take up (index.memory_mib)."""
        self.tally = PickTally()
        self.counts = Counts(self.tally)
        export(registry, _of_picks, self.tally, self.requests)
        export(registry, _plain, self)
        for outcome in OUTCOMES:
            if outcome not in {"picked", "refused"}:
                self.requests.labels(outcome, "")
        for reason in Reason:
            if reason is not Reason.CANCELLED:  # an outcome of its own
                self.requests.labels("refused", reason)
        process_metrics(registry)

    def follow(
        self,
        bytes_in_flight: Callable[[], float],
        bytes_in_flight_max: int,
        watches: Callable[[], float],
    ) -> None:
        """Sets the functions that gauges call at each scrape, and the bound of the bytes
        in flight."""
        self.bytes_in_flight, self.bytes_in_flight_max = bytes_in_flight, bytes_in_flight_max
        self.watches = watches

    def cache_reported(self, predicted: int, reported: int) -> None:
        """Counts an engine's report of a request's cached tokens. predicted: the router's
        prediction in its answer."""
        self.cached_tokens.labels("reported").inc(reported)
        self.cached_tokens.labels("predicted").inc(predicted)
        direction = "over" if predicted > reported else "under"
        self.cached_tokens.labels(direction).inc(abs(predicted - reported))

    def refusals(self) -> dict[str, int]:
        """Number of refused requests by reason, without reasons that never occurred."""
        return {
            sample.labels["reason"]: int(sample.value)
            for family in self.requests.collect()
            for sample in family.samples
            if sample.value
            and sample.labels["outcome"] == "refused"
            and sample.name.endswith("_total")
        }


def _plain(metrics: Metrics) -> Iterator[Metric]:
    """Yields numbers of this class as series of metric families that other parts of the router use,
    too."""
    yield failed("answer", metrics.answers_unsent)
    yield held("messages", metrics.bytes_in_flight())
    yield held_at_most("messages", metrics.bytes_in_flight_max)
    yield held_at_most("index", metrics.index_bytes_max)
    yield known("watch_calls", metrics.watches())


def kvroute_version() -> str:
    """The installed version of kvroute."""
    return version("kvroute")


def process_metrics(registry: CollectorRegistry) -> None:
    """Registers the metrics that every process has: its version, memory, CPU and files."""
    build = Gauge("kvroute_build_info", "Always 1.", ["version"], registry=registry)
    build.labels(kvroute_version()).set(1)
    ProcessCollector(registry=registry)


def _of_picks(tally: PickTally, requests: Counter) -> Iterator[Metric]:
    """Yields the metrics of a tally of picks, and the requests by outcome, with the outcome
    `picked`.
    """
    for family in requests.collect():
        picks = float(tally.picks[0])
        family.add_sample(f"{family.name}_total", {"outcome": "picked", "reason": ""}, picks)
        yield family
    durations = HistogramMetricFamily(
        "kvroute_decision_seconds",
        "Time of a decision that picks a worker, by stage.",
        labels=["stage"],
    )
    for stage, seconds in tally.stages.items():
        counts = buckets(BUCKETS_S, seconds.counts.tolist())
        durations.add_metric([stage], counts, float(seconds.total_s[0]))
    yield durations
    yield CounterMetricFamily(
        "kvroute_overlap_reachable_tokens",
        "Usable overlap on the worker that held most: tokens that picks by overlap alone reuse.",
        value=int(tally.tokens[1]),
    )
    yield from _by_pool(tally)
    predicted = SummaryMetricFamily(
        "kvroute_ttft_predicted_seconds",
        "Predicted time to the first token, of picks of a policy that predicts it: on the picked"
        " worker (picked), and the shortest of any worker (shortest). Kinds are not for adding up.",
        labels=["kind"],
    )
    predicted.add_metric(["picked"], tally.ttfts, tally.ttft_s)
    predicted.add_metric(["shortest"], tally.ttfts, tally.ttft_best_s)
    yield predicted
    usable, prompt_tokens = tally.recent.sum(axis=0).tolist()
    yield GaugeMetricFamily(
        "kvroute_kv_hit_ratio",
        f"Usable overlap / prompt tokens over the last {RATIO_DECISIONS} picks.",
        value=usable / prompt_tokens if prompt_tokens else 0.0,
    )


def _by_pool(tally: PickTally) -> Iterator[Metric]:
    labels = ["model", "role"]
    prompts = HistogramMetricFamily(
        "kvroute_prompt_tokens",
        "Prompt tokens of a pick, by the role of the worker that computes them, and its model"
        f" as its engine calls it; other: pairs of model and role beyond the first {POOLS_MAX}.",
        labels=labels,
    )
    overlaps = CounterMetricFamily(
        "kvroute_overlap_tokens",
        "Usable overlap on the picked worker, by the fastest tier that holds it.",
        labels=[*labels, "tier"],
    )
    for pool, picks in tally.pools().items():
        prompts.add_metric(pool, buckets(LENGTHS, picks.lengths), picks.prompt_tokens)
        for tier, tokens in zip(TIERS, picks.overlap_tokens, strict=True):
            overlaps.add_metric([*pool, tier], tokens)
    yield from (prompts, overlaps)
