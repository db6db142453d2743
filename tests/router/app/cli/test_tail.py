"""`kvroute tail`: a decision on one line."""

from kvroute.v1 import Receipt, WatchDecisionsResponse, WatchedDecision
from router.app.calls.tail import line_of, lines


def a_pick() -> WatchedDecision:
    decision = WatchedDecision(
        decided_at_s=1_800_000_000.25,
        request_id="r-1",
        reservation_id="kv-7",
        prompt_tokens=8192,
        receipt=Receipt(),
    )
    picked = decision.receipt.picked
    picked.worker_id, picked.dp_rank, picked.cost = "gpu-a", 1, 0.5
    picked.overlap_tokens.usable, picked.waiting, picked.running = 6144, 2, 3
    return decision


def test_a_pick_names_its_worker_cache_cost_queue_request_and_reservation() -> None:
    words = line_of(a_pick()).plain.split()
    assert words[1:] == ["gpu-a/1", "6,144", "/", "8,192", "0.500", "5", "r-1", "kv-7"]
    assert words[0].endswith(".250")


def test_the_guard_names_the_worker_that_it_passed_over() -> None:
    decision = a_pick()
    decision.receipt.guarded.cheapest.worker_id = "gpu-b"
    assert line_of(decision).plain.endswith("guard: not gpu-b")


def test_a_request_that_waited_has_its_wait_picked_or_refused() -> None:
    decision = a_pick()
    decision.waited_s = 30.25
    assert line_of(decision).plain.endswith("kv-7  waited 30.250 s")
    refusal = WatchedDecision(request_id="r-2", refusal="QUEUE_TIMEOUT", waited_s=60)
    assert line_of(refusal).plain.endswith("r-2  waited 60.000 s")


def test_a_refusal_has_its_reason_and_sentence_and_no_escape_sequence() -> None:
    decision = WatchedDecision(
        request_id="r\x1b[31m", refusal="NO_WORKER", message="no live worker for 'm\x1b'"
    )
    text = line_of(decision).plain
    assert "NO_WORKER  no live worker" in text
    assert "\x1b" not in text


def test_what_was_left_out_is_said() -> None:
    response = WatchDecisionsResponse(left_out=3, limited=True)
    first, second = lines(response, as_json=False)
    assert "3 more were left out" in str(first)
    assert "more were made in this second" in str(second)


def test_json_has_a_line_for_each_decision() -> None:
    response = WatchDecisionsResponse(decisions=[a_pick(), a_pick()], left_out=1)
    made = list(lines(response, as_json=True))
    assert len(made) == 2
    assert all('"worker_id": "gpu-a"' in line for line in made)
