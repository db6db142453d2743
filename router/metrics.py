"""What Prometheus sees; router/README.md lists it. Names are a contract.

Counters and histograms are kept here as things happen; gauges of workers and streams are read from
the core at scrape time, so a worker's series vanish with the worker.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import accumulate

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from events.broker import Broker
from events.relay import Relay
from events.stream import StreamState
from router.control_desk import ControlDesk
from router.core import RouterCore
from router.decision import Pick, Prefill
from router.decision_log import RESULTS
from router.fleet_state import FleetState
from router.hot_prefixes import REASONS
from router.inbound import InFlight
from router.nats_child import NatsChild
from router.outliers import PROBES, WITHHELD, Cause
from router.own_relays import OwnRelays
from router.peer_link import PeerLink
from router.pick_tally import (
    BUCKETS_S,
    MODELS_MAX,
    RATIO_DECISIONS,
    TIERS,
    PickTally,
    StageClock,
)
from router.policies.own import Failure, is_own
from router.prefix_copies import CopyFate
from router.refusals import Reason
from router.reservations import Ending
from router.self_check import CheckResult
from router.shadow import Agreement, Balance, Shadow
from router.ttft_check import RATIOS
from router.watchers import Watchers
from router.worker_feed import WorkerFeed

_OUTCOMES = (Ending.FINISHED, Ending.FAILED_WORKER, Ending.FAILED_TIMEOUT, Ending.FAILED_REFUSED)
"""Of workers: what is exported from 0 on."""
OUTCOMES = ("picked", "repeated", "refused", "explained")
_SOCKET_ERRORS = (
    "engine_silent",
    "events_failed",
    "implausible_load",
    "malformed_frame",
    "malformed_load",
    "malformed_page",
    "malformed_request",
    "map_not_saved",
    "map_unusable",
    "replay_timeout",
    "replay_too_large",
    "replay_too_slow",
    "unsent",
    "warm_busy",
    "warm_failed",
    "warm_malformed",
)


class Metrics:
    """Everything a router exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
            "What the index had said of the requests whose cached tokens were reported.",
            registry=registry,
        )
        self.cached_tokens_off = Counter(
            "kvroute_cached_tokens_off",
            "Tokens by which those predictions were over the report, or under it.",
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
        self.call_faults = Counter(
            "kvroute_call_faults",
            "Calls and requests that ended with INTERNAL: a fault of the router.",
            ["method"],
            registry=registry,
        )
        self.answers_unsent = Counter(
            "kvroute_answers_unsent",
            "Route answers that could not be sent; their reservations ended at once.",
            registry=registry,
        )
        self._bytes_in_flight = Gauge(
            "kvroute_bytes_in_flight",
            "Bytes of the gRPC messages over 64 KiB that are being handled.",
            registry=registry,
        )
        self._bytes_in_flight_max = Gauge(
            "kvroute_bytes_in_flight_max",
            "What these may be (grpc.in_flight_mib_max).",
            registry=registry,
        )
        self._watches = Gauge(
            "kvroute_watches", "WatchWorkers calls that are open.", registry=registry
        )
        for result in ("ok", "failed"):
            self.config_reloads.labels(result)
        self.index_bytes_max = Gauge(
            "kvroute_index_bytes_max",
            "What the index may take up (index.memory_mib).",
            registry=registry,
        )
        build = Gauge("kvroute_build_info", "Always 1.", ["version"], registry=registry)
        build.labels(kvroute_version()).set(1)
        self.tally = PickTally()
        registry.register(TallyCollector(self.tally, self.requests))
        for outcome in OUTCOMES:
            if outcome not in {"picked", "refused"}:
                self.requests.labels(outcome, "")
        for reason in Reason:
            self.requests.labels("refused", reason)
        ProcessCollector(registry=registry)

    def follow(self, in_flight: InFlight, feed: WorkerFeed) -> None:
        """Has gauges read what is open, at each scrape."""
        self._bytes_in_flight.set_function(lambda: in_flight.bytes)
        self._bytes_in_flight_max.set(in_flight.bytes_max)
        self._watches.set_function(lambda: feed.watches)

    def picked(self, pick: Pick) -> None:
        """A pick was made."""
        self.tally.count(pick)

    def cache_reported(self, predicted: int, reported: int) -> None:
        """An engine told how many of a request's tokens it had; predicted: what we had said."""
        self.cached_tokens.inc(reported)
        self.cached_tokens_predicted.inc(predicted)
        direction = "over" if predicted > reported else "under"
        self.cached_tokens_off.labels(direction).inc(abs(predicted - reported))

    def stage_clock(self) -> StageClock:
        """A clock for one decision."""
        return StageClock(self.tally.stages)


def kvroute_version() -> str:
    """The installed version."""
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
            "kvroute_decision_seconds", "Time a decision takes, by stage.", labels=["stage"]
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
            "Usable overlap on the worker that held most; less what was taken: what balance cost.",
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
            "Time to the first token that it predicted for its picks.",
            value=tally.ttft_s,
        )
        yield CounterMetricFamily(
            "kvroute_ttft_best_seconds",
            "The shortest that it predicted of any worker; what is more: what others gain.",
            value=tally.ttft_best_s,
        )
        usable, asked = tally.recent.sum(axis=0).tolist()
        yield GaugeMetricFamily(
            "kvroute_kv_hit_ratio",
            f"Usable overlap / prompt tokens over the last {RATIO_DECISIONS} picks.",
            value=usable / asked if asked else 0.0,
        )

    def _by_model(self) -> Iterator[Metric]:
        picks = CounterMetricFamily(
            "kvroute_model_picks",
            "Picks by the model of the picked worker, as its engine calls it; other: all models"
            f" beyond the first {MODELS_MAX}.",
            labels=["model"],
        )
        prompts = CounterMetricFamily(
            "kvroute_model_prompt_tokens", "Prompt tokens of these picks.", labels=["model"]
        )
        overlaps = CounterMetricFamily(
            "kvroute_model_overlap_tokens",
            "Usable overlap on the picked worker of these picks.",
            labels=["model"],
        )
        for model, counts in self._tally.models().items():
            for family, count in zip((picks, prompts, overlaps), counts, strict=True):
                family.add_metric([model], count)
        yield from (picks, prompts, overlaps)


class RouterCollector(Collector):
    """Reads the core at scrape time."""

    def __init__(self, core: RouterCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._workers()
        yield from self._streams()
        yield from self._self_check()
        yield from self._ttft_check()
        yield from self._outliers()
        yield self._policy_failures()
        yield self._warnings()
        core = self._core
        view = core.view
        stats = view.index.stats()
        yield _gauge("kvroute_ready", "1 once the router is ready to serve.", core.ready)
        yield _gauge("kvroute_index_blocks", "Distinct prefixes in the index.", stats.blocks)
        yield _gauge("kvroute_index_bytes", "Estimated memory of the index.", stats.bytes)
        yield _gauge(
            "kvroute_index_predicted_blocks",
            "Blocks that picks, or reports, say workers will hold.",
            sum(view.index.predicted(source.slot) for source in view.sources.values()),
        )
        yield _gauge("kvroute_reservations", "Open reservations.", len(core.reservations))
        yield _gauge(
            "kvroute_sessions",
            "Sessions whose KV cache is known to be somewhere.",
            len(core.sessions),
        )
        yield _gauge(
            "kvroute_sessions_heard",
            "Sessions whose last request went through another replica, which told of it.",
            core.sessions.heard,
        )
        yield CounterMetricFamily(
            "kvroute_recent_blocks_forgotten",
            "Sampled blocks of working sets that were forgotten for want of room.",
            value=core.working_sets.forgotten,
        )
        yield _counter(
            "kvroute_sessions_forgotten",
            "Sessions that time, or the room they take, has ended.",
            "reason",
            core.sessions.forgotten,
            ("expired", "no_room"),
        )
        yield _counter(
            "kvroute_pair_picks",
            "Picks of PREFILL_DECODE requests, by where the prompt is computed.",
            "prefill",
            {how.value: count for how, count in core.pair_picks.items()},
            tuple(Prefill),
        )
        yield _counter(
            "kvroute_facts", "Facts applied.", "kind", view.facts, ("stored", "removed", "cleared")
        )
        yield _counter(
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
        yield _counter(
            "kvroute_index_forgotten",
            "Placements forgotten: with their workers, or for want of room in the index.",
            "reason",
            {**view.forgotten, "no_room": stats.forgotten},
            ("silent", "removed", "no_room"),
        )
        lost = CounterMetricFamily(
            "kvroute_worker_messages_lost",
            "Facts and heartbeats of a worker that were dropped unread: its relay sends too many.",
            labels=["worker"],
        )
        for worker_id, messages in view.lost.items():
            lost.add_metric([worker_id], messages)
        yield lost
        yield CounterMetricFamily(
            "kvroute_gaps", "Holes found in streams of facts.", value=view.gaps
        )
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

    def _workers(self) -> Iterator[Metric]:
        core = self._core
        labels = ["worker", "rank"]

        def gauge(name: str, told: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"kvroute_worker_{name}", told, labels=labels)

        up = gauge("up", "1 if the worker may get requests.")
        active = gauge("blocks_active", "KV blocks held by requests, reserved ones included.")
        total = gauge("blocks_total", "KV blocks the worker has.")
        running = gauge("requests_running", "Running requests, as reported.")
        waiting = gauge("requests_waiting", "Waiting requests, as reported.")
        reserved = gauge("reserved_requests", "Open reservations of this router.")
        prefill = gauge("prefill_tokens_active", "Prompt tokens sent there, not computed yet.")
        slots = GaugeMetricFamily(
            "kvroute_worker_slots",
            "Requests that the worker runs at once, by where that is from: known, or estimated.",
            labels=[*labels, "source"],
        )
        block_share = gauge(
            "block_share",
            "Of the worker's KV blocks, the share that picks promise; below 1 after preemptions.",
        )
        preemptions = CounterMetricFamily(
            "kvroute_worker_preemptions",
            "Requests that the engine put off for want of KV blocks, as it counts since its start.",
            labels=labels,
        )
        ejected = gauge("ejected", "1 while requests are kept away, since earlier ones failed.")
        outcomes = CounterMetricFamily(
            "kvroute_worker_outcomes",
            "Requests of this router that a worker got, by how they ended.",
            labels=[*labels, "outcome"],
        )
        cached = CounterMetricFamily(
            "kvroute_worker_prompt_tokens_reported",
            "Tokens of prompts whose cached tokens were reported: all of them (prompt), those that"
            " the index had predicted as cached, those that the engine reported as cached.",
            labels=[*labels, "kind"],
        )
        shares = []
        for key, source in core.view.sources.items():
            names = [key.worker_id, str(key.dp_rank)]
            load = core.load_of(key)
            is_up = not core.excluded(source)
            up.add_metric(names, is_up)
            active.add_metric(names, load.active_blocks())
            running.add_metric(names, load.running)
            waiting.add_metric(names, load.waiting)
            reserved.add_metric(names, load.requests)
            prefill.add_metric(names, load.prefill_tokens_active)
            ejected.add_metric(names, bool(core.outliers.reason(key)))
            told = core.cache_report_of(key)
            counts = (
                ("prompt", told.prompt),
                ("predicted", told.predicted),
                ("cached", told.reported),
            )
            for kind, tokens in counts:
                cached.add_metric([*names, kind], tokens)
            of_worker = core.outcomes_of(key)
            for ending in Ending:
                if ending in of_worker or ending in _OUTCOMES:
                    outcomes.add_metric([*names, ending], of_worker[ending])
            if source.heartbeat is not None:
                heartbeat, capacities = source.heartbeat, core.capacities
                preemptions.add_metric(names, heartbeat.preemptions)
                block_share.add_metric(names, capacities.block_share(key, heartbeat))
                if heartbeat.total_slots:
                    slots.add_metric([*names, "known"], heartbeat.total_slots)
                elif (estimated := capacities.slots(key, heartbeat)) is not None:
                    slots.add_metric([*names, "estimated"], estimated)
            if source.heartbeat is not None and source.heartbeat.total_blocks:
                total.add_metric(names, source.heartbeat.total_blocks)
                if is_up:
                    shares.append(load.active_blocks() / source.heartbeat.total_blocks)
        yield from (
            up,
            active,
            total,
            running,
            waiting,
            reserved,
            prefill,
            ejected,
            outcomes,
            cached,
        )
        yield from (slots, block_share, preemptions)
        mean = float(np.mean(shares)) if shares else 0.0
        yield _gauge(
            "kvroute_load_balance_score",
            "Standard deviation / mean of the load of workers that are up; 0 is even.",
            float(np.std(shares)) / mean if mean else 0.0,
        )

    def _outliers(self) -> Iterator[Metric]:
        core = self._core
        outliers = core.outliers
        yield _counter(
            "kvroute_reservations_ended",
            "Reservations that have ended, by how.",
            "ending",
            {ending.value: count for ending, count in core.endings.items()},
            tuple(Ending),
        )
        yield _counter(
            "kvroute_ejections",
            "Workers that were ejected since requests failed there, by cause.",
            "cause",
            {cause.value: count for cause, count in outliers.ejections.items()},
            tuple(Cause),
        )
        yield _counter(
            "kvroute_ejections_withheld",
            "Ejections that did not come about: others see the worker serve, or too many of its"
            " pool are ejected.",
            "reason",
            outliers.withheld,
            WITHHELD,
        )
        yield _counter(
            "kvroute_probes",
            "Requests that went to ejected workers, by what became of them.",
            "result",
            outliers.probes,
            PROBES,
        )
        yield CounterMetricFamily(
            "kvroute_callers_forgotten",
            "Callers whose word on a worker was forgotten for want of room.",
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
        yield _gauge(
            "kvroute_first_token_mean_seconds",
            "From picks to their first tokens, as reported, in the mean over the last 16 or so.",
            core.first_tokens.mean_s,
        )

    def _streams(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "kvroute_stream_state",
            "1 for the state a stream is in.",
            labels=["worker", "rank", "state"],
        )
        complete = GaugeMetricFamily(
            "kvroute_stream_complete",
            "0 if blocks may exist that the stream never told of.",
            labels=["worker", "rank"],
        )
        lag = GaugeMetricFamily(
            "kvroute_stream_lag_seconds",
            "Age of the last fact when it was applied.",
            labels=["worker", "rank"],
        )
        for key, source in self._core.view.sources.items():
            names = [key.worker_id, str(key.dp_rank)]
            for one in StreamState:
                state.add_metric([*names, one.value], source.stream.state is one)
            complete.add_metric(names, source.stream.whole)
            lag.add_metric(names, source.stream.lag_s)
        yield from (state, complete, lag)

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
        self_check = self._core.self_check
        yield _counter(
            "kvroute_self_checks",
            "Reported cached tokens held against predicted ones.",
            "result",
            {result.value: count for result, count in self_check.results.items()},
            tuple(CheckResult),
        )
        yield CounterMetricFamily(
            "kvroute_self_check_resyncs",
            "Streams read anew because predictions kept failing.",
            value=self_check.resyncs,
        )
        yield CounterMetricFamily(
            "kvroute_self_check_learned_blocks",
            "Blocks that engines reused though their streams never told of them.",
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
            "Time to the first token of those picks, from the pick to its report.",
            value=check.measured_s,
        )
        off = CounterMetricFamily(
            "kvroute_ttft_off_seconds",
            "Seconds by which those first tokens came later than predicted, or sooner.",
            labels=["direction"],
        )
        off.add_metric(["late"], check.late_s)
        off.add_metric(["early"], check.early_s)
        yield off

    def _warnings(self) -> Metric:
        family = GaugeMetricFamily(
            "kvroute_worker_warnings",
            "1 while there is something to mend; the code says what.",
            labels=["worker", "rank", "code"],
        )
        now_s = self._clock()
        for key, source in self._core.view.sources.items():
            for code in {warning.code for warning in self._core.warnings(source, now_s)}:
                family.add_metric([key.worker_id, str(key.dp_rank), code], 1)
        return family


class PeerCollector(Collector):
    """Other router replicas, read at each scrape."""

    def __init__(self, core: RouterCore, link: PeerLink, clock: Callable[[], float]) -> None:
        self._core = core
        self._link = link
        self._clock = clock

    @override
    def collect(self) -> Iterator[Metric]:
        ages = self._core.peers.ages_s(self._clock())
        yield _gauge("kvroute_peers", "Other router replicas that are heard.", len(ages))
        yield _gauge(
            "kvroute_peer_age_seconds",
            "Since the replica that is heard least was heard; 0 without any.",
            max(ages.values(), default=0.0),
        )
        messages = CounterMetricFamily(
            "kvroute_peer_messages",
            "Messages about other replicas' reserved load.",
            labels=["result"],
        )
        for result, count in self._core.peers.results.items():
            messages.add_metric([result], count)
        yield messages
        yield CounterMetricFamily(
            "kvroute_peer_workers_untold",
            "Workers that had no room in a message about our reserved load.",
            value=self._link.untold,
        )
        reports = CounterMetricFamily(
            "kvroute_reports_forwarded",
            "Reports handed to the replica that owns the reservation.",
            labels=["result"],
        )
        for result, count in self._link.forwarded.items():
            reports.add_metric([result], count)
        yield reports


class WatchCollector(Collector):
    """Reads what those have counted who look at decisions; nothing while nobody does."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers

    @override
    def collect(self) -> Iterator[Metric]:
        watchers = self._watchers
        if watchers.watch is None:
            return
        yield CounterMetricFamily(
            "kvroute_watch_failures",
            "Requests that the shadow policy or the decision log failed to look at.",
            value=watchers.failures,
        )
        if watchers.shadow is not None:
            yield from self._of_shadow(watchers.shadow)
        if watchers.log.is_on:
            yield _counter(
                "kvroute_decision_log_lines",
                "Lines for the log: written, dropped for a full queue, or failed at the disk.",
                "result",
                watchers.log.lines,
                RESULTS,
            )

    def _of_shadow(self, shadow: Shadow) -> Iterator[Metric]:
        yield _counter(
            "kvroute_shadow_decisions",
            "Decisions that the shadow policy scored, by what it says of the pick.",
            "agreement",
            {told.value: count for told, count in shadow.decisions.items()},
            tuple(Agreement),
        )
        yield _change(
            "kvroute_shadow_overlap_tokens",
            "Usable overlap that its own choices would have won or lost.",
            shadow.overlap_tokens,
        )
        yield _change(
            "kvroute_shadow_ttft_seconds",
            "Predicted time to the first token that its own choices would have won or lost.",
            shadow.ttft_s,
        )


class BrokerCollector(Collector):
    """Reads what a process's connections to NATS count."""

    def __init__(self, *brokers: Broker) -> None:
        self._brokers = brokers

    @override
    def collect(self) -> Iterator[Metric]:
        connected = all(broker.connected for broker in self._brokers)
        text = "1 while connected to NATS: a router by both of its connections."
        yield _gauge("kvroute_broker_connected", text, connected)
        kinds = ("not_connected", "slow_consumer", "error", "listener_failed")
        counts = {kind: sum(broker.counts[kind] for broker in self._brokers) for kind in kinds}
        counts["unreadable"] = sum(broker.unreadable for broker in self._brokers)
        yield _counter("kvroute_broker_errors", "What went wrong with NATS.", "kind", counts, ())


class NatsChildCollector(Collector):
    """Reads what became of the embedded NATS server; only of a router that runs it."""

    def __init__(self, child: NatsChild) -> None:
        self._child = child

    @override
    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "kvroute_nats_restarts",
            "Times that the embedded NATS server was started again after it had left.",
            value=self._child.restarts,
        )


class HotPrefixCollector(Collector):
    """Reads what became of hot prefixes and their copies; nothing where they aren't copied."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    @override
    def collect(self) -> Iterator[Metric]:
        hot = self._core.hot
        if hot is None:
            return
        yield _counter(
            "kvroute_hot_prefix_copies",
            "Copies of hot prefixes: begun; of these done, failed or cancelled; of those done used,"
            " or useless: evicted before a use.",
            "fate",
            {str(fate): count for fate, count in hot.copies.fates.items()},
            tuple(CopyFate),
        )
        yield _counter(
            "kvroute_hot_prefixes_not_copied",
            "Why a hot prefix was not copied when it was weighed, or not kept.",
            "reason",
            hot.reasons,
            REASONS,
        )
        yield _gauge("kvroute_hot_prefixes", "Prefixes that are hot at the moment.", len(hot))
        yield _gauge("kvroute_hot_prefix_bytes", "What is kept of them.", hot.byte_count)
        yield CounterMetricFamily(
            "kvroute_hot_prefixes_forgotten",
            "Prefixes whose hits were forgotten for want of room.",
            value=hot.rates.forgotten,
        )


class OwnRelaysCollector(Collector):
    """What became of the relays in this router, and of fleet commands."""

    def __init__(self, relays: OwnRelays, desk: ControlDesk) -> None:
        self._relays = relays
        self._desk = desk

    @override
    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "kvroute_relays_ended",
            "Relays in this router that were stopped for good, by reason.",
            labels=["reason"],
        )
        for reason in ("removed", "never_answered"):
            ended.add_metric([reason], self._relays.ended[reason])
        yield ended
        failures = CounterMetricFamily(
            "kvroute_relay_failures",
            "Times that a relay in this router failed; it is started again.",
            value=self._relays.failures,
        )
        yield failures
        commands = CounterMetricFamily(
            "kvroute_fleet_commands",
            "Fleet commands applied, by action; those that a newer one had overtaken; those dated a"
            " day ahead or more, which count as given when they came.",
            labels=["action"],
        )
        for action in ("drain", "undrain", "remove", "resync", "overtaken", "far_ahead"):
            commands.add_metric([action], self._desk.counts[action])
        yield commands


class FleetStateCollector(Collector):
    """Reads and writes of fleet.state_file."""

    def __init__(self, state: FleetState) -> None:
        self._state = state

    @override
    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "kvroute_fleet_state",
            "Reads and writes of fleet.state_file, by result.",
            labels=["result"],
        )
        for result in ("read", "unreadable", "written", "write_failed"):
            family.add_metric([result], self._state.counts[result])
        yield family


class RelayCollector(Collector):
    """Reads the relays of this process at scrape time."""

    def __init__(self, relays: Callable[[], Iterable[Relay]]) -> None:
        self._relays = relays

    @override
    def collect(self) -> Iterator[Metric]:
        labels = ["worker", "rank"]
        events = CounterMetricFamily(
            "kvroute_relay_events",
            "Engine events by kind, and by reason what of them was left out.",
            labels=[*labels, "kind"],
        )
        gaps = CounterMetricFamily(
            "kvroute_relay_engine_gaps", "Holes found in an engine's own sequence.", labels=labels
        )
        restarts = CounterMetricFamily(
            "kvroute_relay_engine_restarts", "New lives of an engine.", labels=labels
        )
        entries = GaugeMetricFamily(
            "kvroute_relay_map_entries", "Engine blocks in the relay's map.", labels=labels
        )
        socket_errors = CounterMetricFamily(
            "kvroute_relay_socket_errors",
            "What went wrong at a relay's sockets, and with the maps it keeps.",
            labels=["worker", "kind"],
        )
        for relay in self._relays():
            for key, rank in relay.ranks:
                names = [key.worker_id, str(key.dp_rank)]
                for kind, count in sorted(rank.counts.items()):
                    events.add_metric([*names, kind], count)
                gaps.add_metric(names, rank.engine_gaps)
                restarts.add_metric(names, rank.engine_restarts)
                entries.add_metric(names, len(rank.ledger))
            for kind in dict.fromkeys((*_SOCKET_ERRORS, *sorted(relay.counts))):
                socket_errors.add_metric([relay.settings.id, kind], relay.counts[kind])
        yield from (events, gaps, restarts, entries, socket_errors)


class Scrape:
    """What a registry said at one moment, to be written out of the way of the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = list(registry.collect())

    def collect(self) -> list[Metric]:
        return self._families

    def text(self) -> bytes:
        return generate_latest(self)


def _gauge(name: str, told: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, value=value)


def _change(name: str, told: str, balance: Balance) -> CounterMetricFamily:
    """Two counters, since one of their difference could fall."""
    family = CounterMetricFamily(name, told, labels=["change"])
    family.add_metric(["gain"], balance.gain)
    family.add_metric(["loss"], balance.loss)
    return family


def _counter(
    name: str, told: str, label: str, counts: dict[str, int], known: tuple[str, ...]
) -> CounterMetricFamily:
    """A counter of one label, known values from 0 on, so that alerts work before the first."""
    family = CounterMetricFamily(name, told, labels=[label])
    for value in dict.fromkeys((*known, *sorted(counts))):
        family.add_metric([value], counts.get(value, 0))
    return family
