"""The self-check: reports held against predictions, through the core that takes them."""

from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.feed.fleet_view import Pull
from events.feed.stream import StreamState
from events.plane.facts import Stored, pack_hashes
from indexer.identity import WorkerKey
from router.decide.core.progress import ProgressState
from router.fleet.health.self_check import (
    RESYNC_MAX_S,
    RESYNC_S,
    RESYNCS_MAX,
    RESYNCS_WINDOW_S,
    SUSPICION_MAX,
    TRUE_RUN,
    CheckResult,
    SelfCheck,
)
from router.fleet.reservations.reservations import Reservation
from router.request.prompt import Prompt
from tests.stage.fleet import Fleet, prompt

HELD = prompt(165)
"""A prompt of ten blocks of 16, and a few tokens."""
HELD_TOKENS = 160
W0 = WorkerKey("w0", 0)
SHORTFALLS = 3
"""On a calm stream."""


class Engines(Fleet):
    """Workers whose engines report what the test says."""

    @property
    def check(self) -> SelfCheck:
        return self.core.fleet.self_check

    def holding(self, worker_id: str, rank: int = 0, **about: object) -> WorkerKey:
        """A worker whose index entry is the ten blocks."""
        key = self.add(worker_id, rank, **about)
        self.cache(key, HELD)
        self.now_s += 0.01  # picks come after that
        return key

    def pick(self, worker_id: str, of: Prompt = HELD) -> Reservation:
        return self.route(of, allowed_workers=frozenset({worker_id})).reservation

    def finish(self, held: Reservation, cached_tokens: int) -> None:
        """The request is over, and so many tokens of its prompt were reused."""
        self.report(held, "finished", cached_tokens=cached_tokens)

    def serves(self, worker_id: str, cached_tokens: int, of: Prompt = HELD) -> CheckResult:
        """A whole request; what the check said of it."""
        before = self.check.results.copy()
        self.finish(self.pick(worker_id, of), cached_tokens)
        (result,) = self.check.results - before
        return result

    def resyncs(self) -> list[Pull]:
        return self.check.begin_resyncs(self.now_s)

    def answer(self, pulls: list[Pull]) -> None:
        """The relays' snapshots come, and say what they said before."""
        for pull in pulls:
            relay = self.relays[pull.worker]
            facts = [
                Stored(pack_hashes(np.array(sorted(hashes), np.uint64)), tier.name.lower())
                for tier, hashes in relay.held.items()
            ]
            self.view.on_snapshot(pull.worker, relay.epoch, relay.seq, facts, True, self.now_s)
            self.now_s += 0.01

    def fall_short(self, worker_id: str, times: int = SHORTFALLS) -> None:
        for _ in range(times):
            assert self.serves(worker_id, 0) is CheckResult.OVER

    def state(self, key: WorkerKey) -> StreamState:
        return self.view.sources[key].stream.state


@pytest.fixture
def fleet() -> Engines:
    """Of which w0 holds the ten blocks."""
    fleet = Engines()
    fleet.holding("w0")
    return fleet


class TestResults:
    @pytest.mark.parametrize(
        ("cached_tokens", "result"),
        [
            (160, CheckResult.EXACT),
            (144, CheckResult.EXACT),  # some engines leave out the last block that matches
            (143, CheckResult.OVER),
            (16, CheckResult.OVER),
            (0, CheckResult.OVER),
            (165, CheckResult.EXACT),  # less than a block more
        ],
    )
    def test_a_block_more_or_less_is_exact(self, cached_tokens: int, result: CheckResult) -> None:
        fleet = Engines()
        fleet.holding("w0")
        assert fleet.serves("w0", cached_tokens) is result

    def test_where_an_engines_blocks_are_larger_it_is_one_of_those(self) -> None:
        fleet = Engines()
        fleet.holding("w0", engine_block_size=64)
        assert fleet.serves("w0", 128) is CheckResult.EXACT  # 10 blocks of 16 hold 2 of 64
        assert fleet.serves("w0", 64) is CheckResult.OVER

    @pytest.mark.parametrize("tokens", [8, 100])
    def test_nothing_predicted_and_nothing_reused_says_nothing(self, tokens: int) -> None:
        fleet = Engines()
        fleet.holding("w0")
        assert fleet.serves("w0", 0, prompt(tokens, 5000)) is CheckResult.COLD
        assert fleet.serves("w0", 5, prompt(tokens, 5000)) is CheckResult.COLD

    def test_one_block_predicted_and_none_reused_is_no_hit(self, fleet: Engines) -> None:
        assert fleet.serves("w0", 0, prompt(20)) is CheckResult.COLD
        assert fleet.check.record(WorkerKey("w0", 0)).true_run == 0

    def test_a_removal_that_the_index_knows_of_explains_a_shortfall(self, fleet: Engines) -> None:
        held = fleet.pick("w0")
        fleet.remove(W0, HELD.prefixes(16)[4:])
        fleet.finish(held, 64)
        assert fleet.check.results == {CheckResult.EXPLAINED: 1}
        assert fleet.check.record(W0).suspicion == 0

    def test_what_only_our_picks_predicted_is_not_held_against_a_worker(self) -> None:
        fleet = Engines()
        key = fleet.add("w0")
        fleet.cache(key, HELD, 64)
        fleet.now_s += 0.01
        first = fleet.pick("w0")  # from now on blocks 4 ... 9 are predicted
        fleet.store(key, HELD.prefixes(16)[7:])
        second = fleet.pick("w0")
        assert second.predicted_tokens == 64 + 48, "told, with a gap"
        fleet.finish(first, 64)
        fleet.finish(second, 64)
        assert fleet.check.results == {CheckResult.EXACT: 1, CheckResult.EXPLAINED: 1}

    def test_what_a_stream_that_was_not_live_predicted_is_not_held_against_it(self) -> None:
        fleet = Engines()
        key = fleet.holding("w0")
        before, during = fleet.pick("w0"), fleet.pick("w0")
        pulls = fleet.view.resync("w0", fleet.now_s + 0.01)
        fleet.finish(during, 0)
        fleet.now_s += 0.02
        fleet.answer(pulls)
        assert fleet.state(key) is StreamState.LIVE
        fleet.finish(before, 0)
        assert fleet.check.results == {CheckResult.UNTRUSTED: 2}

    def test_a_worker_without_a_block_size_is_held_to_nothing(self) -> None:
        fleet = Engines()
        fleet.add("w0", block_size=0)
        assert fleet.serves("w0", 100) is CheckResult.UNTRUSTED

    def test_a_reservation_is_checked_once(self, fleet: Engines) -> None:
        held = fleet.pick("w0")
        for state in (ProgressState.PREFILL_DONE, ProgressState.RUNNING, ProgressState.FINISHED):
            fleet.report(held, state, cached_tokens=0)
        assert fleet.check.results == {CheckResult.OVER: 1}

    def test_a_report_without_cached_tokens_says_nothing(self, fleet: Engines) -> None:
        held = fleet.pick("w0")
        fleet.report(held, "finished")
        assert fleet.check.results == {}


class TestMissingBlocks:
    def partial(self, **about: object) -> tuple[Engines, WorkerKey]:
        """A worker that holds more than it told of; the first four blocks are known."""
        fleet = Engines()
        key = fleet.add("w0", **about)
        fleet.cache(key, HELD, 64)
        fleet.beat(key, complete=False)
        fleet.now_s += 0.01
        return fleet, key

    def test_what_a_partial_stream_never_told_is_learned(self) -> None:
        fleet, key = self.partial()
        slot = fleet.view.sources[key].slot
        held = fleet.pick("w0")
        for _ in range(5):
            fleet.turn(60)
            fleet.report(held, "running")
        assert fleet.view.index.predicted(slot) == 0, "what the pick predicted is over"
        fleet.beat(key, complete=False)
        fleet.finish(held, HELD_TOKENS)
        assert fleet.check.results == {CheckResult.UNDER: 1}
        assert fleet.check.learned_blocks == fleet.view.index.predicted(slot) == 6

    def test_so_is_what_a_stream_leaves_out(self) -> None:
        fleet, key = self.partial()
        fleet.beat(key, lacks=("unnamed_lora",))
        assert fleet.serves("w0", HELD_TOKENS) is CheckResult.UNDER
        assert fleet.check.learned_blocks == 6

    def test_so_is_what_an_engine_without_events_reuses(self) -> None:
        fleet = Engines()
        fleet.add("w0", events=False)
        assert fleet.serves("w0", HELD_TOKENS) is CheckResult.UNDER
        assert fleet.check.learned_blocks == 10

    def test_a_complete_stream_tells_by_itself(self) -> None:
        fleet, key = self.partial()
        fleet.beat(key)
        assert fleet.serves("w0", HELD_TOKENS) is CheckResult.UNDER
        assert fleet.check.learned_blocks == 0

    def test_what_others_stored_meanwhile_is_explained(self) -> None:
        fleet, key = self.partial()
        held = fleet.pick("w0")
        fleet.cache(key, HELD)
        fleet.finish(held, HELD_TOKENS)
        assert fleet.check.results == {CheckResult.EXPLAINED: 1}
        assert fleet.check.learned_blocks == 0

    def test_only_what_is_missing_still_is_learned(self) -> None:
        fleet, key = self.partial()
        held = fleet.pick("w0")
        fleet.cache(key, HELD, 128)
        fleet.finish(held, HELD_TOKENS)
        assert fleet.check.learned_blocks == 2

    def test_more_reused_than_predicted_is_a_hit_that_came_true(self) -> None:
        fleet, key = self.partial()
        fleet.fall_short("w0")
        assert fleet.serves("w0", HELD_TOKENS) is CheckResult.UNDER
        assert fleet.resyncs() == []
        assert fleet.check.record(key).suspicion == 0


class TestResyncs:
    def test_three_shortfalls_with_no_hit_between_read_the_stream_anew(self) -> None:
        fleet = Engines()
        key = fleet.holding("w0")
        fleet.fall_short("w0", SHORTFALLS - 1)
        assert fleet.resyncs() == []
        fleet.fall_short("w0", 1)
        assert fleet.resyncs() == [Pull(key, "resync asked for", None)]
        assert fleet.state(key) is StreamState.RECOVERING
        assert fleet.resyncs() == []
        assert fleet.check.resyncs == 1

    def test_requests_that_reuse_nothing_among_exact_ones_never_do(self, fleet: Engines) -> None:
        for _ in range(50):
            fleet.serves("w0", 0)
            fleet.serves("w0", 0)
            fleet.serves("w0", HELD_TOKENS)
            assert fleet.resyncs() == []

    def test_requests_that_predict_nothing_neither_hide_nor_add_shortfalls(self) -> None:
        fleet = Engines()
        fleet.holding("w0")
        for i in range(SHORTFALLS):
            assert fleet.resyncs() == []
            fleet.fall_short("w0", 1)
            fleet.serves("w0", 0, prompt(100, 1000 * (i + 1)))
        assert len(fleet.resyncs()) == 1

    def test_blocks_that_go_meanwhile_make_a_shortfall_weigh_less(self, fleet: Engines) -> None:
        for _ in range(SUSPICION_MAX):
            assert fleet.resyncs() == []
            held = fleet.pick("w0")
            fleet.remove(W0, HELD.prefixes(16))
            fleet.cache(W0, HELD)  # by the request that missed them
            fleet.finish(held, 0)
        assert fleet.check.results == {CheckResult.OVER: SUSPICION_MAX}
        assert len(fleet.resyncs()) == 1

    def test_a_hit_that_comes_true_in_time_calls_a_resync_off(self, fleet: Engines) -> None:
        fleet.fall_short("w0")
        fleet.serves("w0", HELD_TOKENS)
        assert fleet.resyncs() == []

    def test_a_stream_that_is_being_read_anew_is_not_asked_for_again(self, fleet: Engines) -> None:
        fleet.fall_short("w0")
        pulls = fleet.view.resync("w0", fleet.now_s)
        assert fleet.resyncs() == []
        fleet.answer(pulls)
        fleet.fall_short("w0", SHORTFALLS - 1)
        assert fleet.resyncs() == [], "it begins again"
        assert fleet.check.record(W0).resyncs == 0

    def test_other_ranks_of_the_engine_are_left_alone(self) -> None:
        fleet = Engines(policy="round-robin")
        good, stale = fleet.holding("w0", 0), fleet.holding("w0", 1)
        for _ in range(2 * SHORTFALLS):
            held = fleet.pick("w0")
            fleet.finish(held, HELD_TOKENS if held.worker == good else 0)
        assert [pull.worker for pull in fleet.resyncs()] == [stale]
        assert fleet.state(good) is StreamState.LIVE

    def test_waits_double_up_to_a_bound_while_nothing_helps(self, fleet: Engines) -> None:
        begun_s: list[float] = []
        while len(begun_s) < 8:
            fleet.turn(1)
            fleet.fall_short("w0")
            if pulls := fleet.resyncs():
                begun_s.append(fleet.now_s)
                fleet.answer(pulls)
                fleet.turn(1)
        waits = np.diff(begun_s)
        wanted = [min(RESYNC_S * 2**i, RESYNC_MAX_S) for i in range(7)]
        assert wanted[-1] == wanted[-2] == RESYNC_MAX_S
        assert np.all(waits >= wanted)
        assert np.all(waits <= np.array(wanted) + 3)
        assert fleet.check.record(W0).resyncs == fleet.check.resyncs == 8

    def test_hits_that_come_true_make_the_next_wait_short_again(self, fleet: Engines) -> None:
        for _ in range(2):
            fleet.turn(2 * RESYNC_S)
            fleet.fall_short("w0")
            fleet.answer(fleet.resyncs())
        record = fleet.check.record(W0)
        assert (record.wait_s, record.resyncs) == (4 * RESYNC_S, 2)
        for _ in range(TRUE_RUN):
            assert record.resyncs == 2
            fleet.serves("w0", HELD_TOKENS)
        assert (record.wait_s, record.resyncs) == (RESYNC_S, 0)

    def test_the_fleet_begins_so_many_at_once_and_the_others_wait_their_turn(self) -> None:
        fleet = Engines()
        count = 2 * RESYNCS_MAX + 1
        for i in range(count):
            fleet.holding(f"w{i}")
        for i in range(count):
            fleet.fall_short(f"w{i}")
        begun = fleet.resyncs()
        assert len(begun) == RESYNCS_MAX
        fleet.now_s += RESYNCS_WINDOW_S - 0.01
        assert fleet.resyncs() == []
        fleet.turn(0.01)
        begun += fleet.resyncs()
        assert len(begun) == 2 * RESYNCS_MAX
        fleet.turn(RESYNCS_WINDOW_S)
        begun += fleet.resyncs()
        assert len({pull.worker for pull in begun}) == count == fleet.check.resyncs

    def test_a_worker_that_goes_leaves_nothing_behind(self, fleet: Engines) -> None:
        fleet.fall_short("w0")
        late = fleet.pick("w0")
        fleet.core.remove("w0", 1.0, fleet.now_s)
        fleet.finish(late, 0)
        assert fleet.resyncs() == []
        assert fleet.check.record(W0).suspicion == 0
        assert repr(fleet.check) == "<SelfCheck 3 over; 0 resyncs, 0 due>"


steps = st.lists(
    st.sampled_from(["hit", "none", "cold", "store", "remove", "clear", "beat"]), max_size=60
)


class TestLaws:
    @given(steps, st.data())
    def test_exact_reports_never_lead_to_a_resync(
        self, steps: list[str], data: st.DataObject
    ) -> None:
        """Whatever goes on in the cache; single requests that reuse nothing in between, too."""
        fleet = Engines()
        key = fleet.holding("w0")
        prefixes = HELD.prefixes(16)
        after_a_hit = False
        for step in steps:
            fleet.now_s += 0.01
            match step:
                case "hit":
                    held = fleet.pick("w0")
                    wrong = data.draw(st.integers(-16, 15))
                    cached_tokens = max(0, held.predicted_tokens + wrong)
                    fleet.finish(held, cached_tokens)
                    after_a_hit = bool(held.predicted_tokens and cached_tokens)
                case "none" if after_a_hit:  # for prompt log probabilities
                    fleet.serves("w0", 0)
                    after_a_hit = False
                case "cold":
                    fleet.serves("w0", 0, prompt(50, 7000))
                case "store":
                    fleet.store(key, prefixes[: data.draw(st.integers(1, 10))])
                case "remove":
                    fleet.remove(key, prefixes[data.draw(st.integers(0, 9)) :])
                case "clear":
                    fleet.clear(key)
                case _:
                    fleet.beat(key)
            assert fleet.resyncs() == []

    @given(
        st.lists(st.sampled_from(["over", "over busy", "cold", "beat", "removed"]), min_size=1),
        st.integers(0, HELD_TOKENS - 17),
    )
    def test_a_stale_index_is_always_found_out(self, steps: list[str], truth: int) -> None:
        """An engine that lost blocks and never told: however its fleet goes on meanwhile."""
        fleet = Engines()
        key = fleet.holding("w0")
        other = prompt(100, 9000)
        shortfalls = points = 0
        for step in cycle([*steps, "over"]):
            fleet.now_s += 0.01
            match step:
                case "over" | "over busy":
                    held = fleet.pick("w0")
                    if step == "over busy":
                        fleet.cache(key, other)
                        fleet.remove(key, other.prefixes(16))
                    fleet.finish(held, truth)
                    shortfalls += 1
                    points += 1 if step == "over busy" else 10
                case "cold":
                    fleet.serves("w0", 0, prompt(50, 7000))
                case "removed":
                    fleet.cache(key, other)
                    fleet.remove(key, other.prefixes(16))
                case _:
                    fleet.beat(key)
            if fleet.resyncs():
                break
            assert points < SUSPICION_MAX, "it should have been found out"
        assert shortfalls <= SUSPICION_MAX
        assert points >= SUSPICION_MAX
        if "over busy" not in steps:
            assert shortfalls == SHORTFALLS
