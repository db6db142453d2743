"""The core's answers: repeated requests, reports, explanations, chance."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.decide.core.progress import ProgressResult, ProgressState, Repeated
from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores
from router.fleet.reservations.reservations import (
    FORGOTTEN_SLICE,
    RESERVATION_UNITS,
    SLICE_UNITS,
    Ending,
)
from router.request.prompt import Prompt
from router.request.refusal import Reason
from router.request.request import Role
from tests.router.decide.core.outcomes import refused, snapshot
from tests.stage.fleet import Fleet, prompt


class TestIdempotency:
    def test_the_same_id_and_prompt_get_the_same_answer_and_reserve_once(self) -> None:
        fleet = Fleet("w0", "w1", "w2", "w3")
        first = fleet.route(prompt(50), request_id="x")
        before = snapshot(fleet)
        for _ in range(5):
            again = fleet.core.route(fleet.request(prompt(50), request_id="x"), fleet.now_s)
            assert again == Repeated(first.reservation)
        assert snapshot(fleet) == before

    @pytest.mark.parametrize(
        ("asked", "about"),
        [
            (prompt(51), {}),
            (prompt(50, first=1), {}),
            (prompt(50, cache_salt="t"), {}),
            (prompt(50), {"model": "m"}),
            (prompt(50), {"role": Role.DECODE}),
        ],
        ids=["longer", "other tokens", "other salt", "other model", "other phase"],
    )
    def test_an_id_that_was_used_for_something_else_is_refused(
        self, asked: Prompt, about: dict[str, Any]
    ) -> None:
        fleet = Fleet("w0")
        fleet.route(prompt(50), request_id="x")
        refusal = refused(fleet, asked, request_id="x", **about)
        assert refusal.reason is Reason.REQUEST_ID_REUSED
        assert "'x'" in refusal.message

    def test_a_finished_request_is_remembered_for_the_window(self) -> None:
        fleet = Fleet("w0", lease_s=40.0)
        first = fleet.route(prompt(8), request_id="x").reservation
        fleet.report(first, "finished")
        fleet.turn(59)
        again = fleet.core.route(fleet.request(prompt(8), request_id="x"), fleet.now_s)
        assert again == Repeated(first)
        assert fleet.loads() == {}
        fleet.turn(2)
        assert fleet.route(prompt(9), request_id="x").reservation is not first

    @pytest.mark.parametrize("failure", [one for one in Ending if one.name.startswith("FAILED")])
    def test_a_failed_request_is_routed_anew(self, failure: Ending) -> None:
        fleet = Fleet("w0", "w1", policy="round-robin")
        first = fleet.route(prompt(8), request_id="x").reservation
        fleet.report(first, "failed", failure=failure)
        second = fleet.route(prompt(8), request_id="x").reservation
        assert second.worker != first.worker
        assert sum(requests for requests, _, _ in fleet.loads().values()) == 1
        assert fleet.report(first, "failed", failure=failure) is ProgressResult.UNCHANGED
        assert second.ended is None

    def test_a_request_whose_lease_or_worker_went_is_routed_anew(self) -> None:
        fleet = Fleet("w0", lease_s=10.0)
        first = fleet.route(prompt(8), request_id="x").reservation
        fleet.turn(10)
        assert first.ended is Ending.EXPIRED
        second = fleet.route(prompt(8), request_id="x").reservation
        fleet.add("w1")
        fleet.core.remove("w0", 60.0, fleet.now_s)
        assert second.ended is Ending.WORKER_LOST
        third = fleet.route(prompt(8), request_id="x").reservation
        assert third.worker.worker_id == "w1"

    def test_asking_again_begins_the_lease_anew(self) -> None:
        fleet = Fleet("w0", lease_s=10.0)
        first = fleet.route(prompt(8), request_id="x").reservation
        fleet.turn(9)
        fleet.core.route(fleet.request(prompt(8), request_id="x"), fleet.now_s)
        fleet.turn(9)
        assert first.ended is None
        fleet.turn(1)
        assert first.ended is Ending.EXPIRED

    def test_reservation_ids_name_their_replica_and_never_repeat(self) -> None:
        fleet = Fleet("w0", replica="router-7")
        ids = [fleet.route(prompt(8)).reservation.id for _ in range(20)]
        assert len(set(ids)) == 20
        assert all(one.startswith("router-7-") for one in ids)


class TestReports:
    def one(self) -> tuple[Fleet, Any]:
        fleet = Fleet(lease_s=10.0)
        key = fleet.add("w0")
        fleet.cache(key, prompt(64), 32)
        held = fleet.route(prompt(100)).reservation
        assert fleet.loads() == {key: (1, 7, 100 - 32)}
        return fleet, held

    def test_prefill_tokens_count_until_the_prompt_is_computed(self) -> None:
        fleet, held = self.one()
        assert fleet.report(held, "prefill_done") is ProgressResult.APPLIED
        assert fleet.loads() == {held.worker: (1, 7, 0)}
        assert fleet.report(held, "prefill_done") is ProgressResult.UNCHANGED
        assert fleet.loads() == {held.worker: (1, 7, 0)}

    def test_output_shows_that_the_prompt_is_computed_though_nobody_told(self) -> None:
        fleet, held = self.one()
        fleet.report(held, "running")
        assert fleet.loads() == {held.worker: (1, 7, 68)}
        assert fleet.report(held, "running", output_tokens=1) is ProgressResult.APPLIED
        assert fleet.loads() == {held.worker: (1, 7, 0)}

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_an_end_frees_all_of_it_once(self, state: str) -> None:
        fleet, held = self.one()
        assert fleet.report(held, state) is ProgressResult.APPLIED
        assert fleet.loads() == {}
        assert fleet.report(held, state) is ProgressResult.UNCHANGED
        assert fleet.report(held, "prefill_done") is ProgressResult.UNCHANGED
        assert fleet.loads() == {}
        assert fleet.core.endings.total() == 1

    def test_a_later_state_is_not_undone_by_an_earlier_one(self) -> None:
        fleet, held = self.one()
        fleet.report(held, "finished")
        assert fleet.report(held, "running", output_tokens=3) is ProgressResult.APPLIED
        assert held.output_tokens == 3, "a count may come late"
        assert held.ended is Ending.FINISHED
        assert fleet.loads() == {}

    def test_counts_are_cumulative(self) -> None:
        fleet, held = self.one()
        assert fleet.report(held, "running", output_tokens=5) is ProgressResult.APPLIED
        assert fleet.report(held, "running", output_tokens=5) is ProgressResult.UNCHANGED
        assert fleet.report(held, "running", output_tokens=3) is ProgressResult.UNCHANGED
        assert held.output_tokens == 5

    def test_cached_tokens_are_learned_once(self) -> None:
        fleet, held = self.one()
        fleet.report(held, "prefill_done", cached_tokens=48)
        fleet.report(held, "finished", cached_tokens=48)
        told = fleet.core.fleet.cache_reports[held.worker]
        assert (told.predicted, told.reported) == (32, 48)

    def test_cached_tokens_beyond_the_prompt_are_not_believed(self) -> None:
        fleet, held = self.one()
        fleet.report(held, "finished", cached_tokens=(1 << 32) - 1)
        assert held.cached_tokens == 100
        assert fleet.core.fleet.cache_reports[held.worker].reported == 100

    def test_a_late_report_leaves_no_trace_of_a_worker_that_is_gone(self) -> None:
        fleet, held = self.one()
        fleet.report(fleet.route(prompt(20)).reservation, "finished", cached_tokens=0)
        assert held.worker in fleet.core.fleet.cache_reports
        fleet.core.remove("w0", 60.0, fleet.now_s)
        assert fleet.report(held, "finished", cached_tokens=32) is ProgressResult.UNKNOWN
        assert fleet.core.fleet.cache_reports == {}
        assert fleet.core.fleet.loads == {}

    def test_a_reservation_of_another_replica_is_unknown(self) -> None:
        fleet, _ = self.one()
        before = snapshot(fleet)
        for state in ProgressState:
            assert fleet.report("elsewhere-1", state) is ProgressResult.UNKNOWN
        assert snapshot(fleet) == before

    def test_who_reports_on_an_expired_one_learns_that_it_holds_nothing(self) -> None:
        fleet, held = self.one()
        fleet.turn(10)
        assert held.ended is Ending.EXPIRED
        assert fleet.report(held, "running") is ProgressResult.UNKNOWN
        assert fleet.report(held, "finished") is ProgressResult.UNKNOWN
        assert fleet.loads() == {}

    @pytest.mark.parametrize("state", ["running", "prefill_done"])
    def test_every_report_renews_the_lease(self, state: str) -> None:
        fleet, held = self.one()
        for _ in range(5):
            fleet.turn(9)
            fleet.report(held, state)
        assert held.ended is None
        fleet.turn(10)
        assert held.ended is Ending.EXPIRED

    def test_a_lease_that_ends_frees_the_load(self) -> None:
        fleet, _ = self.one()
        fleet.now_s += 9.999
        assert fleet.core.tick(fleet.now_s) == 0
        assert fleet.loads() != {}
        fleet.now_s += 0.001
        assert fleet.core.tick(fleet.now_s) == 1
        assert fleet.loads() == {}
        assert fleet.core.endings == {Ending.EXPIRED: 1}
        assert fleet.core.tick(fleet.now_s) == 0

    def test_leases_that_end_together_end_in_slices(self) -> None:
        fleet = Fleet(lease_s=10, session_ttl_s=30)
        fleet.add("w0", total_slots=None, total_blocks=None)
        count = 1500
        for i in range(count):
            fleet.route(prompt(16 * (i % 3) + 1), session_id=f"s{i}")
        most = SLICE_UNITS // RESERVATION_UNITS
        fleet.now_s += 10
        assert fleet.core.tick(fleet.now_s) <= most
        slices = []
        while fleet.core.behind(fleet.now_s):
            slices.append(fleet.core.catch_up(fleet.now_s))
        assert max(slices) <= most
        assert fleet.core.endings == {Ending.EXPIRED: count}
        assert fleet.loads() == {}
        fleet.now_s += 30
        fleet.core.tick(fleet.now_s)
        dropped = (
            count - fleet.core.fleet.sessions.forgotten["no_room"] - len(fleet.core.fleet.sessions)
        )
        assert dropped <= FORGOTTEN_SLICE
        while fleet.core.behind(fleet.now_s):
            fleet.core.catch_up(fleet.now_s)
        assert repr(fleet.core.reservations) == "<Reservations 0 open, 0 remembered>"
        assert len(fleet.core.fleet.sessions) == 0

    def test_one_long_prompt_fills_a_slice(self) -> None:
        fleet = Fleet(lease_s=10, index=NativeIndex())
        fleet.add("w0", total_slots=None, total_blocks=None)
        for _ in range(2):
            fleet.route(prompt(16 * SLICE_UNITS))
        fleet.now_s += 10
        assert fleet.core.tick(fleet.now_s) == 1
        assert fleet.core.behind(fleet.now_s)
        assert fleet.core.catch_up(fleet.now_s) == 1
        assert not fleet.core.behind(fleet.now_s)

    def test_an_answer_that_could_not_be_given_is_withdrawn_once(self) -> None:
        fleet, held = self.one()
        fleet.core.withdraw(held, fleet.now_s)
        fleet.core.withdraw(held, fleet.now_s)
        assert fleet.loads() == {}
        assert fleet.core.endings == {Ending.FAILED_UNKNOWN: 1}


class TestDeciding:
    def test_deciding_changes_nothing(self) -> None:
        fleet = Fleet("w0", "w1", "w2", "w3")
        fleet.route(prompt(50))
        before = snapshot(fleet)
        for _ in range(10):
            fleet.decide(prompt(60))
        assert snapshot(fleet) == before

    def test_order_is_the_pick_and_the_next_best(self) -> None:
        fleet = Fleet(alternatives=2)
        asked = prompt(200)
        for i, tokens in enumerate([32, 96, 0, 160, 64]):
            fleet.cache(fleet.add(f"w{i}"), asked, tokens)
        decision = fleet.decide(asked)
        assert [decision.rows.workers[row].worker_id for row in decision.order] == [
            "w3",
            "w1",
            "w4",
        ]
        assert decision.tied == 1

    def test_there_is_a_runner_up_even_if_answers_carry_no_alternatives(self) -> None:
        fleet = Fleet("w0", "w1", alternatives=0)
        assert len(fleet.decide(prompt(8)).order) == 2

    def test_stages_are_marked_in_order(self) -> None:
        fleet = Fleet("w0")
        marks: list[str] = []
        fleet.core.route(fleet.request(prompt(8)), fleet.now_s, marks.append)
        assert marks == ["hash", "match", "cost"]

    def test_exclusions_count_every_worker_that_cannot_be_picked(self, fleet: Fleet) -> None:
        for i in range(5):
            fleet.add(f"w{i}", role="decode" if i < 2 else "both")
        fleet.say(WorkerKey("w2", 0), healthy=False)
        fleet.core.drain("w3")
        assert fleet.decide(prompt(8)).exclusions() == {
            "role is decode": 2,
            "engine not answering": 1,
            "drained": 1,
        }


class TestChances:
    def test_where_a_policy_gives_chances_the_pick_is_drawn_by_them(self) -> None:
        def score(rows: Candidates, _: Parameters) -> Scores:
            return Scores(np.array([0.0, 1.0, 2.0, 3.0]), chances=np.array([0.0, 1.0, 3.0, 4.0]))

        fleet = Fleet()
        fleet.core.policies["drawn"] = Policy("drawn", "", "", Parameters(), score)
        for name in "abcd":
            fleet.add(name)
        fleet.core.drain("d")
        picks: Counter[str] = Counter()
        for _ in range(400):
            decision = fleet.decide(prompt(8), policy="drawn")
            names = [decision.rows.workers[row].worker_id for row in decision.order]
            picks[names[0]] += 1
            assert names == {"b": ["b", "a", "c"], "c": ["c", "a", "b"]}[names[0]]
        assert picks["b"] + picks["c"] == 400
        assert 70 < picks["b"] < 130  # a quarter, and what five standard deviations may add
