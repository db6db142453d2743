"""The guard: numbers worked out by hand, its laws, and what it does in the core and in receipts."""

from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToJson
from hypothesis import assume, given
from hypothesis import strategies as st

from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.config.settings.routing_settings import GuardSettings
from router.decide.decision.guard import Waits
from router.fleet.table import Column, Flags
from router.observe.audit.receipt_file import read_receipts
from router.observe.audit.recompute_receipt import check
from tests.stage.fleet import Fleet, prompt
from tests.stage.guards import TunedGuard
from tests.stage.rows import rows

GUARD = TunedGuard(request_tokens=500.0, margin=0.05)
PROMPT = 4096 + 200
HOLDER = {"overlap_tokens": 4096}


def waits(*workers: dict[str, Any], settings: GuardSettings = GUARD) -> Waits:
    return Waits.of(rows(PROMPT, *workers), None, settings)


def test_a_wait_is_the_prompts_and_requests_in_front_and_what_is_new() -> None:
    seen = waits({**HOLDER, "running": 17, "prefill_tokens_active": 300}, {"waiting": 1})
    assert seen.tokens.tolist() == [300 + 17 * 500 + 2 * 200, 500 + 2 * 4296]
    assert seen.requests.tolist() == [17, 1]
    assert (seen.least_tokens, seen.least_requests) == (9092, 1)
    assert seen.margin_tokens == pytest.approx(0.05 * 4296)
    assert seen.passed_over.tolist() == [False, False], "9,200 is within the margin"


def test_tokens_that_count_for_later_prompts_are_no_wait() -> None:
    seen = waits({"invested_tokens": 3000.0}, {})
    assert seen.tokens.tolist() == [2 * 4296 - 2.2 * 3000, 2 * 4296]


def test_a_queue_that_costs_more_than_the_cache_saves_is_passed_over() -> None:
    assert waits({**HOLDER, "running": 16}, {}).passed_over.tolist() == [False, False]
    assert waits({**HOLDER, "running": 17}, {}).passed_over.tolist() == [True, False]


def test_where_all_have_as_many_requests_nothing_is_passed_over() -> None:
    busy = {"running": 3, "prefill_tokens_active": 90_000}
    assert not waits(busy, {"running": 3}).passed_over.any()


WORKER = st.fixed_dictionaries(
    {
        "overlap_tokens": st.integers(0, PROMPT),
        "running": st.integers(0, 40),
        "reserved": st.integers(-3, 40),
        "prefill_tokens_active": st.integers(0, 100_000),
    }
)
WORKERS = st.lists(WORKER, min_size=1, max_size=8)
SETTINGS = st.builds(TunedGuard, request_tokens=st.floats(0, 5000), margin=st.floats(0, 2))
COSTS = st.lists(st.integers(0, 6), min_size=8, max_size=8)


def moved(seen: Waits, costs: Column, can: Flags) -> int:
    """The pick among equals: the first row."""
    stays = can & ~seen.passed_over
    return int(np.argmin(np.where(stays, costs, np.inf)))


@given(workers=WORKERS, settings=SETTINGS, costs=COSTS, data=st.data())
def test_a_pick_goes_to_a_row_that_can_be_picked(
    workers: list[dict[str, int]], settings: GuardSettings, costs: list[int], data: st.DataObject
) -> None:
    can = np.array(data.draw(st.lists(st.booleans(), min_size=8, max_size=8)))[: len(workers)]
    assume(can.any())
    seen = Waits.of(rows(PROMPT, *workers), can, settings)
    stays = can & ~seen.passed_over
    assert stays.any()


@given(workers=WORKERS, settings=SETTINGS, requests=st.integers(0, 40))
def test_equal_numbers_of_requests_move_no_pick(
    workers: list[dict[str, int]], settings: GuardSettings, requests: int
) -> None:
    equal = [{**one, "running": requests, "reserved": 0} for one in workers]
    assert not Waits.of(rows(PROMPT, *equal), None, settings).passed_over.any()


@given(
    workers=WORKERS,
    settings=SETTINGS,
    costs=COSTS,
    row=st.integers(0, 7),
    running=st.integers(0, 20),
    tokens=st.integers(0, 20_000),
)
def test_a_longer_queue_never_draws_a_pick(
    workers: list[dict[str, int]],
    settings: GuardSettings,
    costs: list[int],
    row: int,
    running: int,
    tokens: int,
) -> None:
    assume(row < len(workers))
    can = np.ones(len(workers), np.bool_)
    by_cost = np.array(costs[: len(workers)], np.float64)
    before = moved(Waits.of(rows(PROMPT, *workers), None, settings), by_cost, can)
    longer = dict(workers[row])
    longer["running"] += running
    longer["prefill_tokens_active"] += tokens
    busier = [*workers[:row], longer, *workers[row + 1 :]]
    after = moved(Waits.of(rows(PROMPT, *busier), None, settings), by_cost, can)
    assert after != row or before == row


def fleet(**about: Any) -> Fleet:
    """Three workers of which w0 holds a prompt of 4,096 tokens; many requests run there."""
    made = Fleet(**{"guard": GUARD, **about})
    keys = [made.add(f"w{i}", total_blocks=40_000, total_slots=256) for i in range(3)]
    made.cache(keys[0], prompt(5000), 4096)
    made.say(keys[0], running=20, used_blocks=900.0)
    return made


def receipt_of(made: Fleet) -> router_pb2.Receipt:
    return made.answer(prompt(4200)).receipt


@pytest.mark.parametrize("native", [False, True])
def test_the_core_moves_a_pick_on_and_the_receipt_says_why(native: bool) -> None:
    made = fleet(index=NativeIndex() if native else None)
    receipt = receipt_of(made)
    assert receipt.picked.worker_id in {"w1", "w2"}
    assert receipt.runner_up.worker_id in {"w1", "w2"}
    guarded = receipt.guarded
    assert guarded.cheapest.worker_id == "w0"
    assert (guarded.cheapest_requests, guarded.picked_requests) == (20, 0)
    assert guarded.cheapest_wait_tokens == 20 * 500 + 2 * 104
    assert guarded.picked_wait_tokens == guarded.least_wait_tokens == 2 * 4200
    assert made.core.guarded == 1
    verdict = check(receipt)
    assert verdict.complaints == []
    assert verdict.moved_from is not None
    assert verdict.moved_from.sentence == (
        "guarded: w0/0 would have been cheapest by cost; 20 requests ahead of it make 10208 tokens"
        " to wait for, at the pick 8400, and it holds 4096 tokens more of the prompt"
    )


def test_one_switch_turns_it_off() -> None:
    made = fleet(guard=GuardSettings(policies=()))
    receipt = receipt_of(made)
    assert receipt.picked.worker_id == "w0"
    assert not receipt.HasField("guarded")


@pytest.mark.parametrize(("policy", "worker"), [("dynamo-unguarded", "w0"), ("conductor", "w0")])
def test_policies_that_are_not_named_keep_their_picks(policy: str, worker: str) -> None:
    assert fleet().picked(prompt(4200), policy=policy) == worker


@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_pick_is_moved_and_its_receipt_holds(seed: int) -> None:
    made = fleet(
        seed=seed,
        guard=TunedGuard(policies=("dynamo-blocks",), request_tokens=500.0),
        parameters={"dynamo-blocks": {"temperature": 5.0}},
    )
    receipt = made.answer(prompt(4200), policy="dynamo-blocks").receipt
    assert receipt.picked.worker_id in {"w1", "w2"}
    assert check(receipt).complaints == []


def test_an_idle_fleet_is_left_alone() -> None:
    made = Fleet()
    keys = [made.add(f"w{i}") for i in range(3)]
    made.cache(keys[1], prompt(5000), 512)
    assert made.picked(prompt(600)) == "w1"
    assert made.core.guarded == 0


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("cheapest_wait_tokens", 9999.0, "the wait of the cheapest is"),
        ("margin_tokens", 5000.0, "the guard had no reason to move the pick"),
        ("least_wait_tokens", 100.0, "the wait"),
    ],
)
def test_a_receipt_whose_guard_does_not_follow_is_noticed(
    field: str, value: float, complaint: str
) -> None:
    receipt = receipt_of(fleet())
    setattr(receipt.guarded, field, value)
    if field == "least_wait_tokens":  # the pick waits longer than the margin allows
        receipt.guarded.least_requests = -1.0
        complaint = "the guard would not have left the pick there"
    assert any(one.startswith(complaint) for one in check(receipt).complaints)


def test_a_receipt_of_a_moved_pick_can_be_read_back() -> None:
    text = MessageToJson(receipt_of(fleet())).encode()
    assert check(read_receipts(text).answer).complaints == []  # type: ignore[union-attr]
