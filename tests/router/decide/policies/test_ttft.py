"""ttft: golden numbers worked out by hand, and what must never happen."""

from collections import Counter

import pytest

from indexer.identity import WorkerKey
from tests.router.decide.policies.scored import best, score
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import RATE

OWN = 500 + 1000 * (1 + 500 / 50_000)
"""1000 new tokens, 1010 with attention to 500 others on average, and 500 for the request."""


def test_an_idle_worker_costs_its_own_prefill() -> None:
    assert OWN == 1510
    assert score("ttft", 1000, {}).costs == pytest.approx([1.51])


def test_what_has_to_go_for_its_blocks_is_computed_once_more() -> None:
    # 1000 tokens are 62.5 blocks. There is room for all beside 112 recent ones of 200; for half of
    # them, 31.25, of 143.25; for none where all are recent; and who knows of the last one.
    recent = {"recent_blocks": 112}
    scores = score(
        "ttft",
        1000,
        {**recent, "total_blocks": 200},
        {**recent, "total_blocks": 143.25},
        {**recent, "total_blocks": 100},
        recent,
    )
    assert scores.row_terms["evicted_share"] == pytest.approx([0, 0.5, 1, 0])
    assert scores.costs == pytest.approx([1.51, 1.5 * 1.51, 2 * 1.51, 1.51])


def test_cached_tokens_are_not_computed() -> None:
    # 600 of 1600 tokens are new, which attend to 1600 - 300 on average
    scores = score("ttft", 1600, {"overlap_tokens": 1008})
    own = 500 + 592 * (1 + (1600 - 296) / 50_000)
    assert scores.row_terms["prefill_s"] == pytest.approx([own / RATE])


def test_prompts_under_way_are_waited_for_and_crowded() -> None:
    # Two prompts: 500 + 100 * (1 + 50/50000) = 600.1, 1510; then all 1510 of ours join their steps
    scores = score("ttft", 1000, {"prefills": [(100, 100), (1000, 1000)]})
    assert scores.row_terms["wait_s"] == pytest.approx([(600.1 + 1510) / RATE])
    assert scores.costs == pytest.approx([2.1101 + 1.51 + 0.6 * 1.51])


def test_what_replicas_and_others_have_sent_is_waited_for_too() -> None:
    # 400 tokens that nobody told us more of; 2 of 3 waiting requests are of others, of 5000 each
    scores = score("ttft", 1000, {"prefill_tokens_active": 400, "waiting": 3, "external": 2})
    assert scores.row_terms["wait_s"] == pytest.approx([(400 + 2 * 5000) / RATE])


def test_whoever_is_there_already_is_stalled() -> None:
    scores = score("ttft", 1000, {"running": 5, "active_blocks": 30, "total_blocks": 100})
    assert scores.costs == pytest.approx([1.51 + 0.06 * 5 * 1.51 + 1.0 * 0.3])


def test_an_answer_comes_slower_where_the_time_between_tokens_is_longer() -> None:
    busy = {"active_blocks": 30, "total_blocks": 100}
    assert score("ttft", 1000, {"tpot_s": 0.02} | busy, {"tpot_s": 0.06}).costs == pytest.approx(
        [1.51 + 25 * 0.02, 1.51 + 25 * 0.06]
    )


def test_load_counts_until_the_time_between_tokens_of_all_workers_is_known() -> None:
    half = {"active_blocks": 50, "total_blocks": 100}
    scores = score("ttft", 1000, {"tpot_s": 0.02} | half, half, {"tpot_s": 0.09})
    assert scores.row_terms["tpot_s"] == pytest.approx([0.02, 0.02, 0])  # 40 ms where all is in use


def test_a_prompt_that_does_not_fit_beside_those_which_run_waits_for_one_to_end() -> None:
    # 1000 tokens are 63 blocks. What open requests use of them already takes no more room.
    busy = {"active_blocks": 40, "total_blocks": 100}
    scores = score("ttft", 1000, busy, {**busy, "total_blocks": 103}, {**busy, "in_use": 3}, {})
    assert scores.row_terms["room_s"] == pytest.approx([5, 0, 0, 0])
    assert scores.costs[0] == pytest.approx(1.51 + 5 + 0.4)


def test_cache_on_host_and_disk_takes_its_time_but_never_more_than_computing() -> None:
    scores = score("ttft", 1000, {"host_tokens": 320}, {"disk_tokens": 320})
    assert scores.row_terms["load_s"] == pytest.approx([320 / 400_000, 320 / 80_000])
    fleet = Fleet(policy="ttft", prefill_rate=1e6)
    key = fleet.add("w0")
    fleet.cache(key, prompt(64), 32)
    fleet.remove(key, prompt(64).prefixes(16)[:2])
    decision = fleet.decide(prompt(64))
    assert decision.scores.row_terms["load_s"].tolist() == [0]


def test_a_prefix_that_all_hold_decides_nothing() -> None:
    held = {"overlap_tokens": 480}
    scores = score("ttft", 1000, {**held, "running": 1}, held, held)
    assert best(scores) == [1, 2]


def test_equal_workers_tie() -> None:
    assert best(score("ttft", 1000, {}, {}, {})) == [0, 1, 2]


def serve(fleet: Fleet, tokens_s: dict[str, float], of: int, first: int) -> str:
    """A request from pick to end; its worker prefills at its own speed."""
    pick = fleet.route(prompt(of, first))
    worker = pick.reservation.worker.worker_id
    fleet.now_s += pick.reservation.new_tokens / tokens_s[worker]
    fleet.report(pick.reservation, "prefill_done")
    fleet.report(pick.reservation, "finished")
    return worker


def test_a_shared_system_prompt_pins_nobody() -> None:
    # Everybody's prompt starts with the same 1024 tokens, which one worker of eight holds at first.
    # The tails are each caller's own.
    fleet = Fleet(policy="ttft", prefill_rate=10_000.0)
    for i in range(8):
        fleet.add(f"w{i}")
    fleet.cache(WorkerKey("w0", 0), prompt(1024))
    picks: Counter[str] = Counter()
    for _ in range(160):  # all at once: queues decide
        picks[fleet.picked(prompt(1024 + 16))] += 1
    assert len(picks) == 8
    assert max(picks.values()) <= 1.6 * 160 / 8


def test_a_worker_of_half_the_speed_gets_less() -> None:
    fleet = Fleet(policy="ttft")
    speeds = {"slow": 5000.0, "fast": 20_000.0}
    for name in speeds:
        fleet.add(name)
    picks: Counter[str] = Counter()
    for i in range(80):
        fleet.turn(0.25)
        picks[serve(fleet, speeds, 8000, 100_000 * i)] += 1
    assert picks["fast"] > 1.5 * picks["slow"]


def test_a_worker_that_was_never_measured_is_neither_shunned_nor_sought() -> None:
    fleet = Fleet("old", policy="ttft", prefill_rate=1000.0)
    speeds = dict.fromkeys(("old", "new"), 50_000.0)
    for i in range(10):
        serve(fleet, speeds, 8000, 100_000 * i)
    fleet.add("new")
    fleet.turn(1)
    picks = Counter(serve(fleet, speeds, 8000, 100_000 * i) for i in range(10, 50))
    assert 10 <= picks["new"] <= 30
