"""The counters that a router keeps while it serves calls."""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import accumulate

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
)
from prometheus_client.registry import Collector
from typing_extensions import override

from router.decide.core.counts import Counts
from router.decide.core.tally import BUCKETS_S, MODELS_MAX, RATIO_DECISIONS, TIERS, PickTally
from router.request.refusal import Reason

OUTCOMES = ("picked", "repeated", "refused", "explained")


class Metrics:
    """All metrics that a router exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Declares each metric once, with its name and help; so it has over 60 lines."""
        self.registry = registry
        self.requests = Counter(
            "kvroute_requests",
            "Requests by outcome; reason is empty unless refused.",
            ["outcome", "reason"],
            registry=None,
        )
        """All outcomes but `picked`, which the tally counts."""
        self.cached_tokens = Counter(
            "kvroute_cached_tokens_reported",
            "Cached tokens that engines reported for routed requests.",
            registry=registry,
        )
        self.cached_tokens_predicted = Counter(
            "kvroute_cached_tokens_predicted",
            "Cached tokens that the index had predicted for the requests with reported ones.",
            registry=registry,
        )
        self.cached_tokens_off = Counter(
            "kvroute_cached_tokens_off",
            "Tokens by which predicted cached tokens were over, or under, reported ones.",
            ["direction"],
            registry=registry,
        )
        for direction in ("over", "under"):
            self.cached_tokens_off.labels(direction)
        self.reservations_expired = Counter(
            "kvroute_reservations_expired", "Reservations ended by their lease.", registry=registry
        )
        self.config_reloads = Counter(
            "kvroute_config_reloads",
            "Times the configuration was read again.",
            ["result"],
            registry=registry,
        )
        self.messages_refused = Counter(
            "kvroute_messages_refused",
            "gRPC messages and calls refused for their size, or for what is open already.",
            ["method", "reason"],
            registry=registry,
        )
        self.calls_denied = Counter(
            "kvroute_calls_denied",
            "gRPC calls without a valid key (UNAUTHENTICATED), or whose key lacks the right to the"
            " method or the worker (PERMISSION_DENIED).",
            ["method", "reason"],
            registry=registry,
        )
        self.call_faults = Counter(
            "kvroute_call_faults",
            "Faults of the router, each in the log.",
            ["method"],
            registry=registry,
        )
        self.answers_unsent = Counter(
            "kvroute_answers_unsent",
            "Answers of Route, and of RouteStream's items, that could not be sent; their"
            " reservations ended at once.",
            registry=registry,
        )
        self._bytes_in_flight = Gauge(
            "kvroute_bytes_in_flight",
            "Bytes of the gRPC messages over 64 KiB that are being handled.",
            registry=registry,
        )
        self._bytes_in_flight_max = Gauge(
            "kvroute_bytes_in_flight_max",
            "Bound of kvroute_bytes_in_flight, in bytes.",
            registry=registry,
        )
        self._watches = Gauge(
            "kvroute_watches", "WatchWorkers calls that are open.", registry=registry
        )
        for result in ("ok", "failed"):
            self.config_reloads.labels(result)
        self.index_bytes_max = Gauge(
            "kvroute_index_bytes_max",
            "Bound of kvroute_index_bytes, in bytes (index.memory_mib).",
            registry=registry,
        )
        build = Gauge("kvroute_build_info", "Always 1.", ["version"], registry=registry)
        build.labels(kvroute_version()).set(1)
        self.tally = PickTally()
        self.counts = Counts(self.tally)
        registry.register(TallyCollector(self.tally, self.requests))
        for outcome in OUTCOMES:
            if outcome not in {"picked", "refused"}:
                self.requests.labels(outcome, "")
        for reason in Reason:
            self.requests.labels("refused", reason)
        ProcessCollector(registry=registry)

    def follow(
        self,
        bytes_in_flight: Callable[[], float],
        bytes_in_flight_max: int,
        watches: Callable[[], float],
    ) -> None:
        """Sets the functions that gauges of open calls and bytes read at each scrape."""
        self._bytes_in_flight.set_function(bytes_in_flight)
        self._bytes_in_flight_max.set(bytes_in_flight_max)
        self._watches.set_function(watches)

    def cache_reported(self, predicted: int, reported: int) -> None:
        """Counts a request's cached tokens, as its engine reported them; predicted: the number in
        our answer.
        """
        self.cached_tokens.inc(reported)
        self.cached_tokens_predicted.inc(predicted)
        direction = "over" if predicted > reported else "under"
        self.cached_tokens_off.labels(direction).inc(abs(predicted - reported))

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


def kvroute_version() -> str:
    """The installed version of kvroute."""
    return version("kvroute")


class TallyCollector(Collector):
    """Reads what picks counted, and says how many there were among all requests."""

    def __init__(self, tally: PickTally, requests: Counter) -> None:
        self._tally = tally
        self._requests = requests

    @override
    def collect(self) -> Iterator[Metric]:
        tally = self._tally
        for family in self._requests.collect():
            picks = float(tally.picks[0])
            family.add_sample(f"{family.name}_total", {"outcome": "picked", "reason": ""}, picks)
            yield family
        durations = HistogramMetricFamily(
            "kvroute_decision_seconds",
            "Time of a decision that picks a worker, by stage.",
            labels=["stage"],
        )
        bounds = (*map(str, BUCKETS_S), "+Inf")
        for stage, seconds in tally.stages.items():
            counts = map(float, accumulate(seconds.counts.tolist()))
            buckets = list(zip(bounds, counts, strict=True))
            durations.add_metric([stage], buckets, float(seconds.total_s[0]))
        yield durations
        prompt_tokens, reachable, *taken = tally.tokens.tolist()
        yield CounterMetricFamily(
            "kvroute_prompt_tokens", "Prompt tokens of picks.", value=prompt_tokens
        )
        overlap = CounterMetricFamily(
            "kvroute_overlap_tokens",
            "Usable overlap on the picked worker, by the fastest tier that holds it.",
            labels=["tier"],
        )
        for tier, tokens in zip(TIERS, taken, strict=True):
            overlap.add_metric([tier], tokens)
        yield overlap
        yield CounterMetricFamily(
            "kvroute_overlap_reachable_tokens",
            "Usable overlap on the worker that held most: what picks without regard to load reuse.",
            value=reachable,
        )
        yield from self._by_model()
        yield CounterMetricFamily(
            "kvroute_ttft_predictions",
            "Picks of a policy that predicts the time to the first token.",
            value=tally.ttfts,
        )
        yield CounterMetricFamily(
            "kvroute_ttft_predicted_seconds",
            "Predicted time to the first token of picks.",
            value=tally.ttft_s,
        )
        yield CounterMetricFamily(
            "kvroute_ttft_best_seconds",
            "Shortest predicted time to the first token of any worker, of the same picks.",
            value=tally.ttft_best_s,
        )
        usable, prompt_tokens = tally.recent.sum(axis=0).tolist()
        yield GaugeMetricFamily(
            "kvroute_kv_hit_ratio",
            f"Usable overlap / prompt tokens over the last {RATIO_DECISIONS} picks.",
            value=usable / prompt_tokens if prompt_tokens else 0.0,
        )

    def _by_model(self) -> Iterator[Metric]:
        picks = CounterMetricFamily(
            "kvroute_model_picks",
            "Picks by the model of the picked worker, as its engine calls it; other: all models"
            f" beyond the first {MODELS_MAX}.",
            labels=["model"],
        )
        prompts = CounterMetricFamily(
            "kvroute_model_prompt_tokens", "Prompt tokens of picks, by model.", labels=["model"]
        )
        overlaps = CounterMetricFamily(
            "kvroute_model_overlap_tokens",
            "Usable overlap on the picked worker, by model.",
            labels=["model"],
        )
        for model, counts in self._tally.models().items():
            for family, count in zip((picks, prompts, overlaps), counts, strict=True):
                family.add_metric([model], count)
        yield from (picks, prompts, overlaps)
