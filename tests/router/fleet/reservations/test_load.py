"""Load: what engines report, fused with what we sent, and nothing counted twice."""

from dataclasses import dataclass, field
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.feed.replicas import Totals
from indexer.hashing import HashArray
from router.fleet.reservations.load import FORGOTTEN_MAX, HISTORY_MAX, HISTORY_S, WorkerLoad
from tests.stage.fleet import hashes

NONE = hashes([])


def opened(load: WorkerLoad, *numbers: int, at: float, tail: bool = False) -> HashArray:
    prefixes = hashes(numbers)
    load.open(prefixes, tail, 16 * len(numbers), at)
    return prefixes


@pytest.fixture
def load() -> WorkerLoad:
    return WorkerLoad()


class TestFusion:
    def test_a_worker_of_which_nothing_is_known_is_idle(self, load: WorkerLoad) -> None:
        assert (load.active_requests(), load.active_blocks(), load.reserved()) == (0, 0, 0)

    def test_what_others_sent_is_external(self, load: WorkerLoad) -> None:
        load.sample(3, 2, 40.0, 100.0)
        assert load.active_requests() == 3 + 2
        assert load.active_blocks() == 40
        assert load.reserved() == 0

    def test_our_own_shows_at_once(self, load: WorkerLoad) -> None:
        load.sample(3, 2, 40.0, 100.0)
        opened(load, 1, 2, 3, at=100.5, tail=True)
        assert load.active_requests() == 5 + 1
        assert load.active_blocks() == 40 + 3 + 1
        assert load.reserved() == 1
        assert load.prefill_tokens == 48

    def test_what_a_sample_has_seen_of_ours_is_not_counted_twice(self, load: WorkerLoad) -> None:
        opened(load, 1, 2, 3, at=100.0)
        opened(load, 4, 5, at=101.0)
        # At 100.5 the engine held our first request (3 blocks) and two of others (17 blocks).
        load.sample(3, 0, 20.0, 100.5)
        assert load.external_requests == 3 - 1
        assert load.external_blocks == 20 - 3
        assert load.active_requests() == 2 + 2
        assert load.active_blocks() == 17 + 5
        assert load.reserved() == 1  # the second, sent after the sample

    def test_a_sample_of_the_moment_of_a_change_has_seen_the_change(self, load: WorkerLoad) -> None:
        opened(load, 1, at=100.0)
        load.sample(1, 0, 1.0, 100.0)
        assert (load.active_requests(), load.active_blocks()) == (1, 1)

    def test_a_sample_from_before_a_pick_leaves_the_pick_on_top(self, load: WorkerLoad) -> None:
        opened(load, 1, 2, at=100.0)
        load.sample(4, 0, 30.0, 99.0)
        assert (load.active_requests(), load.active_blocks()) == (5, 32)

    def test_requests_that_ended_since_the_sample_are_taken_off_it(self, load: WorkerLoad) -> None:
        prefixes = opened(load, 1, 2, at=100.0)
        load.sample(3, 0, 12.0, 101.0)
        load.prefill_done(32)
        load.close(prefixes, False, 102.0)
        assert (load.active_requests(), load.active_blocks()) == (2, 10)
        assert load.reserved() == -1

    def test_an_engine_that_has_not_seen_our_requests_yet_has_no_negative_external_load(
        self, load: WorkerLoad
    ) -> None:
        opened(load, 1, 2, 3, at=100.0)
        load.sample(0, 0, 0.0, 101.0)
        assert (load.external_requests, load.external_blocks) == (0, 0)
        assert (load.active_requests(), load.active_blocks()) == (1, 3)

    @pytest.mark.parametrize("used", [None, nan, inf])
    def test_used_blocks_that_are_no_number_count_as_not_told(self, used: float | None) -> None:
        load = WorkerLoad()
        opened(load, 1, 2, at=100.0)
        load.sample(4, 0, used, 101.0)
        assert load.active_blocks() == 2
        assert load.active_requests() == 4

    def test_a_sample_that_came_a_little_older_than_the_one_before_counts_nothing_twice(
        self, load: WorkerLoad
    ) -> None:
        # The same sample, told again: by the delays of messages it seems a little older.
        opened(load, 1, 2, 3, at=100.0)
        load.sample(1, 0, 3.0, 100.01)
        load.sample(1, 0, 3.0, 99.99)
        assert (load.active_requests(), load.active_blocks()) == (1, 3)

    def test_what_is_unheard_of_is_guessed_to_be_like_what_is_open(self) -> None:
        load = WorkerLoad(unheard=0.5)
        assert load.guessed() == (0.5, 0.0), "nothing to go by"
        opened(load, 1, 2, 3, at=100.0, tail=True)
        load.hear(Totals(3, 16, 0), (0, 0))
        assert load.guessed() == (0.5, 0.5 * (4 + 16) / 4)
        assert (load.active_requests(), load.active_blocks()) == (4, 20), "a guess is no load"


class TestSharedBlocks:
    def test_a_block_that_two_requests_use_is_held_once(self, load: WorkerLoad) -> None:
        opened(load, 1, 2, 3, at=100.0, tail=True)
        opened(load, 1, 2, 4, 5, at=100.0, tail=True)
        assert load.blocks == len({1, 2, 3, 4, 5}) + 2  # the tails are nobody else's

    def test_a_shared_block_is_held_until_its_last_user_goes(self, load: WorkerLoad) -> None:
        first = opened(load, 1, 2, 3, at=100.0)
        second = opened(load, 1, 2, 4, at=100.0)
        load.close(first, False, 101.0)
        assert load.blocks == 3
        load.close(second, False, 102.0)
        assert load.blocks == 0

    def test_blocks_that_are_active_already_are_not_added(self, load: WorkerLoad) -> None:
        opened(load, 1, 2, 3, at=100.0)
        for chain, active in (((1, 2, 9, 10), 5), ((1, 2, 3), 5), ((7, 8), 7), ((), 7)):
            opened(load, *chain, at=101.0)
            assert load.blocks == active


class TestHistory:
    def test_history_is_bounded(self, load: WorkerLoad) -> None:
        for i in range(HISTORY_MAX + 500):
            load.open(NONE, True, 0, 100.0 + i * 1e-4)
            assert len(load._history) <= HISTORY_MAX
        assert len(load._history) > HISTORY_MAX / 2

    def test_no_change_drops_more_of_the_history_than_a_slice(self, load: WorkerLoad) -> None:
        for i in range(HISTORY_MAX - 1):
            load.open(NONE, True, 0, 100.0 + i * 1e-4)
        for now_s in (101.0, 200.0, *(200.0 + i for i in range(HISTORY_MAX // FORGOTTEN_MAX))):
            before = len(load._history)
            load.open(NONE, True, 0, now_s)
            assert len(load._history) >= before + 1 - FORGOTTEN_MAX
        assert len(load._history) <= HISTORY_S + 2

    def test_a_sample_older_than_the_history_counts_as_much_of_ours_as_is_remembered(self) -> None:
        load = WorkerLoad()
        for i in range(HISTORY_MAX + 500):
            load.open(NONE, True, 0, 100.0 + i * 1e-4)
        load.sample(HISTORY_MAX + 500, 0, None, 100.0)
        assert HISTORY_MAX / 2 < load.external_requests <= HISTORY_MAX, "the first ones are ours"

    def test_an_engine_that_never_tells_its_load_makes_no_long_history(self) -> None:
        load = WorkerLoad()
        for second in range(1000):
            load.open(NONE, True, 0, float(second))
            assert len(load._history) <= HISTORY_S + 2
        assert load.requests == 1000

    def test_a_sample_forgets_the_changes_before_it(self, load: WorkerLoad) -> None:
        for i in range(10):
            load.open(NONE, True, 0, 100.0 + i)
        load.sample(4, 0, 4.0, 103.5)
        assert len(load._history) == 1 + 6  # what held when it was taken, and what came after
        assert load.reserved() == 6

    def test_steps_are_what_held_then_and_each_change_after_it(self, load: WorkerLoad) -> None:
        for i in range(4):
            load.open(NONE, True, 0, 100.0 + i)
        assert load.steps(101.5) == [(101.0, 2, 2), (102.0, 3, 3), (103.0, 4, 4)]
        assert load.steps(103.0) == [(103.0, 4, 4)]
        assert [ours for _, *ours in load.steps(-inf)] == [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]]
        load.sample(0, 0, 0.0, 102.5)
        assert load.steps(-inf) == [(102.0, 3, 3), (103.0, 4, 4)]

    def test_what_is_untold_is_known(self, load: WorkerLoad) -> None:
        prefixes = hashes([1])
        for change in (
            lambda: load.open(prefixes, False, 16, 100.0),
            lambda: load.prefill_done(16),
            lambda: load.close(prefixes, False, 101.0),
        ):
            load.changed = False
            load.sample(0, 0, 0.0, 99.0)
            load.hear(Totals(1, 1, 1), (0, 0))
            assert not load.changed
            change()
            assert load.changed


chains = st.sampled_from([(1,), (1, 2), (1, 2, 3), (1, 2, 4, 5), (6,), (6, 7, 8, 9), ()])
steps = st.lists(
    st.tuples(st.just("open"), chains, st.booleans())
    | st.tuples(st.just("prefill"), st.integers(0, 9), st.none())
    | st.tuples(st.just("close"), st.integers(0, 9), st.none())
    | st.tuples(st.just("sample"), st.tuples(st.integers(0, 9), st.integers(0, 9)), st.floats(0, 3))
    | st.tuples(st.just("wait"), st.floats(0.001, 2), st.none()),
    max_size=60,
)


@dataclass
class Held:
    """A reservation, as the oracle keeps it."""

    chain: tuple[int, ...]
    tail: bool
    prefilled: bool = False


@dataclass
class Oracle:
    """Counts everything again at every question, and remembers all that ever was."""

    open: list[Held] = field(default_factory=list)
    past: list[tuple[float, int, int]] = field(default_factory=list)

    def ours(self) -> tuple[int, int]:
        blocks = {block for held in self.open for block in held.chain}
        return len(self.open), len(blocks) + sum(held.tail for held in self.open)

    def prefill_tokens(self) -> int:
        return sum(16 * len(held.chain) for held in self.open if not held.prefilled)

    def changed(self, now_s: float) -> None:
        self.past.append((now_s, *self.ours()))

    def ours_at(self, time_s: float) -> tuple[int, int]:
        then = [(requests, blocks) for at, requests, blocks in self.past if at <= time_s]
        return then[-1] if then else (0, 0)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(steps)
def test_load_is_what_an_oracle_that_forgets_nothing_counts(
    sequence: list[tuple[str, object, object]],
) -> None:
    load, oracle = WorkerLoad(), Oracle()
    now_s, sampled_s = 1000.0, -inf
    external = (0.0, 0.0)
    for kind, what, more in sequence:
        match kind, what, more:
            case "wait", float(seconds), _:
                now_s += seconds
            case "open", tuple(chain), bool(tail):
                oracle.open.append(Held(chain, tail))
                load.open(hashes(chain), tail, 16 * len(chain), now_s)
                oracle.changed(now_s)
            case "prefill", int(i), _ if i < len(oracle.open) and not oracle.open[i].prefilled:
                oracle.open[i].prefilled = True
                load.prefill_done(16 * len(oracle.open[i].chain))
            case "close", int(i), _ if i < len(oracle.open):
                held = oracle.open.pop(i)
                if not held.prefilled:
                    load.prefill_done(16 * len(held.chain))
                load.close(hashes(held.chain), held.tail, now_s)
                oracle.changed(now_s)
            case "sample", (int(running), int(waiting)), float(age_s):
                sampled_s = max(sampled_s, now_s - age_s)  # samples come in order
                load.sample(running, waiting, float(running), sampled_s)
                requests, blocks = oracle.ours_at(sampled_s)
                external = (max(0.0, running + waiting - requests), max(0.0, running - blocks))
        requests, blocks = oracle.ours()
        assert (load.requests, load.blocks) == (requests, blocks)
        assert load.prefill_tokens == oracle.prefill_tokens()
        assert load.active_requests() == external[0] + requests
        assert load.active_blocks() == external[1] + blocks
        assert load.reserved() == load.active_requests() - load.running - load.waiting
