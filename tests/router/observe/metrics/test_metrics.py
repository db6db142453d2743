"""Metrics: what a scrape says of a fleet, parsed as Prometheus parses it."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from events.feed.stream import StreamState
from indexer.identity import Tier
from router.api.desk.counters import OUTCOMES, Metrics, kvroute_version
from router.config.settings.configurations import ModelSettings
from router.decide.core.progress import Pick, Progress, ProgressState
from router.decide.core.tally import STAGES
from router.fleet.answers import LENGTHS, OTHER_POOL, POOLS_MAX
from router.fleet.health.self_check import CheckResult
from router.observe.metrics.families import export
from router.observe.metrics.of_fleet import fleet_metrics
from router.observe.metrics.of_workers import worker_metrics
from router.request.refusal import Reason
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt


class Observed:
    """A fleet with its metrics, as a router has them."""

    def __init__(self, **routing: Any) -> None:
        self.fleet = Fleet(**routing)
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        export(self.registry, fleet_metrics, self.fleet.core, self.fleet.clock)
        export(self.registry, worker_metrics, self.fleet.core)

    def pick(self, tokens: int, **about: Any) -> Pick:
        self.metrics.counts.begin()
        pick = self.fleet.route(prompt(tokens), **about)
        self.metrics.counts.picked(pick)
        return pick

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = generate_latest(self.registry).decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[name, frozenset(labels.items())]

    def of_worker(self, worker_id: str) -> set[str]:
        return {name for name, labels in self.samples() if ("worker", worker_id) in labels}


def test_every_name_tells_what_it_means() -> None:
    observed = Observed()
    observed.fleet.add("w0")
    text = generate_latest(observed.registry).decode()
    for family in text_string_to_metric_families(text):
        if family.name.startswith("kvroute_"):
            assert family.documentation.endswith("."), family.name
            assert family.type in {"counter", "gauge", "histogram", "summary"}, family.name


def test_counters_are_there_before_the_first_count() -> None:
    samples = Observed().samples()

    def values(name: str, label: str) -> set[str]:
        return {dict(labels)[label] for one, labels in samples if one == name}

    assert values("kvroute_requests_total", "outcome") == set(OUTCOMES)
    assert values("kvroute_requests_total", "reason") == {"", *Reason} - {Reason.CANCELLED}
    assert values("kvroute_decision_seconds_count", "stage") == set(STAGES)
    assert values("kvroute_overlap_tokens_total", "tier") == {
        "device",
        "host",
        "disk",
        "predicted",
    }
    assert values("kvroute_facts_total", "kind") == {"stored", "removed", "cleared"}
    assert {"malformed", "unknown_kind", "duplicate", "lower_epoch", "tombstone"} <= values(
        "kvroute_facts_dropped_total", "reason"
    )
    assert values("kvroute_self_checks_total", "result") == set(CheckResult)
    assert {
        dict(labels)["reason"]
        for one, labels in samples
        if one == "kvroute_forgotten_total" and ("what", "index") in labels
    } == {"silent", "removed", "no_room"}
    assert {
        (dict(labels)["how"], dict(labels)["result"])
        for one, labels in samples
        if one == "kvroute_recoveries_total"
    } == {(how, result) for how in ("ring", "snapshot") for result in ("ok", "failed")}
    assert all(
        value == 0
        for (name, _), value in samples.items()
        if name.startswith("kvroute_") and name.endswith(("_total", "_count"))
    )


def test_workers_and_streams_are_told_one_by_one() -> None:
    observed = Observed()
    fleet = observed.fleet
    key = fleet.add("w0", 1, total_blocks=200)
    fleet.say(key, running=3, waiting=2, used_blocks=50.0)
    observed.pick(100)
    labels = {"worker": "w0", "rank": "1", "role": "both"}
    assert observed.value("kvroute_worker_up", **labels) == 1
    assert observed.value("kvroute_worker_blocks", **labels, kind="active") == 50 + 7
    assert observed.value("kvroute_worker_blocks", **labels, kind="total") == 200
    assert observed.value("kvroute_worker_requests", **labels, state="running") == 3
    assert observed.value("kvroute_worker_requests", **labels, state="waiting") == 2
    assert observed.value("kvroute_worker_requests", **labels, state="reserved") == 1
    assert observed.value("kvroute_worker_prefill_tokens_active", **labels) == 100
    assert observed.value("kvroute_stream_complete", **labels) == 1
    for state in StreamState:
        is_live = observed.value("kvroute_stream_state", state=state, **labels)
        assert is_live == (state is StreamState.LIVE)


def test_a_worker_that_may_get_nothing_is_not_up() -> None:
    observed = Observed()
    fleet = observed.fleet
    sick, drained = fleet.add("sick"), fleet.add("drained")
    fleet.say(sick, healthy=False)
    fleet.core.drain("drained")
    for key in (sick, drained):
        assert observed.value("kvroute_worker_up", worker=key.worker_id, rank="0", role="both") == 0


def test_an_unknown_total_is_absent_and_not_zero() -> None:
    observed = Observed()
    observed.fleet.add("w0", total_blocks=None)
    kinds = {
        dict(labels)["kind"]
        for name, labels in observed.samples()
        if name == "kvroute_worker_blocks"
    }
    assert kinds == {"active"}
    assert "kvroute_worker_up" in observed.of_worker("w0")


def test_a_workers_series_vanish_with_the_worker() -> None:
    observed = Observed()
    observed.fleet.add("goes")
    observed.fleet.add("stays")
    observed.pick(100)
    assert len(observed.of_worker("goes")) >= 9
    observed.fleet.core.remove("goes", 60.0, observed.fleet.now_s)
    assert observed.of_worker("goes") == set()
    assert observed.of_worker("stays") != set()


def test_picks_count_tokens_by_tier_and_what_was_within_reach() -> None:
    observed = Observed(policy="least-loaded")
    fleet = observed.fleet
    near, far = fleet.add("near"), fleet.add("far")
    asked = prompt(100)
    fleet.cache(near, asked, 32)
    fleet.cache(near, asked, 48, Tier.HOST)
    fleet.cache(far, asked, 96, Tier.DISK)
    fleet.say(far, running=5)
    observed.pick(100)
    pool = {"model": "m", "role": "both"}
    assert observed.value("kvroute_prompt_tokens_sum", **pool) == 100
    assert observed.value("kvroute_overlap_tokens_total", tier="device", **pool) == 32
    assert observed.value("kvroute_overlap_tokens_total", tier="host", **pool) == 16
    assert observed.value("kvroute_overlap_tokens_total", tier="disk", **pool) == 0
    assert observed.value("kvroute_overlap_reachable_tokens_total") == 96
    assert observed.value("kvroute_kv_hit_ratio") == pytest.approx(0.48)
    assert observed.value("kvroute_requests_total", outcome="picked", reason="") == 1


def test_picks_are_counted_by_the_model_of_the_picked_worker() -> None:
    observed = Observed(models=(ModelSettings(name="long", aliases=("a",)),))
    fleet = observed.fleet
    fleet.cache(fleet.add("wa", model="a", lora_names=("tuned",)), prompt(100), 64)
    fleet.add("wb", model="b")
    for model in ("a", "long", "b"):
        observed.pick(100, model=model)
    observed.pick(50, model="tuned")
    named = {"model": "a", "role": "both"}
    assert observed.value("kvroute_prompt_tokens_count", **named) == 3
    assert observed.value("kvroute_prompt_tokens_sum", **named) == 250
    assert observed.value("kvroute_overlap_tokens_total", tier="device", **named) >= 64 + 96
    assert observed.value("kvroute_prompt_tokens_count", model="b", role="both") == 1


def test_a_pairs_prompt_counts_for_its_prefill_worker() -> None:
    observed = Observed()
    observed.fleet.add("p0", role="prefill")
    observed.fleet.add("d0", role="decode")
    assert observed.pick(8192, role=Role.PAIR).reservation.prefill is not None
    assert observed.value("kvroute_prompt_tokens_sum", model="m", role="prefill") == 8192
    assert ("kvroute_prompt_tokens_sum", (("model", "m"), ("role", "decode"))) not in (
        observed.samples()
    )


def test_prompts_fall_into_buckets_by_their_length_bounds_included() -> None:
    observed = Observed()
    observed.fleet.add("w0")
    for tokens in (10, 16, 17, LENGTHS[-1] + 1):
        observed.pick(tokens)
    below = [
        observed.value("kvroute_prompt_tokens_bucket", model="m", role="both", le=le)
        for le in ("16", "32", str(LENGTHS[-1]), "+Inf")
    ]
    assert below == [2, 3, 3, 4]


def test_pools_beyond_the_bound_are_counted_together() -> None:
    observed = Observed()
    for i in range(POOLS_MAX + 2):
        observed.fleet.add(f"w{i}", model=f"m{i}")
        observed.pick(10, model=f"m{i}")
    observed.pick(10, model="m0")
    last = f"m{POOLS_MAX - 1}"
    model, role = OTHER_POOL
    assert observed.value("kvroute_prompt_tokens_count", model="m0", role="both") == 2
    assert observed.value("kvroute_prompt_tokens_count", model=last, role="both") == 1
    assert observed.value("kvroute_prompt_tokens_count", model=model, role=role) == 2
    assert observed.value("kvroute_prompt_tokens_sum", model=model, role=role) == 20
    assert len(observed.metrics.tally.pools()) == POOLS_MAX + 1


def test_predicted_times_are_counted_beside_the_shortest() -> None:
    observed = Observed(policy="ttft", prefill_rate=1000.0, parameters={"ttft": {"stall": 1.0}})
    fleet = observed.fleet
    holder, full = fleet.add("holder"), fleet.add("full", total_slots=1)
    asked = prompt(1600)
    fleet.cache(holder, asked, 1584)
    fleet.say(holder, running=90)  # near, and too many are there already
    fleet.cache(full, asked, 1584)
    fleet.say(full, running=1)
    fleet.add("idle")
    pick = observed.pick(1600)
    assert pick.reservation.worker.worker_id == "idle"
    told = pick.decision.scores.row_terms["prefill_s"]
    near_s, idle_s = told[0], told[2]
    assert observed.value("kvroute_ttft_predicted_seconds_count", kind="picked") == 1
    assert observed.value("kvroute_ttft_predicted_seconds_sum", kind="picked") == pytest.approx(
        idle_s
    )
    assert observed.value("kvroute_ttft_predicted_seconds_sum", kind="shortest") == pytest.approx(
        near_s
    )
    assert near_s < 0.6 < 2.1 < idle_s
    observed.pick(1600, policy="round-robin")
    assert observed.value("kvroute_ttft_predicted_seconds_count", kind="picked") == 1


def test_predicted_and_reported_cached_tokens_are_counted_for_the_same_requests() -> None:
    observed = Observed()
    for predicted, reported in ((96, 96), (96, 0), (0, 32)):
        observed.metrics.cache_reported(predicted, reported)
    assert observed.value("kvroute_cached_tokens_total", kind="reported") == 128
    assert observed.value("kvroute_cached_tokens_total", kind="predicted") == 192
    assert observed.value("kvroute_cached_tokens_total", kind="over") == 96
    assert observed.value("kvroute_cached_tokens_total", kind="under") == 32


def test_hit_rates_are_told_by_worker() -> None:
    observed = Observed()
    fleet = observed.fleet
    a, b = fleet.add("a"), fleet.add("b")
    fleet.cache(a, prompt(100), 48)
    for key, cached_tokens in ((a, 64), (a, 48), (b, 0)):
        others = frozenset({"a", "b"} - {key.worker_id})
        held = fleet.route(prompt(100), excluded_workers=others).reservation
        step = Progress(held.id, ProgressState.FINISHED, cached_tokens=cached_tokens)
        fleet.core.report(step, fleet.now_s)
        fleet.core.report(step, fleet.now_s)

    def told(worker: str) -> list[float]:
        name = "kvroute_worker_prompt_tokens_reported_total"
        kinds = ("prompt", "predicted", "cached")
        return [
            observed.value(name, worker=worker, rank="0", role="both", kind=kind) for kind in kinds
        ]

    assert told("a") == [200, 96, 112]
    assert told("b") == [100, 0, 0]
    fleet.core.remove("a", 60.0, fleet.now_s)
    name = "kvroute_worker_prompt_tokens_reported_total"
    assert {dict(labels)["worker"] for one, labels in observed.samples() if one == name} == {"b"}


def test_the_hit_ratio_of_no_picks_is_zero() -> None:
    assert Observed().value("kvroute_kv_hit_ratio") == 0


def test_the_balance_score_is_std_over_mean_of_workers_that_are_up() -> None:
    observed = Observed()
    assert observed.value("kvroute_load_balance_score") == 0
    fleet = observed.fleet
    for i, used in enumerate([100.0, 300.0]):
        fleet.say(fleet.add(f"w{i}", total_blocks=1000), used_blocks=used)
    fleet.say(fleet.add("sick", total_blocks=1000), used_blocks=1000.0, healthy=False)
    # loads 0.1 and 0.3: mean 0.2, std 0.1
    assert observed.value("kvroute_load_balance_score") == pytest.approx(0.5)


def test_facts_gaps_and_forgetting_are_counted() -> None:
    observed = Observed()
    fleet = observed.fleet
    key = fleet.add("w0")
    fleet.cache(key, prompt(64))
    fleet.remove(key, prompt(64).prefixes(16)[3:])
    fleet.clear(key)
    fleet.cache(key, prompt(64))
    assert observed.value("kvroute_facts_total", kind="stored") == 2
    assert observed.value("kvroute_facts_total", kind="removed") == 1
    assert observed.value("kvroute_facts_total", kind="cleared") == 1
    assert observed.value("kvroute_index_blocks", kind="prefixes") == 4
    assert observed.value("kvroute_held_bytes", what="index", port="") > 0
    fleet.view.on_stream(key, b"nonsense", fleet.now_s)
    assert observed.value("kvroute_facts_dropped_total", reason="malformed") == 1
    fleet.beat(key, digest=5)
    assert observed.value("kvroute_stream_faults_total", fault="digest") == 1
    fleet.core.remove("w0", 60.0, fleet.now_s)
    assert observed.value("kvroute_forgotten_total", what="index", reason="removed") == 4
    assert observed.value("kvroute_index_blocks", kind="prefixes") == 0


def test_reports_are_counted_by_what_they_say_of_the_index() -> None:
    observed = Observed()
    fleet = observed.fleet
    fleet.cache(fleet.add("w0"), prompt(100))
    for cached_tokens in (96, 96, 0, 0, 0):
        held = fleet.route(prompt(100)).reservation
        step = Progress(held.id, ProgressState.FINISHED, cached_tokens=cached_tokens)
        fleet.core.report(step, fleet.now_s)
    assert len(fleet.core.fleet.self_check.begin_resyncs(fleet.now_s)) == 1
    assert observed.value("kvroute_self_checks_total", result="exact") == 2
    assert observed.value("kvroute_self_checks_total", result="over") == 3
    assert observed.value("kvroute_stream_faults_total", fault="self_check") == 1
    fleet.add("w1", model="n", events=False)
    held = fleet.route(prompt(100), model="n").reservation
    fleet.core.report(Progress(held.id, ProgressState.FINISHED, cached_tokens=64), fleet.now_s)
    assert observed.value("kvroute_stream_faults_total", fault="missing_block") == 4


def test_warnings_are_gauges_while_they_hold() -> None:
    observed = Observed()
    fleet = observed.fleet
    key = fleet.add("w0", 1, warnings=("an odd thing", "another"))
    fleet.add("fine")
    name, labels = "kvroute_worker_warnings", {"worker": "w0", "rank": "1", "code": "relay"}
    assert observed.value(name, **labels) == 1
    assert name not in observed.of_worker("fine")
    fleet.say(key, warnings=())
    assert name not in observed.of_worker("w0")
    fleet.say(key, warnings=("an odd thing",))
    fleet.core.remove("w0", 60.0, fleet.now_s)
    assert name not in observed.of_worker("w0")


def test_reservations_are_told_while_they_are_open() -> None:
    observed = Observed()
    observed.fleet.add("w0")
    observed.pick(8)
    observed.pick(8)
    assert observed.value("kvroute_reservations", observer="caller") == 2
    observed.fleet.turn(121)
    assert observed.value("kvroute_reservations", observer="caller") == 0


def test_a_router_says_whether_it_is_ready_and_how_large_its_index_may_get() -> None:
    observed = Observed()
    assert observed.value("kvroute_ready") == 1
    observed.fleet.core.fleet.ready = False
    assert observed.value("kvroute_ready") == 0
    observed.metrics.index_bytes_max = 1 << 32
    assert observed.value("kvroute_held_bytes_max", what="index") == 1 << 32


def test_stages_are_measured_one_after_the_other() -> None:
    observed = Observed()
    observed.fleet.add("w0")
    counts = observed.metrics.counts
    counts.begin()
    request = observed.fleet.request(prompt(100))
    pick = observed.fleet.core.route(request, observed.fleet.now_s, counts)
    assert isinstance(pick, Pick)
    for stage in STAGES:
        assert observed.value("kvroute_decision_seconds_count", stage=stage) == 0
    counts.picked(pick)
    stages = [observed.value("kvroute_decision_seconds_sum", stage=stage) for stage in STAGES]
    assert sum(stages[:-1]) <= stages[-1]
    for stage in STAGES:
        assert observed.value("kvroute_decision_seconds_count", stage=stage) == 1


def test_the_build_says_its_version() -> None:
    assert Observed().value("kvroute_build_info", version=kvroute_version()) == 1


def test_worker_ids_of_any_printable_characters_are_labels() -> None:
    observed = Observed()
    odd = 'a"b\\c d é'
    observed.fleet.add(odd)
    assert observed.value("kvroute_worker_up", worker=odd, rank="0", role="both") == 1


def test_a_pick_of_any_worker_can_be_written() -> None:
    observed = Observed()
    observed.fleet.add("w0", priority_scheduling="lower")
    answer = observed.fleet.answer(prompt(8), priority=-(1 << 31))
    assert answer.engine_priority == (1 << 31) - 1
    assert answer.worker_id == "w0"


def test_what_a_policy_of_the_operators_fails_at_is_counted_by_kind() -> None:
    name = "tests.router.decide.policies.own_policies:infinite"
    observed = Observed(policy=name)
    observed.fleet.add("w0")
    failures = {"what": "policy", "policy": name, "kind": "not_a_number"}
    assert observed.value("kvroute_failures_total", **failures) == 0
    observed.pick(8)
    assert observed.value("kvroute_failures_total", **failures) == 1
