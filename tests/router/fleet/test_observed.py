"""Requests that another router serves: what this router would make of them, beside today."""

import random
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import pytest

from indexer.hashing import pack_tokens
from indexer.identity import WorkerKey
from router.api.desk import worker_codec
from router.fleet.observed import CHECKS_MIN, PROMPTS_MAX, RATES, SLICE_FIRST_TOKENS, Observed
from router.fleet.rates import work
from router.fleet.state import OBSERVED_S
from router.request.prompt import Prompt
from tests.stage.fleet import Fleet, prompt

MODEL = "m"
A, B = WorkerKey("a", 0), WorkerKey("b", 0)


def counters(**numbers: float) -> dict[str, float]:
    names = ("prefix_query_tokens", "prefix_hit_tokens", "first_tokens", "first_token_seconds")
    return {name: numbers.get(name, 0.0) for name in names}


def test_today_is_what_engines_counted_since_the_first_observed_request() -> None:
    observed = Observed()
    observed.on_heartbeat(A, MODEL, counters(prefix_query_tokens=1e6, prefix_hit_tokens=1e6))
    assert observed.workers == {}
    observed.on_pick(A, MODEL, 2, 100, 80, 0.0)
    for key, hits in ((A, 30.0), (B, 10.0)):  # b, too, though this router picked a alone
        observed.on_heartbeat(key, MODEL, counters(prefix_query_tokens=500, prefix_hit_tokens=400))
        grown = counters(prefix_query_tokens=600, prefix_hit_tokens=400 + hits)
        observed.on_heartbeat(key, MODEL, grown)
    shares = {key: worker.today.cached_share() for key, worker in observed.workers.items()}
    assert shares == {A: pytest.approx(0.3), B: pytest.approx(0.1)}
    worker = observed.workers[A]
    assert (worker.picks, worker.prompt_tokens, worker.cached_tokens) == (1, 100, 80)
    assert observed.workers[B].picks == 0


def test_an_engine_that_starts_again_counts_from_zero() -> None:
    observed = Observed()
    observed.on_pick(A, MODEL, 1, 10, 0, 0.0)
    for queries in (1000.0, 1500.0, 40.0):
        observed.on_heartbeat(A, MODEL, counters(prefix_query_tokens=queries))
    assert observed.workers[A].today.prompt_tokens == 540


def test_an_engine_that_counts_no_tokens_has_the_mean_of_its_shares_and_no_first_token() -> None:
    observed = Observed()
    observed.on_pick(A, MODEL, 1, 10, 5, 0.0)
    for share in (0.9, 0.2, 0.4):  # the first one is of before
        observed.on_heartbeat(A, MODEL, {"cache_hit_rate": share})
    observed.on_pick(A, MODEL, 1, 10, 5, 1.0)
    worker = observed.workers[A]
    assert worker.today.cached_share() == pytest.approx(0.3)
    assert worker.today.ttft_s() is observed.ttft_s(worker) is observed.ttft_error(worker) is None


def test_models_are_apart_and_workers_take_what_is_known_of_them_with_them() -> None:
    observed = Observed()
    observed.on_pick(A, MODEL, 1, 10, 5, 0.0)
    for _ in range(2):
        observed.on_heartbeat(B, "another", counters(prefix_query_tokens=9))
    assert set(observed.workers) == {A}
    observed.on_pick(B, "another", 1, 20, 5, 0.0)
    observed.forget([A])
    assert set(observed.workers) == {B}
    assert set(observed._models) == {"another"}
    observed.forget([B])
    assert (observed.workers, observed._models) == ({}, {})


RATE = 20_000.0
"""Tokens of work that each of the engines computes in a second."""
WORKERS = 4


def fed(requests: int, arrivals_s: float, share_today: float, share: float) -> Observed:
    """Random prompts, as a round robin over engines of that rate serves them; this router picks
    the engine that is free first. Heartbeats come each second."""
    rng, observed = random.Random(3), Observed()
    keys = [WorkerKey(f"w{number}", 0) for number in range(WORKERS)]
    free_s, today, now_s, due_s = [0.0] * WORKERS, counters(), 0.0, 0.0
    first: list[tuple[float, float]] = []
    for number in range(requests):
        now_s += rng.expovariate(1 / arrivals_s)
        tokens = rng.randrange(1000, 9000)
        line = number % WORKERS
        seconds = float(work(tokens * (1 - share_today), tokens)) / RATE
        free_s[line] = max(free_s[line], now_s) + seconds
        heappush(first, (free_s[line], free_s[line] - now_s))
        today["prefix_query_tokens"] += tokens
        today["prefix_hit_tokens"] += tokens * share_today
        while first and first[0][0] <= now_s:
            today["first_tokens"] += 1
            today["first_token_seconds"] += heappop(first)[1]
        observed.on_pick(keys[line], MODEL, WORKERS, tokens, int(tokens * share), now_s)
        if now_s >= due_s:
            due_s = now_s + 1.0
            observed.on_heartbeat(keys[0], MODEL, dict(today))  # stands for all four
    return observed


def served_s(requests: int, arrivals_s: float, share: float) -> float:
    """The mean first token of the same prompts at the same engines."""
    rng, now_s, lines = random.Random(3), 0.0, [0.0] * WORKERS
    heapify(lines)
    taken = []
    for number in range(requests):
        now_s += rng.expovariate(1 / arrivals_s)
        tokens = rng.randrange(1000, 9000)
        line = number % WORKERS
        lines[line] = max(lines[line], now_s) + float(work(tokens * (1 - share), tokens)) / RATE
        taken.append(lines[line] - now_s)
    return float(np.mean(taken))


@pytest.mark.parametrize("arrivals_s", [1.0, 0.08])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_the_estimated_first_token_is_the_one_of_engines_like_the_model(
    arrivals_s: float, share: float
) -> None:
    observed = fed(3000, arrivals_s, 0.2, share)
    picked = [worker for worker in observed.workers.values() if worker.picks]
    seconds = [observed.ttft_s(worker) for worker in picked]
    weighed = sum(each * worker.picks for each, worker in zip(seconds, picked, strict=True))
    expected_s = served_s(3000, arrivals_s, share)
    assert weighed / 3000 == pytest.approx(expected_s, rel=0.08)
    error = observed.ttft_error(picked[0])
    assert error is not None
    assert 0 < error < 0.15


def test_engines_that_change_their_pace_show_in_the_error() -> None:
    def error(slower: float, slices: int = 12) -> float | None:
        observed, numbers = Observed(), counters()
        for number in range(slices * SLICE_FIRST_TOKENS):
            pace = slower if number > 6 * SLICE_FIRST_TOKENS else 1.0
            observed.on_pick(A, MODEL, 1, 4000, 0, 10.0 * number)
            numbers["prefix_query_tokens"] += 4000
            numbers["first_tokens"] += 1
            numbers["first_token_seconds"] += pace
            observed.on_heartbeat(A, MODEL, dict(numbers))
        return observed.ttft_error(observed.workers[A])

    steady, slowed = error(1.0), error(3.0)
    assert steady is not None
    assert slowed is not None
    assert steady < 0.02
    assert slowed > 0.2
    assert error(1.0, slices=CHECKS_MIN) is None  # and a first one, from which to predict


def test_a_first_token_beyond_all_rates_is_estimated_at_the_nearest_one() -> None:
    observed, numbers = Observed(), counters()
    for _ in range(3):
        observed.on_pick(A, MODEL, 1, 4000, 0, 0.0)
        numbers["prefix_query_tokens"] += 4000
        numbers["first_tokens"] += 1
        numbers["first_token_seconds"] += 1e9
        observed.on_heartbeat(A, MODEL, dict(numbers))
    estimated_s = observed.ttft_s(observed.workers[A])
    assert estimated_s is not None
    assert estimated_s < 10 * float(work(4000, 4000)) / RATES[0]


def test_a_workers_status_has_what_is_observed_of_it() -> None:
    def status(worker: str) -> Any:
        source = fleet.view.sources[WorkerKey(worker, 0)]
        return worker_codec.write_worker(source, fleet.core, fleet.now_s)

    fleet = Fleet()
    fleet.add("w0", model=MODEL)
    assert not status("w0").HasField("observed")
    request = fleet.request(prompt(100), model=MODEL, observed=True)
    fleet.core.route(request, fleet.now_s)
    observed = status("w0").observed
    assert (observed.picks, observed.prompt_tokens, observed.cached_tokens) == (1, 100, 0)
    assert not observed.HasField("cached_share_today")
    for hits in (0.0, 60.0, 60.0):
        numbers = counters(prefix_query_tokens=hits * 2, prefix_hit_tokens=hits, first_tokens=hits)
        fleet.say(WorkerKey("w0", 0), numbers=numbers | {"first_token_seconds": hits / 4})
        fleet.core.route(request, fleet.now_s)
    observed = status("w0").observed
    assert (observed.picks, observed.prompt_tokens_today) == (4, 120)
    assert observed.cached_share_today == pytest.approx(0.5)
    assert (observed.first_tokens_today, observed.ttft_ms_today) == (60, pytest.approx(250.0))
    assert observed.estimated_ttft_ms > 0
    assert observed.estimated_picks == 2  # the engine counts what came between two heartbeats
    assert not observed.HasField("ttft_error")


def test_a_pick_weighs_what_earlier_ones_would_have_left_to_compute() -> None:
    fleet = Fleet(policy="dynamo-adaptive")
    for name in ("w0", "w1"):
        fleet.add(name, model=MODEL)
    fleet.cache(WorkerKey("w0", 0), prompt(640))

    def picked(first: int) -> str:
        """The worker of a prompt that w0 has most of, and whose end is new."""
        request = fleet.request(prompt(640 + first), model=MODEL, observed=True)
        return fleet.core.route(request, fleet.now_s).reservation.worker.worker_id

    assert {picked(64) for _ in range(8)} == {"w0"}  # the engines' pace is not known yet
    for count in range(1, 4):
        fleet.turn(60.0)
        numbers = counters(prefix_query_tokens=1000 * count, first_tokens=count)
        for name in ("w0", "w1"):
            seconds = {"first_token_seconds": 2.0 * count}
            fleet.say(WorkerKey(name, 0), numbers=numbers | seconds)
        assert picked(64) == "w0"
    burst = [picked(64 + number) for number in range(12)]
    assert set(burst) == {"w0", "w1"}
    assert len(fleet.core.reservations) == 0
    observed = fleet.core.fleet.observed
    assert max(observed.ahead(list(observed.workers), fleet.now_s)) > 0
    assert not any(observed.ahead(list(observed.workers), fleet.now_s + 60.0))
    fleet.turn(60.0)
    assert picked(64) == "w0"


def test_blocks_of_the_request_itself_are_no_cache_that_it_found() -> None:
    fleet = Fleet()
    for name in ("w0", "w1"):
        fleet.add(name, model=MODEL)
    w0, asked = WorkerKey("w0", 0), prompt(320)

    def cached() -> tuple[str, int]:
        request = fleet.request(asked, model=MODEL, observed=True)
        pick = fleet.core.route(request, fleet.now_s)
        overlap = pick.overlap
        assert overlap.usable == overlap.device + overlap.host + overlap.disk + overlap.predicted
        assert overlap.usable <= overlap.raw
        return pick.reservation.worker.worker_id, overlap.usable

    fleet.cache(w0, asked, 160)
    fleet.route(prompt(10), observed=True)
    fleet.turn(2.0)
    fleet.store(w0, asked.prefixes(16)[10:])  # by the request that another router sent there
    assert cached() == ("w0", 160)
    plain = fleet.decide(asked, model=MODEL)
    assert plain.overlap(plain.order[0]).usable == 304
    assert cached() == ("w0", 304)  # these blocks are the earlier request's
    fleet.turn(2.0)
    assert cached() == ("w0", 304)


def test_blocks_that_an_earlier_request_has_too_are_a_cache_at_once() -> None:
    fleet = Fleet()
    key = fleet.add("w0", model=MODEL)
    system = tuple(range(160))

    def cached(own: int) -> int:
        asked = Prompt.from_tokens(pack_tokens((*system, *range(own, own + 80))))
        fleet.store(key, asked.prefixes(16))
        request = fleet.request(asked, model=MODEL, observed=True)
        return fleet.core.route(request, fleet.now_s).overlap.usable

    assert [cached(own) for own in (1000, 2000, 3000)] == [224, 160, 160]
    many = [cached(own) for own in range(10_000, 10_000 + 100 * PROMPTS_MAX, 100)]
    assert set(many) == {160}
    assert len(fleet.core.fleet.observed._prompts) == PROMPTS_MAX


def test_newly_stored_blocks_are_kept_while_observed_requests_come() -> None:
    fleet = Fleet()
    fleet.add("w0", model=MODEL)
    assert fleet.view.newest is None
    fleet.route(prompt(10), observed=True, model=MODEL)
    assert fleet.view.newest is not None
    fleet.turn(OBSERVED_S / 2)
    assert fleet.view.newest is not None
    fleet.turn(OBSERVED_S)
    assert fleet.view.newest is None
