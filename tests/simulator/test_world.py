"""The virtual world: conservation under every option, determinism, and stories with known ends."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from indexer.identity import Tier
from router.config.settings.queue_settings import QueueSettings
from router.config.settings.routing_settings import RoutingSettings
from router.request.prompt import Prompt
from simulator.engines.cost_model import Distance, LinearCost
from simulator.engines.scheduler import SchedulerConfig, StepResult
from simulator.schedulers.chitu.task import ChituConfig
from simulator.schedulers.vllm.config import VllmConfig
from simulator.traffic.results import Outcome, RunResult, load_cv
from simulator.traffic.trace import Trace
from simulator.traffic.trace_file import load_trace
from simulator.world.clients import Clients
from simulator.world.laws import LawBroken
from simulator.world.options import Disaggregation, Failure, RelayRestart, RouterRestart, RunOptions
from simulator.world.virtual_engine import VirtualEngine
from simulator.world.virtual_relay import NamedPrefixes
from simulator.world.world import World, run
from tests.simulator.worlds import SMALL, checked, request, trace

UNLINKED = replace(SMALL, cost=LinearCost(0.005, 0.0, 0.0, 2e-4, 0.0))
"""Engines that can't send KV cache to one another."""


def conversation(count: int, rate: float = 1.0) -> Trace:
    """The beginning of the slice that ships, at the rate of the whole trace."""
    whole = load_trace("conversation").spread()
    return replace(whole, requests=whole.requests[:count]).at_rate(10 * rate)


@pytest.mark.long
def test_no_option_breaks_a_law() -> None:
    """In a process of its own: Hypothesis also draws constants of the modules that are loaded, so
    that in this one the examples would depend on the tests before."""
    command = (sys.executable, "-m", "tests.simulator", "--seconds", "0", "--seed", "1000")
    root = Path(__file__).parents[2]
    played = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert played.returncode == 0, played.stderr


def test_a_request_does_not_wait_for_room_that_only_a_guess_had_taken() -> None:
    """What another replica is guessed to have just sent to a worker takes none of its blocks: the
    guess may fall while the worker's load rises, and no change of the load would say that there is
    room."""
    arrivals = (
        request(0.0, [100], 1, session_id="b"),
        request(0.1, [100, 101], 1, session_id="b", think_s=0.0),
        request(0.4, [102], 1),
        request(0.41, [103], 1, session_id="a"),
        request(2.41, [103, 104], 1, session_id="a"),
        request(4.41, [105], 3),
        request(4.71, [0, 1, 106], 1),
        request(5.01, [0, 1, 2, 107], 189),
        request(5.02, [103, 104, 108], 242, session_id="a"),
        request(5.02, [109], 1),
        request(5.02, [103, 104, 108, 110], 1, session_id="a", think_s=0.0),
    )
    _, result = checked(
        trace(*arrivals),
        workers=1,
        replicas=2,
        inflight=True,
        seed=202,
        failures=(Failure(0.0, 0, 40.0),),
        relay_restarts=(RelayRestart(0.0, 0, 0.2), RelayRestart(6.0, 0, 40.0)),
    )
    assert (result.outcome == Outcome.SERVED).any()


def test_a_prompt_that_was_computed_is_handed_over_after_the_engines_step() -> None:
    """The router that picks its decode worker may also give the prefill worker to one that waits,
    and an engine whose step is not over yet can't begin the next."""
    arrivals_s = (*[0.0] * 5, 0.01, 0.31, 0.61, 0.91, 1.21, *[3.21] * 11, 3.31)
    requests = [request(at_s, [100 + i], 1) for i, at_s in enumerate(arrivals_s)]
    chain, think_s = [0, 101, 112, 113, 120], {12: 0.0, 13: 3.0, 20: 0.0}
    for turn, i in enumerate((1, 12, 13, 20)):
        requests[i] = request(
            arrivals_s[i], chain[: turn + 2], 1, session_id="a", think_s=think_s.get(i)
        )
    _, result = checked(
        trace(*requests),
        engine="sglang",
        past_router_share=0.3,
        disaggregation=Disaggregation(prefill_workers=1, picks="pair"),
        inflight=False,
        event_delay_s=0.0,
    )
    assert (result.outcome == Outcome.SERVED).all()
    assert result.waits.any()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "chitu"])
def test_an_engine_without_a_step_tells_what_a_transfer_has_displaced(engine: str) -> None:
    """Each prompt is alone in its decode engine, which fetches its KV cache and does nothing else;
    the law of events holds meanwhile."""
    requests = [request(10.0 * i, [10 * i + j for j in range(7)], 2) for i in range(4)]
    _, result = checked(
        trace(*requests), engine=engine, disaggregation=Disaggregation(prefill_workers=1)
    )
    assert (result.outcome == Outcome.SERVED).all()


def test_the_slice_keeps_all_laws_and_something_was_checked() -> None:
    world, result = checked(
        conversation(80),
        workers=4,
        scheduler=SchedulerConfig(block_count=2048, block_size=64, joined_steps_max=10_000),
    )
    assert (result.outcome == Outcome.SERVED).all()
    laws = world.laws
    assert laws is not None
    for law in ("blocks", "events", "requests", "tokens", "load", "index"):
        assert laws.checks[law] > 0, law


def test_the_same_seed_has_the_same_log_and_another_seed_another() -> None:
    def digest(seed: int) -> int:
        options = RunOptions(workers=4, seed=seed, event_jitter_s=0.004, event_loss=0.05)
        return run(options, conversation(60)).digest

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


ONE_RUN = """
from dataclasses import replace
from simulator.world.options import Failure, RelayRestart, RunOptions
from simulator.traffic.trace_file import load_trace
from simulator.world.world import run
failures = (Failure(2.0, 1, 3.0), Failure(2.0, 3, 3.0))
restarts = (RelayRestart(1.0, 0),)
options = RunOptions(workers=6, replicas=3, failures=failures, relay_restarts=restarts)
whole = load_trace("conversation").spread()
print(run(options, replace(whole, requests=whole.requests[:150]).at_rate(100.0)).digest)
"""


@pytest.mark.long
def test_a_run_is_the_same_in_a_process_whose_sets_have_another_order() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", ONE_RUN],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_checking_changes_nothing() -> None:
    plain = run(RunOptions(workers=2, scheduler=SMALL), trace(*REUSE))
    _, looked_at = checked(trace(*REUSE))
    assert plain.digest == looked_at.digest


def test_joined_steps_change_nothing() -> None:
    single = run(RunOptions(workers=2, scheduler=replace(SMALL, joined_steps_max=1)), trace(*REUSE))
    joined = run(RunOptions(workers=2, scheduler=SMALL), trace(*REUSE))
    np.testing.assert_allclose(single.ttft_s, joined.ttft_s)
    np.testing.assert_allclose(single.e2e_s, joined.e2e_s)
    np.testing.assert_array_equal(single.cached_tokens, joined.cached_tokens)


REUSE = [request(0.5 * i, [1, 2, 3, 10 + i % 2], 40) for i in range(10)]


def test_a_prompt_seen_before_is_reused_but_for_its_last_block() -> None:
    _, result = checked(trace(request(0.0, [1, 2]), request(5.0, [1, 2])), workers=1)
    assert result.cached_tokens.tolist() == [0, 1024 - 64]
    assert result.cached_blocks.tolist() == [0, 15]
    assert result.predicted_tokens.tolist() == [0, 1024 - 64]
    assert result.ttft_s[1] < result.ttft_s[0]


def test_the_router_finds_the_worker_that_has_the_prompt() -> None:
    prompts = [request(3.0 * i, [1, 2, 3, 4]) for i in range(6)]
    _, result = checked(trace(*prompts), workers=4)
    assert len(set(result.worker.tolist())) == 1
    assert (result.cached_tokens[1:] > 0).all()


def test_picks_that_the_guard_moved_are_counted_and_an_idle_fleet_has_none() -> None:
    for gap_s, moves in ((0.01, True), (30.0, False)):
        prompts = [request(5.0 + gap_s * i, [1, 2, 3, 4, 100 + i], 100) for i in range(24)]
        of = trace(request(0.0, [1, 2, 3, 4]), *prompts)
        world, result = checked(of, scheduler=replace(SMALL, block_count=16_384))
        moved = result.counters.get("moved_by_guard", 0)
        assert (moved > 0) == moves
        assert moved == world.fleet.routers[0].core.guarded


def test_itl_is_the_time_between_tokens() -> None:
    _, result = checked(trace(request(0.0, [1], 11), request(9.0, [2], 1)), workers=1)
    spent_s = result.e2e_s[0] - result.ttft_s[0]
    assert result.itl_s[0] == pytest.approx(spent_s / 10)
    assert np.isnan(result.itl_s[1])


def test_a_turn_starts_when_the_one_before_it_has_ended_and_was_thought_about() -> None:
    turns = [
        request(1.0, [1], 100, session_id="s"),
        request(1.1, [1, 2], 5, session_id="s", think_s=2.0),
    ]
    _, result = checked(trace(*turns))
    ended_s = result.arrival_s[0] + result.e2e_s[0]
    assert result.arrival_s[1] == pytest.approx(ended_s + 2.0)


@pytest.mark.parametrize("session_id", [None, "s"])
def test_a_request_without_a_turn_before_it_is_sent_at_its_own_time(session_id: str | None) -> None:
    _, result = checked(trace(request(0.5, [1], session_id=session_id, think_s=2.0)))
    assert result.arrival_s.tolist() == [0.5]


def test_a_turn_goes_on_after_one_that_failed() -> None:
    turns = [
        request(0.0, list(range(20)), session_id="s"),  # longer than the pool
        request(0.0, [1], session_id="s", think_s=1.0),
    ]
    _, result = checked(trace(*turns))
    assert result.outcome.tolist() == [Outcome.FAILED, Outcome.SERVED]
    assert result.arrival_s[1] == pytest.approx(1.0)


def test_a_long_quiet_is_skipped_and_nothing_is_forgotten_in_it() -> None:
    week_s = 7 * 86_400.0
    world, result = checked(trace(request(0.0, [1, 2]), request(week_s, [1, 2])), workers=1)
    assert result.predicted_tokens[1] == result.cached_tokens[1] == 1024 - 64
    assert world.timeline.strokes < 2000


def test_requests_of_a_dead_worker_are_sent_again_elsewhere() -> None:
    prompts = [request(0.0, [10 + i], 200) for i in range(4)]
    _, result = checked(trace(*prompts), failures=(Failure(at_s=0.5, worker=0, down_s=20.0),))
    assert (result.outcome == Outcome.SERVED).all()
    assert result.counters["resent"] == (result.losses == 1).sum() > 0
    assert set(result.worker.tolist()) == {1}


def test_troubles_may_overlap() -> None:
    """An engine that is down can't die, and a router may start while a relay is away."""
    _, result = checked(
        trace(*(request(0.5 * i, [10 + i]) for i in range(10))),
        failures=(Failure(1.0, 0, 3.0), Failure(2.0, 0, 3.0)),
        relay_restarts=(RelayRestart(1.0, 1, 3.0),),
        router_restarts=(RouterRestart(2.5),),
    )
    assert result.counters["engine_failures"] == 1
    assert (result.outcome == Outcome.SERVED).all()


def test_a_request_that_dies_too_often_fails() -> None:
    _, result = checked(
        trace(request(0.0, [1], 2000)),
        workers=1,
        resends_max=0,
        failures=(Failure(at_s=0.5, worker=0, down_s=1.0),),
    )
    assert result.failures == {"worker lost": 1}
    assert result.e2e_s[0] == pytest.approx(0.5)


def test_clients_are_refused_while_all_is_full_and_give_up_in_the_end() -> None:
    crowd = [request(0.0, list(range(10 * i, 10 * i + 10)), 600) for i in range(12)]
    _, patient = checked(trace(*crowd), workers=1, patience_s=3600.0)
    assert (patient.outcome == Outcome.SERVED).all()
    assert patient.counters["retries"] > 0
    _, hasty = checked(trace(*crowd), workers=1, patience_s=1.0)
    assert (hasty.outcome == Outcome.SHED).sum() > 0
    assert not hasty.failures


def test_nobody_is_refused_by_workers_that_dont_tell_what_they_can_hold() -> None:
    crowd = [request(0.0, list(range(10 * i, 10 * i + 10)), 600) for i in range(12)]
    _, queued = checked(trace(*crowd), workers=1, tells_capacity=False)
    assert (queued.outcome == Outcome.SERVED).all()
    assert "retries" not in queued.counters


def test_estimated_slots_serve_as_well_as_known_ones() -> None:
    busy = conversation(250)
    roomy = SchedulerConfig(block_count=4000, block_size=64, max_num_seqs=8)

    def played(**options: Any) -> tuple[World, RunResult]:
        none = QueueSettings(max_waiting=0)
        world = World(RunOptions(scheduler=roomy, workers=4, queue=none, **options), busy)
        return world, world.run()

    _, known = played()
    world, estimated = played(tells_slots=False)
    (router,) = world.fleet.routers
    capacities, sources = router.core.fleet.capacities, router.view.sources
    assert [
        capacities.slots(key, source.heartbeat)
        for key, source in sources.items()
        if source.heartbeat is not None
    ] == [8, 8, 8, 8]
    assert router.core.over_estimate_picks > 0
    assert known.counters["retries"] > 0
    assert "retries" not in estimated.counters, "no request is refused for an estimate"
    assert np.mean(estimated.ttft_s) <= np.mean(known.ttft_s)


def test_a_lost_fact_is_a_gap_and_is_recovered() -> None:
    many = [request(0.2 * i, [100 + i], 4) for i in range(40)]
    late = request(20.0, [1], 4)  # a recovery may be under way before
    world, result = checked(trace(*many, late), event_loss=0.1)
    counters = result.counters
    assert counters["messages_lost"] > 0
    assert counters["gaps"] > 0
    assert counters["recoveries_ring_ok"] > 0
    assert counters["streams_live"] == len(world.fleet.workers)


def test_a_relay_that_lost_its_ledger_tells_a_subset_and_one_that_kept_it_tells_all() -> None:
    def predicted(keeps_map: bool) -> int:
        restart = RelayRestart(at_s=5.0, worker=0, down_s=1.0, keeps_map=keeps_map)
        prompts = trace(request(0.0, [1, 2]), request(20.0, [1, 2]))
        _, result = checked(prompts, workers=1, relay_restarts=(restart,))
        assert result.cached_tokens[1] == 1024 - 64
        return int(result.predicted_tokens[1])

    assert predicted(keeps_map=True) == 1024 - 64
    assert predicted(keeps_map=False) == 0


def test_a_router_that_starts_again_learns_from_events_what_guesses_have_lost() -> None:
    def predicted(events: str) -> int:
        prompts = trace(request(0.0, [1, 2]), request(20.0, [1, 2]))
        restart = RouterRestart(at_s=10.0)
        _, result = checked(prompts, workers=1, events=events, router_restarts=(restart,))
        assert result.cached_tokens[1] == 1024 - 64
        return int(result.predicted_tokens[1])

    assert predicted("facts") == 1024 - 64
    assert predicted("none") == 0


def test_late_events_are_not_seen_early() -> None:
    twins = trace(request(0.0, [1, 2], 1), request(1.5, [1, 2], 1))
    _, late = checked(twins, workers=1, event_delay_s=2.0)
    assert late.predicted_tokens[1] == 0
    assert late.cached_tokens[1] == 1024 - 64


def test_replicas_that_tell_one_another_spread_a_burst_more_evenly() -> None:
    burst = trace(*(request(0.05 * i, [100 + i], 150) for i in range(60)))

    def spread(**options: Any) -> float:
        _, result = checked(burst, workers=4, policy="least-loaded", **options)
        return load_cv(result.in_flight)

    alone = spread()
    silent = spread(replicas=4, inflight=False)
    telling = spread(replicas=4)
    assert telling < 0.7 * silent
    assert telling < alone + 0.1


@pytest.mark.parametrize("engine", ["vllm", "sglang", "chitu", "chitu-skew"])
def test_every_engine_serves_the_slice_within_the_laws(engine: str) -> None:
    config = SchedulerConfig(
        block_count=4096,
        block_size=64,
        max_model_len=32_768,
        max_num_seqs=8,
        joined_steps_max=10_000,
    )
    _, result = checked(conversation(40), engine=engine, scheduler=config)
    assert (result.outcome == Outcome.SERVED).all()


def test_ranks_of_one_engine_are_workers_of_their_own() -> None:
    config = ChituConfig(block_count=512, block_size=64, joined_steps_max=10_000, dp_size=2)
    prompts = [request(3.0 * i, [1 + i % 2, 3, 4]) for i in range(8)]
    world, result = checked(
        trace(*prompts), engine="chitu-dp", ranks=2, workers=2, scheduler=config
    )
    assert len(result.workers) == 4
    assert (result.outcome == Outcome.SERVED).all()
    assert (result.cached_tokens > 0).sum() == 6
    assert len(set(result.worker[::2].tolist())) == 1
    assert all(worker.key.dp_rank == worker.rank for worker in world.fleet.workers)


def test_the_host_tier_brings_back_what_the_device_lost() -> None:
    def cached(host_blocks: int) -> tuple[int, int]:
        config = VllmConfig(
            block_count=64, block_size=64, joined_steps_max=10_000, host_block_count=host_blocks
        )
        others = [request(3.0 * i, [10 * i, 10 * i + 1, 10 * i + 2]) for i in range(1, 5)]
        again = [request(0.0, [1, 2, 3]), *others, request(20.0, [1, 2, 3])]
        world, result = checked(trace(*again), workers=1, scheduler=config)
        tiers = world.fleet.routers[0].view.index
        assert (tiers.count(0, Tier.HOST) > 0) == bool(host_blocks)
        return int(result.predicted_tokens[-1]), int(result.cached_tokens[-1])

    assert cached(0) == (0, 0)
    # The connector loads the last block, too, and only its last token is computed again.
    assert cached(256) == (1536 - 64, 1536 - 1)


def test_load_past_the_router_is_seen_in_its_heartbeats() -> None:
    busy = [request(0.1 * i, [100 + i], 300) for i in range(30)]
    world, result = checked(trace(*busy), past_router_share=0.5)
    assert 0 < result.counters["past_router"] < 30
    external = [load.external_requests for load in world.fleet.routers[0].core.fleet.loads.values()]
    assert max(external) == 0.0  # and all of it is gone in the end


def test_long_requests_keep_their_reservations() -> None:
    slow = replace(SMALL, cost=replace(SMALL.cost, base_s=1.0))  # type: ignore[call-arg]
    _, result = checked(trace(request(0.0, [1], 400)), workers=1, scheduler=slow)
    assert result.e2e_s[0] > 2 * RunOptions().routing.lease_s
    assert result.outcome.tolist() == [Outcome.SERVED]


@pytest.mark.parametrize("picks", ["pair", "each"])
def test_prompts_are_computed_by_some_and_answers_brought_out_by_others(
    picks: Literal["pair", "each"],
) -> None:
    world, result = checked(
        trace(*(request(2.0 * i, [1, 2, 10 + i], 50) for i in range(6))),
        workers=4,
        disaggregation=Disaggregation(prefill_workers=2, picks=picks),
    )
    if picks == "pair":
        assert result.counters["pairs_remote"] == 6
    assert (result.outcome == Outcome.SERVED).all()
    assert set(result.worker.tolist()) <= {0, 1}
    told = [worker.engine.load() for worker in world.fleet.workers]
    assert sum(load.finished for load in told[:2]) == sum(load.finished for load in told[2:]) == 6
    assert sum(load.generated_tokens for load in told[:2]) == 6
    assert sum(load.generated_tokens for load in told[2:]) == 6 * 50
    assert (result.output_tokens == 50).all()
    assert (result.cached_tokens < 512).sum() <= 2  # once at each prefill worker


def test_kv_cache_from_farther_away_takes_longer() -> None:
    def ttft_s(**places: int) -> float:
        options: dict[str, Any] = {"disaggregation": Disaggregation(1), **places}
        _, result = checked(trace(request(0.0, [1, 2, 3, 4])), **options)
        return float(result.ttft_s[0])

    host = ttft_s(engines_per_host=2)
    rack = ttft_s(hosts_per_rack=2)
    cluster = ttft_s(hosts_per_rack=1)
    assert host < rack < cluster
    assert SMALL.cost.kv is not None
    kv = 2048 * SMALL.cost.kv.bytes_per_token
    assert cluster - rack == pytest.approx(kv / 20e9 - kv / 40e9 + 50e-6)


def test_slow_workers_send_kv_cache_to_one_another_as_fast_as_others() -> None:
    def ttft_s(**slow: Any) -> float:
        _, result = checked(trace(request(0.0, [1, 2])), disaggregation=Disaggregation(1), **slow)
        return float(result.ttft_s[0])

    assert ttft_s(slow_workers=2, slow_factor=1.0) == ttft_s()
    assert ttft_s() < ttft_s(slow_workers=2) < 2 * ttft_s()


def test_a_request_whose_decode_worker_dies_starts_over_with_its_prompt() -> None:
    _, result = checked(
        trace(request(0.0, [1], 200)),
        workers=3,
        disaggregation=Disaggregation(1),
        failures=(Failure(0.5, 1, 30.0), Failure(0.5, 2, 1.0)),
        resends_max=20,
    )
    assert result.outcome.tolist() == [Outcome.SERVED]
    assert result.losses[0] >= 1
    assert result.cached_tokens[0] == 512 - 64


def test_a_short_prompt_of_a_pair_stays_where_it_is_decoded() -> None:
    world, result = checked(
        trace(*(request(2.0 * i, [1, 10 + i], 20) for i in range(4))),
        workers=3,
        disaggregation=Disaggregation(prefill_workers=2),
        routing=RoutingSettings(local_prefill_tokens=600),
    )
    assert result.counters["pairs_remote"] == 1
    assert result.counters["pairs_local"] == 3  # the first block of 512 is there by then
    assert set(result.worker.tolist()[1:]) == {2}
    assert (result.outcome == Outcome.SERVED).all()
    told = [worker.engine.load() for worker in world.fleet.workers]
    assert [load.finished for load in told][2] == 4


@pytest.mark.parametrize(
    "failures",
    [(Failure(0.01, 0, 1.0), Failure(0.01, 1, 1.0)), (Failure(0.7, 2, 5.0), Failure(0.7, 3, 1.0))],
    ids=["prefill", "decode"],
)
def test_a_pair_that_loses_a_half_starts_over(failures: tuple[Failure, ...]) -> None:
    _, result = checked(
        trace(*(request(0.2 * i, [i, 10 + i, 20 + i], 200) for i in range(8))),
        workers=4,
        disaggregation=Disaggregation(prefill_workers=2),
        failures=failures,
        resends_max=20,
    )
    assert (result.outcome == Outcome.SERVED).all()
    assert result.losses.sum() >= 1


def test_shadows_watch_the_prompts_of_pairs() -> None:
    mixed = conversation(60)
    options: dict[str, Any] = {"workers": 4, "disaggregation": Disaggregation(2)}
    alone = run(RunOptions(**options), mixed)
    watched = run(RunOptions(**options, shadows=("dynamo-adaptive", "round-robin")), mixed)
    assert watched.digest == alone.digest
    own = watched.shadows["dynamo-adaptive"]
    assert own.decisions == own.agreements > 0


def test_shadows_watch_and_change_nothing() -> None:
    mixed = conversation(80)
    alone = run(RunOptions(workers=4), mixed)
    watched = run(RunOptions(workers=4, shadows=("dynamo-adaptive", "round-robin")), mixed)
    assert watched.digest == alone.digest
    own, other = watched.shadows["dynamo-adaptive"], watched.shadows["round-robin"]
    assert own.decisions == own.agreements == other.decisions == 80
    assert own.predicted_tokens_more == 0
    assert other.agreements < 60
    assert other.predicted_tokens_more < 0
    assert own.predicted_s_sooner == 0 > other.predicted_s_sooner


def test_the_engines_own_bytes_through_the_relays_code_lead_to_the_same_index() -> None:
    mixed = conversation(50)
    small = SchedulerConfig(block_count=1024, block_size=64, joined_steps_max=10_000)
    direct = World(RunOptions(workers=3, scheduler=small, check=True), mixed)
    real = World(RunOptions(workers=3, scheduler=small, check=True, events="engine"), mixed)
    assert direct.run().digest == real.run().digest  # every pick, at every time
    views = direct.fleet.routers[0].view, real.fleet.routers[0].view
    for sources in zip(*(view.sources.values() for view in views), strict=True):
        counts = [view.index.told(one.slot) for view, one in zip(views, sources, strict=True)]
        assert counts[0] == counts[1] > 0
    slots = [np.array([source.slot for source in view.sources.values()], np.intp) for view in views]
    for asked in mixed.requests:
        prompts = (
            Prompt.from_hashes(asked.block_hashes(64), 64, asked.prompt_tokens),
            Prompt.from_tokens(asked.token_ids().tobytes()),
        )
        overlaps = [
            view.index.overlap(prompt.prefixes(64), 1 << 20, at)
            for view, prompt, at in zip(views, prompts, slots, strict=True)
        ]
        np.testing.assert_array_equal(*overlaps)


def test_a_copied_prefix_is_found_by_the_next_request() -> None:
    twins = trace(request(0.0, [1, 2, 3], 4), request(6.0, [1, 2, 3], 4))
    plain = run(RunOptions(workers=2, scheduler=SMALL, policy="round-robin"), twins)
    assert plain.cached_tokens.tolist() == [0, 0]
    world = World(RunOptions(workers=2, scheduler=SMALL, policy="round-robin", check=True), twins)
    outcomes: list[bool] = []
    prompt = Prompt.from_hashes(twins.requests[0].block_hashes(64), 64, 1536)
    for worker in world.fleet.workers:
        copy = partial(
            world.copy_prefix, prompt.prefixes(64).tolist(), worker, Distance.RACK, outcomes.append
        )
        world.timeline.at(3.0, copy)
    result = world.run()
    assert result.cached_tokens[1] == 1536 - 64
    assert outcomes == [True, True]
    assert result.counters["copies"] == 2


def test_a_copy_to_an_engine_that_dies_fails() -> None:
    outcomes: list[bool] = []
    world = World(
        RunOptions(workers=2, scheduler=SMALL, failures=(Failure(1.0, 0, 5.0),), check=True),
        trace(request(0.0, [9], 4), request(20.0, [9], 4)),
    )
    worker = world.fleet.workers[0]
    names = list(range(1, 65))
    for when_s in (0.9999, 2.0):  # under way, and down
        copy = partial(world.copy_prefix, names, worker, Distance.CLUSTER, outcomes.append)
        world.timeline.at(when_s, copy)
    world.run()
    assert outcomes == [False, False]


def test_samples_show_where_requests_were() -> None:
    _, result = checked(trace(request(0.0, [1], 500), request(0.0, [2], 500)))
    assert result.in_flight.shape[1] == 2
    assert result.in_flight[1].tolist() == [1, 1]
    assert result.used_blocks[2].min() >= 8


def test_samples_are_of_the_seconds_in_which_requests_were() -> None:
    late_s = 1.7e9  # the time stamps of a trace may be Unix time
    _, result = checked(trace(request(0.0, [1], 500), request(late_s, [2], 500)))
    first, last = (result.sampled_s < late_s).sum(), (result.sampled_s >= late_s).sum()
    assert 0 < first < 60
    assert 0 < last < 60
    assert result.in_flight.shape == result.waiting.shape == (first + last, 2)
    assert result.in_flight.sum(axis=1).tolist() == [1] * (first + last)
    assert result.seconds == result.sampled_s[-1] + 1
    assert load_cv(result.in_flight) == 1.0


def test_an_empty_trace_has_an_empty_result() -> None:
    result = run(RunOptions(), trace())
    assert result.request_count == 0


def test_progress_comes_and_ends_complete() -> None:
    told = []
    run(RunOptions(workers=2, scheduler=SMALL), trace(*REUSE), told.append)
    assert told[-1].done == told[-1].total == len(REUSE)
    assert all(one.in_flight >= 0 for one in told)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"engine": "abacus"}, "unknown engine 'abacus'"),
        ({"workers": 0}, "workers"),
        ({"event_delay_s": 1.0, "event_jitter_s": 2.0}, "event_jitter_s"),
        ({"failures": (Failure(1.0, 8),)}, "Failure.worker"),
        ({"approximate_workers": 9}, "approximate_workers"),
        ({"hot_prefixes": True, "scheduler": UNLINKED}, "send to others: .* no links"),
        (
            {"disaggregation": Disaggregation(1), "scheduler": UNLINKED},
            "send to others: .* no links",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RunOptions(**wrong)


# --- the checker itself, under planted bugs ---


def test_a_relay_that_forgets_removals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NamedPrefixes, "remove", lambda *_: [])
    many = [request(0.3 * i, [100 * i + j for j in range(5)]) for i in range(20)]
    with pytest.raises(LawBroken, match="index"):
        checked(trace(*many))


def test_an_engine_that_loses_its_news_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = VirtualEngine.end_step

    def deaf(self: VirtualEngine, now_s: float) -> StepResult:
        return StepResult(whole(self, now_s).outputs, [])

    monkeypatch.setattr(VirtualEngine, "end_step", deaf)
    with pytest.raises(LawBroken, match="events"):
        checked(trace(*REUSE))


def test_a_client_that_reports_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clients, "_report", lambda *_, **__: None)
    with pytest.raises(LawBroken, match="load"):
        checked(trace(*REUSE))
