"""Requests whose answers nobody sees: their steps by the worker's events and by its load."""

import pytest

from indexer.identity import WorkerKey
from indexer.index import BlockIndex
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex
from router.decide.core import unobserved
from router.decide.core.progress import Pick, ProgressResult
from router.fleet.health.first_tokens import LEARNED_MIN
from router.fleet.reservations.reservations import Ending, Reservation
from tests.stage.fleet import Fleet, prompt

W0 = WorkerKey("w0", 0)


def unseen(fleet: Fleet, *, first: int = 0, tokens: int = 64) -> Reservation:
    pick = fleet.route(prompt(tokens, first=first))
    assert isinstance(pick, Pick)
    fleet.report(pick.reservation, "running", unobserved=True)
    return pick.reservation


@pytest.mark.parametrize("index", [ReferenceIndex, NativeIndex])
class TestPrefill:
    def test_the_last_block_in_the_workers_events_shows_it(self, index: type[BlockIndex]) -> None:
        fleet = Fleet("w0", index=index())
        one = unseen(fleet)
        fleet.tick()
        assert not one.prefill_done  # the pick predicted its blocks, and that is no sign
        fleet.cache(W0, prompt(64), 48)
        fleet.tick()
        assert not one.prefill_done
        fleet.cache(W0, prompt(64))
        fleet.tick()
        assert one.prefill_done
        assert one.ended is None
        assert fleet.loads() == {W0: (1, 4, 0)}
        assert fleet.core.unobserved.prefills == 1

    def test_a_prompt_that_is_held_already_is_computed_at_once(
        self, index: type[BlockIndex]
    ) -> None:
        fleet = Fleet("w0", index=index())
        fleet.cache(W0, prompt(64))
        one = unseen(fleet)
        fleet.tick()
        assert one.prefill_done

    def test_the_same_blocks_on_another_worker_show_nothing(self, index: type[BlockIndex]) -> None:
        fleet = Fleet("w0", index=index())
        one = unseen(fleet)
        fleet.cache(fleet.add("w1"), prompt(64))
        fleet.tick()
        assert not one.prefill_done

    def test_a_prompt_shorter_than_a_block_shows_nothing(self, index: type[BlockIndex]) -> None:
        fleet = Fleet("w0", index=index())
        one = unseen(fleet, tokens=15)
        fleet.tick()
        assert not one.prefill_done


def test_a_request_whose_answer_is_seen_is_left_to_its_caller() -> None:
    fleet = Fleet("w0")
    pick = fleet.route(prompt(64))
    fleet.report(pick.reservation, "running")
    fleet.cache(W0, prompt(64))
    fleet.turn(5)
    assert not pick.reservation.prefill_done
    assert pick.reservation.ended is None


def test_no_time_is_learned_of_a_step_that_nobody_saw() -> None:
    fleet = Fleet("w0", policy="ttft")
    for n in range(LEARNED_MIN + 3):
        unseen(fleet, first=1000 * n)
        fleet.cache(W0, prompt(64, first=1000 * n))
    fleet.tick()
    assert fleet.core.unobserved.prefills == LEARNED_MIN + 3
    assert not fleet.core.fleet.first_tokens.may_judge()


class TestEnd:
    def test_an_engine_with_fewer_requests_than_are_reserved_has_finished_some(self) -> None:
        fleet = Fleet("w0")
        first, second = unseen(fleet), unseen(fleet, first=1000)
        fleet.cache(W0, prompt(64, first=1000))
        fleet.now_s += 1.0
        fleet.say(W0, running=2)
        fleet.tick()
        assert (first.prefill_done, second.prefill_done) == (False, True)
        fleet.now_s += 1.0
        fleet.say(W0, running=1)
        # The one whose prompt is computed, though the other one is older.
        assert (first.ended, second.ended) == (None, Ending.FINISHED)
        fleet.now_s += 1.0
        fleet.say(W0, running=0)
        assert first.ended is Ending.FINISHED
        assert fleet.loads() == {}
        assert fleet.core.unobserved.ends == 2
        assert len(fleet.core.unobserved) == 0

    def test_a_request_that_waits_in_the_engine_is_not_over(self) -> None:
        fleet = Fleet("w0")
        one = unseen(fleet)
        fleet.say(W0, running=0, waiting=1)
        fleet.turn(3)
        assert one.ended is None

    def test_a_request_on_its_way_is_not_missing(self) -> None:
        """The engine's first sample after a pick may be older than the request's arrival."""
        fleet = Fleet("w0")
        fleet.now_s += 1.0
        one = unseen(fleet)
        fleet.now_s += 0.1
        fleet.say(W0, running=0)
        assert one.ended is None
        fleet.now_s += 1.0
        fleet.say(W0, running=0)
        assert one.ended is Ending.FINISHED

    def test_a_sample_without_requests_that_are_seen_ends_none_of_those(self) -> None:
        fleet = Fleet("w0")
        seen = fleet.route(prompt(64)).reservation
        one = unseen(fleet, first=1000)
        fleet.turn(3)  # the samples say: nothing runs
        assert one.ended is Ending.FINISHED
        assert seen.ended is None

    def test_requests_of_others_in_the_engine_keep_ours_open(self) -> None:
        """A sample has no names: an end is believed only when it must be one of ours."""
        fleet = Fleet("w0")
        one = unseen(fleet)
        fleet.now_s += 1.0
        fleet.say(W0, running=3)
        fleet.turn(3)
        assert one.ended is None

    def test_an_engine_without_a_sample_ends_none(self) -> None:
        fleet = Fleet(lease_s=10.0)
        fleet.add("w0", sampled_at_s=None)
        one = unseen(fleet)
        fleet.turn(9)
        assert one.ended is None
        fleet.turn(2)
        assert one.ended is Ending.EXPIRED

    def test_the_callers_own_end_comes_first_or_changes_nothing(self) -> None:
        fleet = Fleet("w0")
        one, other = unseen(fleet), unseen(fleet, first=1000)
        assert fleet.report(one, "finished") is ProgressResult.APPLIED
        fleet.turn(3)
        assert other.ended is Ending.FINISHED
        assert fleet.core.unobserved.ends == 1
        assert fleet.report(other, "finished") is ProgressResult.UNCHANGED
        assert fleet.report(other, "running", unobserved=True) is ProgressResult.UNCHANGED
        assert len(fleet.core.unobserved) == 0


def test_a_tick_looks_at_so_many_prompts_and_at_each_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unobserved, "LOOKS", 3)
    fleet = Fleet("w0")
    reservations = [unseen(fleet, first=1000 * n) for n in range(8)]
    for n in range(8):
        fleet.cache(W0, prompt(64, first=1000 * n))
    done = []
    for _ in range(3):
        fleet.tick()
        done.append(sum(one.prefill_done for one in reservations))
    assert done == [3, 6, 8]


def test_a_worker_that_leaves_takes_its_requests_along() -> None:
    fleet = Fleet("w0")
    one = unseen(fleet)
    fleet.core.remove("w0", 60.0, fleet.now_s)
    fleet.tick()
    assert one.ended is Ending.WORKER_LOST
    assert len(fleet.core.unobserved) == 0
