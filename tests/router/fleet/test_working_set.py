"""Working sets: what was asked for lately, once each, within bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from router.fleet import working_set
from router.fleet.working_set import SAMPLE, SAMPLES_MAX, WINDOW_S, WorkingSets
from tests.stage.fleet import Fleet, prompt

HERE, THERE = WorkerKey("here", 0), WorkerKey("there", 0)
SLOTS = {HERE: 0, THERE: 3}


def pick(sets: WorkingSets, key: WorkerKey, prefixes: HashArray, now_s: float) -> None:
    sets.on_pick(key, SLOTS[key], prefixes, now_s)


def blocks(sets: WorkingSets, *keys: WorkerKey) -> list[float]:
    found: list[float] = sets.table(9)[[SLOTS[key] for key in keys]].tolist()
    return found


def sampled(*numbers: int) -> HashArray:
    """Prefixes that are in the sample."""
    return np.array(numbers, np.uint64) * np.uint64(SAMPLE)


def test_a_block_that_is_asked_for_again_counts_once() -> None:
    sets = WorkingSets()
    pick(sets, HERE, sampled(1, 2, 3), 0.0)
    pick(sets, HERE, sampled(1, 2, 4), 1.0)
    pick(sets, THERE, sampled(1), 1.0)
    assert blocks(sets, HERE, THERE) == [4 * SAMPLE, SAMPLE]
    assert sets.table(9)[np.array([9], np.intp)].tolist() == [0]


def test_what_nobody_asked_for_in_a_minute_counts_no_more() -> None:
    sets = WorkingSets()
    pick(sets, HERE, sampled(1, 2), 0.0)
    pick(sets, HERE, sampled(2, 3), 40.0)
    sets.tick(WINDOW_S)
    assert blocks(sets, HERE) == [3 * SAMPLE]
    sets.tick(WINDOW_S + 1)
    assert blocks(sets, HERE) == [2 * SAMPLE]


def test_the_sample_stands_for_all() -> None:
    sets = WorkingSets()
    prefixes = np.random.default_rng(1).integers(0, 1 << 63, 20_000).astype(np.uint64)
    pick(sets, HERE, prefixes, 0.0)
    assert blocks(sets, HERE) == pytest.approx([20_000], rel=0.1)


def test_at_the_bound_the_oldest_are_forgotten_and_counted() -> None:
    sets = WorkingSets()
    pick(sets, HERE, sampled(*range(SAMPLES_MAX)), 0.0)
    assert sets.forgotten == 0
    pick(sets, HERE, sampled(0, SAMPLES_MAX, SAMPLES_MAX + 1), 1.0)  # 0 is new again
    assert sets.forgotten == 2
    assert blocks(sets, HERE) == [SAMPLE * SAMPLES_MAX]
    pick(sets, HERE, sampled(0), 2.0)
    assert sets.forgotten == 2


def test_all_workers_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_set, "ALL_SAMPLES_MAX", 10)
    sets = WorkingSets()
    pick(sets, HERE, sampled(*range(6)), 0.0)
    pick(sets, THERE, sampled(*range(6)), 1.0)
    assert blocks(sets, HERE, THERE) == [6 * SAMPLE, 4 * SAMPLE]
    assert (len(sets), sets.forgotten) == (10, 2)
    sets.tick(WINDOW_S + 0.5)
    assert len(sets) == 4, "what is old makes room"
    pick(sets, HERE, sampled(*range(6)), WINDOW_S)
    assert (len(sets), sets.forgotten) == (10, 2)


def test_a_worker_that_is_forgotten_leaves_nothing() -> None:
    sets = WorkingSets()
    pick(sets, HERE, sampled(1), 0.0)
    sets.on_forgotten([HERE, THERE])
    assert blocks(sets, HERE) == [0]
    assert len(sets) == 0


picks = st.lists(
    st.tuples(
        st.sampled_from([HERE, THERE]),
        st.lists(st.integers(0, 30), max_size=10),
        st.sampled_from([0.0, 1.0, 25.0, 70.0]),
    ),
    max_size=20,
)


@given(picks)
def test_it_is_the_distinct_sampled_blocks_of_the_window(
    picked: list[tuple[WorkerKey, list[int], float]],
) -> None:
    sets, now_s = WorkingSets(), 0.0
    asked: list[tuple[WorkerKey, int, float]] = []
    for key, numbers, later_s in picked:
        now_s += later_s
        pick(sets, key, np.array(numbers, np.uint64), now_s)
        asked += [(key, number, now_s) for number in numbers]
        sets.tick(now_s)
        for worker in (HERE, THERE):
            recent = {
                number
                for key, number, at_s in asked
                if key == worker and number % SAMPLE == 0 and at_s >= now_s - WINDOW_S
            }
            assert blocks(sets, worker) == [SAMPLE * len(recent)]
        assert len(sets) * SAMPLE == sum(blocks(sets, HERE, THERE))


def test_picks_by_a_policy_that_reads_them_are_kept_and_forgotten_with_the_worker() -> None:
    fleet = Fleet(policy="ttft")
    key = fleet.add("w0")
    slots = np.array([fleet.view.sources[key].slot], np.intp)
    sets = fleet.core.fleet.working_sets
    fleet.route(prompt(16_000))
    assert sets.table(9)[slots] == pytest.approx([1000], rel=0.3)
    fleet.core.remove("w0", 0, fleet.now_s)
    assert sets.table(9)[slots].tolist() == [0]


def test_a_worker_that_gets_another_slot_takes_its_working_set_with_it() -> None:
    sets = WorkingSets()
    slots = np.array([0, 5], np.intp)
    sets.on_pick(HERE, 0, sampled(1, 2), 0.0)
    sets.on_pick(HERE, 5, sampled(3), 0.0)
    assert sets.table(9)[slots].tolist() == [0, 3 * SAMPLE]
    sets.on_moved(HERE, 7)
    sets.on_pick(THERE, 5, sampled(4), 0.0)
    sets.on_moved(THERE, 7)  # before it is said where the one there has gone
    sets.on_moved(HERE, 0)
    assert sets.table(9)[np.array([0, 5, 7], np.intp)].tolist() == [3 * SAMPLE, 0, SAMPLE]
    sets.on_forgotten([HERE])
    assert sets.table(9)[np.array([0, 5, 7], np.intp)].tolist() == [0, 0, SAMPLE]
    assert len(sets) == 1
