"""Sampled decisions: the receipt's numbers, bounded, without prompts."""

import msgspec

from kvroute.v1 import router_pb2
from router.api.desk.answer_codec import answer_writer
from router.decide.core.progress import Pick
from router.decide.decision.decision import Decision
from router.observe.views.decisions import KEPT_MAX, ROWS_MAX, Decisions, ShownDecision
from router.request.refusal import Reason, Refusal, Refused
from tests.stage.fleet import Fleet, prompt
from tests.stage.guards import TunedGuard


def watched(fleet: Fleet, decisions: Decisions, tokens: int, **about: object) -> Decision:
    seen: list[Decision] = []

    def watch(decision: Decision) -> None:
        decisions.watch(decision)
        seen.append(decision)

    request = fleet.request(prompt(tokens), **about)
    assert isinstance(fleet.core.route(request, fleet.now_s, watch=watch), Pick)
    return seen[0]


def fleet_of(workers: int, **routing: object) -> tuple[Fleet, Decisions]:
    fleet = Fleet(**routing)
    for i in range(workers):
        fleet.add(f"w{i:03}", running=i % 7, used_blocks=float(10 * i % 90))
    return fleet, Decisions(lambda: fleet.core.policies.get("ttft"))


def test_a_shown_decision_has_the_receipts_numbers() -> None:
    fleet, decisions = fleet_of(5)
    fleet.cache(next(iter(fleet.relays)), prompt(256))
    decision = watched(fleet, decisions, 512)
    receipt = router_pb2.Receipt.FromString(answer_writer(fleet.core).receipt(decision))
    (shown,) = decisions.kept
    picked = shown.rows[0]
    assert (shown.policy, shown.formula) == (receipt.policy, receipt.formula)
    assert shown.candidates == receipt.candidates == 5
    assert shown.prompt_tokens == 512
    assert picked.worker_id == receipt.picked.worker_id
    assert picked.cost == receipt.picked.cost
    assert picked.terms == dict(receipt.picked.terms)
    assert picked.usable_tokens == receipt.picked.overlap_tokens.usable
    assert shown.rows[1].worker_id == receipt.runner_up.worker_id
    assert [row.cost for row in shown.rows] == sorted(row.cost or 0.0 for row in shown.rows)
    assert shown.otherwise is not None
    assert shown.otherwise.worker_id in {row.worker_id for row in shown.rows}
    assert all(row.ttft_s is not None and row.ttft_s > 0 for row in shown.rows)


def test_the_time_in_the_queue_is_shown_of_picks_and_refusals() -> None:
    fleet, decisions = fleet_of(2)

    def watch(decision: Decision) -> None:
        decision.waited_s = 2.5
        decisions.watch(decision)

    fleet.core.route(fleet.request(prompt(64)), fleet.now_s, watch=watch)
    timeout = Refusal(Reason.QUEUE_TIMEOUT, "no worker had room")
    decisions.watch_refused(Refused(timeout, fleet.now_s, waited_s=60.0))
    assert [shown.waited_s for shown in decisions.kept] == [2.5, 60.0]


def test_the_other_policys_choice_is_that_of_its_gain() -> None:
    """The worker that is named is the one whose time is told, behind the policy's own guard."""
    fleet = Fleet(guard=TunedGuard(request_tokens=512.0, margin=0.05))
    keys = [fleet.add(f"w{i}", total_blocks=40_000, total_slots=256) for i in range(3)]
    fleet.cache(keys[0], prompt(5000), 4096)
    decisions = Decisions(lambda: fleet.core.policies.get("ttft"))
    for busy in range(40):
        fleet.say(keys[0], running=busy, used_blocks=900.0)
        watched(fleet, decisions, 4200)
        shown = decisions.kept[-1]
        other = shown.otherwise
        assert other is not None
        if other.agreement == "other":
            (row,) = [row for row in shown.rows if row.worker_id == other.worker_id]
            assert row.ttft_s is not None
            assert shown.rows[0].ttft_s is not None
            assert abs(shown.rows[0].ttft_s - row.ttft_s - other.sooner_s) < 1e-9
    assert {each.otherwise.agreement for each in decisions.kept if each.otherwise} & {
        "same",
        "tied",
    }


def test_rows_and_decisions_are_bounded_and_the_excluded_come_last() -> None:
    fleet, decisions = fleet_of(ROWS_MAX + 20)
    fleet.core.drain("w000")
    for _ in range(KEPT_MAX + 5):
        watched(fleet, decisions, 64)
    assert len(decisions.kept) == KEPT_MAX
    assert decisions.kept[0].number == 6
    last = decisions.kept[-1]
    assert len(last.rows) == ROWS_MAX
    assert last.candidates == ROWS_MAX + 20
    assert sum(last.excluded.values()) == 1
    assert [each.number for each in decisions.since(KEPT_MAX + 3)] == [KEPT_MAX + 4, KEPT_MAX + 5]
    small, few = fleet_of(3)
    small.core.drain("w000")
    watched(small, few, 64)
    assert [bool(row.excluded) for row in few.kept[0].rows] == [False, False, True]


def test_a_move_of_the_guard_names_the_row_that_it_left() -> None:
    fleet = Fleet(guard=TunedGuard(request_tokens=512.0, margin=0.05))
    keys = [fleet.add(f"w{i}", total_blocks=40_000, total_slots=256) for i in range(3)]
    fleet.cache(keys[0], prompt(5000), 4096)
    fleet.say(keys[0], running=20, used_blocks=900.0)
    decisions = Decisions(lambda: None)
    decision = watched(fleet, decisions, 4200)
    (shown,) = decisions.kept
    assert decision.guarded is not None
    assert shown.guard is not None
    assert shown.guard.cheapest == 1
    assert shown.rows[1].worker_id == "w0"
    assert shown.rows[0].worker_id != "w0"
    assert shown.guard.cheapest_wait_tokens > shown.guard.least_wait_tokens
    assert shown.otherwise is None


def test_a_refusal_is_kept_with_its_reason_and_cut_texts() -> None:
    decisions = Decisions(lambda: None)
    refusal = Refusal(Reason.NO_WORKER, "x" * 10_000)
    decisions.watch_refused(Refused(refusal, 5.0, "r" * 1000, "m"))
    (shown,) = decisions.kept
    assert (shown.refusal, shown.model) == ("NO_WORKER", "m")
    assert len(shown.message) < 1000
    assert len(shown.request_id) < 1000
    assert msgspec.json.decode(msgspec.json.encode(shown), type=ShownDecision) == shown


def test_nothing_of_a_prompt_or_a_session_is_kept() -> None:
    fleet, decisions = fleet_of(2)
    watched(fleet, decisions, 64, session_id="secret-session", tenant="secret-tenant")
    content = msgspec.json.encode(decisions.kept[0])
    assert b"secret" not in content
