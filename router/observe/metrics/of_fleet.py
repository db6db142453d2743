"""Metrics of the fleet and of the requests that are open, read from the core at each scrape."""

from collections.abc import Callable, Iterator
from itertools import product

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from events.feed.fence import PLANES
from router.config.own_functions import is_own
from router.decide.core.core import RouterCore
from router.decide.decision.decision import Prefill
from router.decide.policies.own import Failure
from router.fleet.health.outliers import PROBES, WITHHELD, Cause
from router.fleet.health.self_check import CheckResult
from router.fleet.health.time_check import RATIOS
from router.fleet.reservations.reservations import FINISH_REASONS, Ending
from router.fleet.tenants import OTHER, TENANTS_MAX, TenantNumbers
from router.fleet.token_times import TOKENS_MIN
from router.observe.metrics.families import (
    buckets,
    counter,
    counters,
    failures,
    forgotten,
    gauge,
    gauges,
    held,
    known,
)


def fleet_metrics(core: RouterCore, clock: Callable[[], float]) -> Iterator[Metric]:
    """All metrics of the fleet, its index and streams, open requests, sessions and answers."""
    yield gauge("kvroute_ready", "1 once the router is ready to serve.", core.fleet.ready)
    unobserved = len(core.unobserved)
    yield gauges(
        "kvroute_reservations",
        "Open reservations, by the observer of their requests' steps: the caller, which reports"
        " them (caller), or the router, from the worker's events and load (worker).",
        ["observer"],
        {("caller",): len(core.reservations) - unobserved, ("worker",): unobserved},
    )
    yield counter(
        "kvroute_unobserved_steps",
        "Steps of requests that no caller reports, as the router infers them: prompts computed,"
        " from the worker's events; requests finished, from their engine's load.",
        "step",
        {"prefill_done": core.unobserved.prefills, "finished": core.unobserved.ends},
        ("prefill_done", "finished"),
    )
    yield from _tenants(core)
    yield from _answers(core)
    yield from _index(core)
    yield from _sessions(core)
    yield from _facts(core)
    yield from _recoveries(core)
    yield _self_check(core)
    yield _predictions(core)
    yield from _outliers(core)
    yield _policy_failures(core)
    yield _warnings(core, clock())


def _index(core: RouterCore) -> Iterator[Metric]:
    view = core.fleet.view
    stats = view.index.stats()
    predicted = sum(view.index.predicted(source.slot) for source in view.sources.values())
    yield gauges(
        "kvroute_index_blocks",
        "Distinct prefixes in the index (prefixes); blocks that picks, or reports, say workers"
        " will hold (predicted). Kinds are not for adding up.",
        ["kind"],
        {("prefixes",): stats.blocks, ("predicted",): predicted},
    )
    yield held("index", stats.bytes)
    by_worker = {reason: view.forgotten[reason] for reason in ("silent", "removed")}
    yield forgotten("index", {**by_worker, "no_room": stats.forgotten})


def _sessions(core: RouterCore) -> Iterator[Metric]:
    yield known("sessions", len(core.fleet.sessions))
    yield known("sessions_elsewhere", core.fleet.sessions.elsewhere)
    yield forgotten("working_sets", {"no_room": core.fleet.working_sets.forgotten})
    yield forgotten("shared_prefixes", {"no_room": core.fleet.shared_prefixes.forgotten})
    of_sessions = core.fleet.sessions.forgotten
    yield forgotten("sessions", {why: of_sessions[why] for why in ("expired", "no_room")})


def _facts(core: RouterCore) -> Iterator[Metric]:
    view = core.fleet.view
    yield counter(
        "kvroute_facts",
        "Facts about workers' blocks that the router applied to its index, by kind.",
        "kind",
        view.facts,
        ("stored", "removed", "cleared"),
    )
    yield counter(
        "kvroute_publishers_shut_out",
        "Times that the router unsubscribed for a while from a publisher that sent too much.",
        "plane",
        view.shut_out,
        PLANES,
    )
    yield counter(
        "kvroute_facts_dropped",
        "Messages or facts that were not applied, by reason.",
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
    yield counter(
        "kvroute_worker_messages_lost",
        "Facts and heartbeats of a worker that were dropped unread: its relay sends too many.",
        "worker",
        view.lost,
    )


def _recoveries(core: RouterCore) -> Iterator[Metric]:
    view = core.fleet.view
    self_check = core.fleet.self_check
    yield counter(
        "kvroute_stream_faults",
        "Faults of streams of facts: holes (gap); beats whose digest differed from the index"
        " (digest); streams read again because predictions kept failing (self_check); recoveries of"
        " streams that never stay right, each followed by a pause (unsteady); blocks that engines"
        " reused though their streams had not reported them (missing_block).",
        "fault",
        {
            "gap": view.gaps,
            "digest": view.drifts,
            "self_check": self_check.resyncs,
            "unsteady": view.recovery_pauses,
            "missing_block": self_check.learned_blocks,
        },
    )
    results = product(("ring", "snapshot"), ("ok", "failed"))
    yield counters(
        "kvroute_recoveries",
        "Recoveries of streams, by source (ring or snapshot) and result.",
        ["how", "result"],
        {each: view.recoveries[each] for each in results},
    )


def _outliers(core: RouterCore) -> Iterator[Metric]:
    outliers = core.fleet.outliers
    reasons = core.finish_reasons
    ended = {(ending.value, ""): core.endings[ending] for ending in Ending}
    ended[Ending.FINISHED, ""] -= reasons.total()
    yield counters(
        "kvroute_reservations_ended",
        "Reservations that have ended, by how; finished ones by why the answer ended, too"
        " (finish_reason), empty where the caller reported no reason.",
        ["ending", "finish_reason"],
        ended | {(Ending.FINISHED, reason): reasons[reason] for reason in FINISH_REASONS},
    )
    yield counters(
        "kvroute_ejections",
        "Workers that were ejected since requests failed there, by cause (ejected); ejections"
        " that did not come about (withheld): others see the worker serve, or too many of its"
        " pool are ejected; requests that went to ejected workers (probed), by their end.",
        ["result", "cause"],
        {
            **{("ejected", cause): outliers.ejections[cause] for cause in Cause},
            **{("withheld", reason): outliers.withheld[reason] for reason in WITHHELD},
            **{("probed", end): outliers.probes[end] for end in PROBES},
        },
    )
    yield forgotten("callers", {"no_room": outliers.callers_forgotten})
    yield counter(
        "kvroute_marked_picks",
        "Picks by mark; one may have several: guarded (moved by the guard), last_resort (of a"
        " silent or ejected worker), over_estimate (of a worker past a learned bound), observed"
        " (another router serves the request); pairs by where the prompt is computed:"
        " pair_remote (prefill worker), pair_local (decode worker, which lacks little of it),"
        " pair_absent (no worker hands over).",
        "mark",
        {
            "guarded": core.guarded,
            "last_resort": core.last_resorts,
            "over_estimate": core.over_estimate_picks,
            "observed": core.fleet.observed.picks,
            **{f"pair_{how.value}": core.pair_picks[how] for how in Prefill},
        },
    )


def _tenants(core: RouterCore) -> Iterator[Metric]:
    whose = f"by tenant: {TENANTS_MAX} of them, the rest as {OTHER}"
    tokens = CounterMetricFamily(
        "kvroute_tenant_tokens",
        "Prompt tokens of picks (prompt), and of these the usable overlap on the picked"
        f" workers (overlap), {whose}. Kinds are not for adding up.",
        labels=["tenant", "kind"],
    )
    first = SummaryMetricFamily(
        "kvroute_tenant_first_token_seconds",
        f"Reported first tokens, and the seconds from picks to them in sum, {whose}.",
        labels=["tenant"],
    )
    shown = {OTHER: TenantNumbers(), **core.fleet.tenants.by_name}
    for tenant, numbers in shown.items():
        tokens.add_metric([tenant, "prompt"], numbers.prompt_tokens)
        tokens.add_metric([tenant, "overlap"], numbers.overlap_tokens)
        first.add_metric([tenant], numbers.first_tokens, numbers.first_token_s)
    yield from (tokens, first)


def _answers(core: RouterCore) -> Iterator[Metric]:
    labels = ["model", "role"]
    first = HistogramMetricFamily(
        "kvroute_time_to_first_token_seconds",
        "Reported time from a request's arrival to its first token, the queue's wait included;"
        " of a pair, for its prefill worker.",
        labels=labels,
    )
    between = HistogramMetricFamily(
        "kvroute_time_per_output_token_seconds",
        f"Mean time between the tokens of an answer of at least {TOKENS_MIN + 1} tokens whose"
        " first token was reported.",
        labels=labels,
    )
    lengths = HistogramMetricFamily(
        "kvroute_output_tokens",
        "Reported tokens of an answer.",
        labels=labels,
    )
    objectives = CounterMetricFamily(
        "kvroute_objectives",
        "Objectives (ttft, tpot) kept or missed, of requests whose time was reported.",
        labels=[*labels, "objective", "result"],
    )
    for pool, answers in core.fleet.answers.by_pool.items():
        for family, histogram in (
            (first, answers.ttft_s),
            (between, answers.tpot_s),
            (lengths, answers.tokens),
        ):
            counts = buckets(histogram.bounds, histogram.counts)
            family.add_metric(pool, counts, histogram.total)
        for objective, results in (
            ("ttft", answers.ttft_objectives),
            ("tpot", answers.tpot_objectives),
        ):
            for result, count in zip(("missed", "kept"), results, strict=True):
                objectives.add_metric([*pool, objective, result], count)
    yield from (first, between, lengths, objectives)


def _policy_failures(core: RouterCore) -> Metric:
    counts = core.decider.policy_failures
    own = filter(is_own, core.policies)
    known = [(policy, kind) for policy in own for kind in Failure]
    return failures("policy", {(kind, policy): counts[policy, kind] for policy, kind in known})


def _self_check(core: RouterCore) -> Metric:
    self_check = core.fleet.self_check
    return counter(
        "kvroute_self_checks",
        "Comparisons of reported cached tokens with predicted ones.",
        "result",
        {result.value: count for result, count in self_check.results.items()},
        tuple(CheckResult),
    )


def _predictions(core: RouterCore) -> Metric:
    family = HistogramMetricFamily(
        "kvroute_prediction_ratio",
        "Measured / predicted: time to the first token, where the policy predicts it (ttft);"
        " mean time between the tokens of an answer (tpot).",
        labels=["of"],
    )
    for name, check in (("ttft", core.ttft_check), ("tpot", core.tpot_check)):
        family.add_metric([name], buckets(RATIOS, check.counts), check.ratios)
    return family


def _warnings(core: RouterCore, now_s: float) -> Metric:
    return gauges(
        "kvroute_worker_warnings",
        "1 while a warning of the worker holds, by its code.",
        ["worker", "rank", "code"],
        {
            (key.worker_id, str(key.dp_rank), warning.code): 1
            for key, source in core.fleet.view.sources.items()
            for warning in core.fleet.warnings(source, now_s)
        },
    )
