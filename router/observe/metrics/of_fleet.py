"""Metrics of the fleet and of the requests that are open, read from the core at each scrape."""

from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from events.feed.fence import PLANES
from router.decide.core.core import RouterCore
from router.decide.decision.decision import Prefill
from router.decide.policies.own import Failure, is_own
from router.fleet.health.outliers import PROBES, WITHHELD, Cause
from router.fleet.health.self_check import CheckResult
from router.fleet.health.ttft_check import RATIOS
from router.fleet.reservations.reservations import Ending
from router.fleet.tenants import OTHER, TENANTS_MAX, TenantNumbers
from router.observe.metrics.families import counter, gauge


class RouterCollector(Collector):
    """Exports the core's state at each scrape."""

    def __init__(self, core: RouterCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock

    @override
    def collect(self) -> Iterator[Metric]:
        core = self._core
        yield gauge("kvroute_ready", "1 once the router is ready to serve.", core.fleet.ready)
        yield gauge("kvroute_reservations", "Open reservations.", len(core.reservations))
        yield gauge(
            "kvroute_unobserved_requests",
            "Open reservations whose caller sees nothing of the answer.",
            len(core.unobserved),
        )
        yield counter(
            "kvroute_unobserved_steps",
            "Steps of requests without an observer: prompts computed by the worker's events, and"
            " requests finished by their engine's load.",
            "step",
            {"prefill_done": core.unobserved.prefills, "finished": core.unobserved.ends},
            ("prefill_done", "finished"),
        )
        yield counter(
            "kvroute_pair_picks",
            "Picks of PREFILL_DECODE requests, by where the prompt is computed.",
            "prefill",
            {how.value: count for how, count in core.pair_picks.items()},
            tuple(Prefill),
        )
        yield from self._tenants()
        yield from self._index()
        yield from self._sessions()
        yield from self._facts()
        yield from self._recoveries()
        yield from self._self_check()
        yield from self._ttft_check()
        yield from self._outliers()
        yield self._policy_failures()
        yield self._warnings()

    def _index(self) -> Iterator[Metric]:
        view = self._core.fleet.view
        stats = view.index.stats()
        yield gauge("kvroute_index_blocks", "Distinct prefixes in the index.", stats.blocks)
        yield gauge("kvroute_index_bytes", "Estimated memory of the index.", stats.bytes)
        yield gauge(
            "kvroute_index_predicted_blocks",
            "Blocks that picks, or reports, say workers will hold.",
            sum(view.index.predicted(source.slot) for source in view.sources.values()),
        )
        yield counter(
            "kvroute_index_forgotten",
            "Placements forgotten: with their workers, or for want of room in the index.",
            "reason",
            {**view.forgotten, "no_room": stats.forgotten},
            ("silent", "removed", "no_room"),
        )

    def _sessions(self) -> Iterator[Metric]:
        core = self._core
        yield gauge(
            "kvroute_sessions",
            "Sessions whose KV cache is known to be somewhere.",
            len(core.fleet.sessions),
        )
        yield gauge(
            "kvroute_sessions_heard",
            "Sessions whose last request went through another replica, by its messages.",
            core.fleet.sessions.elsewhere,
        )
        yield CounterMetricFamily(
            "kvroute_recent_blocks_forgotten",
            "Sampled blocks of working sets that were forgotten for want of room.",
            value=core.fleet.working_sets.forgotten,
        )
        yield counter(
            "kvroute_sessions_forgotten",
            "Sessions that time, or the room they take, has ended.",
            "reason",
            core.fleet.sessions.forgotten,
            ("expired", "no_room"),
        )

    def _facts(self) -> Iterator[Metric]:
        view = self._core.fleet.view
        yield counter(
            "kvroute_facts", "Facts applied.", "kind", view.facts, ("stored", "removed", "cleared")
        )
        yield counter(
            "kvroute_publishers_shut_out",
            "Times that a publisher that flooded a plane was not subscribed to for a while.",
            "plane",
            view.shut_out,
            PLANES,
        )
        yield counter(
            "kvroute_facts_dropped",
            "Messages or facts that were not applied.",
            "reason",
            view.dropped,
            (
                "malformed",
                "unknown_kind",
                "duplicate",
                "lower_epoch",
                "bad_subject",
                "tombstone",
                "too_many_workers",
                "too_many_ranks",
                "too_many_tombstones",
                "too_large",
                "no_room_to_wait",
                "recovery_too_large",
                "no_room_to_recover",
                "publisher_too_fast",
                "publisher_queue_full",
                "queues_full",
                "handling_failed",
            ),
        )
        lost = CounterMetricFamily(
            "kvroute_worker_messages_lost",
            "Facts and heartbeats of a worker that were dropped unread: its relay sends too many.",
            labels=["worker"],
        )
        for worker_id, messages in view.lost.items():
            lost.add_metric([worker_id], messages)
        yield lost

    def _recoveries(self) -> Iterator[Metric]:
        view = self._core.fleet.view
        yield CounterMetricFamily("kvroute_gaps", "Holes in streams of facts.", value=view.gaps)
        yield CounterMetricFamily(
            "kvroute_digest_mismatches",
            "Beats whose digest differed from the index.",
            value=view.drifts,
        )
        yield CounterMetricFamily(
            "kvroute_recovery_pauses",
            "Recoveries of streams that never stay right, each followed by a pause.",
            value=view.recovery_pauses,
        )
        recoveries = CounterMetricFamily(
            "kvroute_recoveries", "Recoveries of streams.", labels=["how", "result"]
        )
        for how in ("ring", "snapshot"):
            for result in ("ok", "failed"):
                recoveries.add_metric([how, result], view.recoveries[how, result])
        yield recoveries

    def _outliers(self) -> Iterator[Metric]:
        core = self._core
        outliers = core.fleet.outliers
        yield counter(
            "kvroute_reservations_ended",
            "Reservations that have ended, by how.",
            "ending",
            {ending.value: count for ending, count in core.endings.items()},
            tuple(Ending),
        )
        yield counter(
            "kvroute_ejections",
            "Workers that were ejected since requests failed there, by cause.",
            "cause",
            {cause.value: count for cause, count in outliers.ejections.items()},
            tuple(Cause),
        )
        yield counter(
            "kvroute_ejections_withheld",
            "Ejections that did not come about: others see the worker serve, or too many of its"
            " pool are ejected.",
            "reason",
            outliers.withheld,
            WITHHELD,
        )
        yield counter(
            "kvroute_probes",
            "Requests that went to ejected workers, by what became of them.",
            "result",
            outliers.probes,
            PROBES,
        )
        yield CounterMetricFamily(
            "kvroute_callers_forgotten",
            "Callers whose reports on a worker were forgotten for want of room.",
            value=outliers.callers_forgotten,
        )
        yield CounterMetricFamily(
            "kvroute_guarded_picks",
            "Picks that moved on, since their worker's queue cost more than its cache saved.",
            value=core.guarded,
        )
        yield CounterMetricFamily(
            "kvroute_last_resort_picks",
            "Picks of workers that don't answer, or are ejected, for want of any that answers.",
            value=core.last_resorts,
        )
        yield CounterMetricFamily(
            "kvroute_strained_picks",
            "Picks of workers over their estimated slots, or over the share of KV blocks that"
            " preemptions left them, for want of any with room.",
            value=core.strained_picks,
        )
        yield gauge(
            "kvroute_first_token_mean_seconds",
            "From picks to their first tokens, as reported, in the mean over the last 16 or so.",
            core.fleet.first_tokens.mean_s,
        )

    def _tenants(self) -> Iterator[Metric]:
        whose = f"by tenant: {TENANTS_MAX} of them, the rest as {OTHER}"
        of_each = [
            CounterMetricFamily(f"kvroute_tenant_{name}", f"{about}, {whose}.", labels=["tenant"])
            for name, about in (
                ("prompt_tokens", "Prompt tokens of picks"),
                ("overlap_tokens", "Usable overlap on the picked workers"),
                ("first_tokens", "Reported first tokens"),
                ("first_token_seconds", "Seconds from picks to reported first tokens"),
            )
        ]
        shown = {OTHER: TenantNumbers(), **self._core.fleet.tenants.by_name}
        for tenant, numbers in shown.items():
            for family, number in zip(of_each, astuple(numbers), strict=True):
                family.add_metric([tenant], number)
        yield from of_each

    def _policy_failures(self) -> Metric:
        family = CounterMetricFamily(
            "kvroute_policy_failures",
            "Decisions that a policy of the operator's failed at, made by the default one.",
            labels=["policy", "kind"],
        )
        for policy in filter(is_own, self._core.policies):
            for kind in Failure:
                family.add_metric([policy, kind], self._core.decider.policy_failures[policy, kind])
        return family

    def _self_check(self) -> Iterator[Metric]:
        self_check = self._core.fleet.self_check
        yield counter(
            "kvroute_self_checks",
            "Reported cached tokens held against predicted ones.",
            "result",
            {result.value: count for result, count in self_check.results.items()},
            tuple(CheckResult),
        )
        yield CounterMetricFamily(
            "kvroute_self_check_resyncs",
            "Streams read again because predictions kept failing.",
            value=self_check.resyncs,
        )
        yield CounterMetricFamily(
            "kvroute_self_check_learned_blocks",
            "Blocks that engines reused though their streams had not reported them.",
            value=self_check.learned_blocks,
        )

    def _ttft_check(self) -> Iterator[Metric]:
        check = self._core.ttft_check
        bounds = (*map(str, RATIOS), "+Inf")
        yield HistogramMetricFamily(
            "kvroute_ttft_ratio",
            "Measured time to the first token / predicted, of picks of a policy that predicts it.",
            buckets=list(zip(bounds, map(float, accumulate(check.counts)), strict=True)),
            sum_value=check.ratios,
        )
        yield CounterMetricFamily(
            "kvroute_ttft_measured_seconds",
            "Reported time to the first token, of picks with a predicted one.",
            value=check.measured_s,
        )
        off = CounterMetricFamily(
            "kvroute_ttft_off_seconds",
            "Seconds by which first tokens came later, or sooner, than predicted.",
            labels=["direction"],
        )
        off.add_metric(["late"], check.late_s)
        off.add_metric(["early"], check.early_s)
        yield off

    def _warnings(self) -> Metric:
        family = GaugeMetricFamily(
            "kvroute_worker_warnings",
            "1 while a warning of the worker holds, by its code.",
            labels=["worker", "rank", "code"],
        )
        now_s = self._clock()
        for key, source in self._core.fleet.view.sources.items():
            for code in {warning.code for warning in self._core.fleet.warnings(source, now_s)}:
                family.add_metric([key.worker_id, str(key.dp_rank), code], 1)
        return family
