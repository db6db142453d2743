"""Predictions: how long they live, what makes room for them, what ends them."""

import numpy as np
import pytest

from events.feed.predictions import TICK_BLOCKS, Predictions
from indexer.identity import HashArray, Tier
from indexer.reference import ReferenceIndex

TTL_S = 5.0


class Stage:
    """One worker's predictions."""

    def __init__(self) -> None:
        self.index = ReferenceIndex()
        self.predictions = Predictions(self.index)
        self.slot = self.index.open_slot()

    def add(self, prefixes: HashArray, now_s: float, blocks_max: int = 1000) -> None:
        self.predictions.add(self.slot, prefixes, ttl_s=TTL_S, blocks_max=blocks_max, now_s=now_s)

    def run(self, prefixes: HashArray) -> int:
        return int(self.index.match(prefixes).run()[self.slot])


def chain(first: int, count: int) -> HashArray:
    return np.arange(first, first + count, dtype=np.uint64)


@pytest.mark.parametrize("born_s", [0.0, 2.0, 4.9])
def test_a_prediction_lives_one_to_two_times_to_live(born_s: float) -> None:
    stage = Stage()
    stage.add(chain(900, 1), 0.0)
    stage.predictions.tick(born_s)
    stage.add(chain(1, 4), born_s)
    ended_s = None
    for now_s in np.arange(born_s, 20.0, 0.25).tolist():
        stage.predictions.tick(now_s)
        if ended_s is None and not stage.run(chain(1, 4)):
            ended_s = now_s
    assert ended_s is not None
    assert TTL_S <= ended_s - born_s <= 2 * TTL_S + 0.25
    assert repr(stage.predictions) == "<Predictions 0 blocks of 0 workers>"


def test_a_prediction_made_again_begins_its_life_again() -> None:
    stage = Stage()
    for now_s in range(30):
        stage.add(chain(1, 4), now_s)
        stage.predictions.tick(now_s)
        assert stage.run(chain(1, 4)) == 4
    assert stage.index.predicted(stage.slot) == 4


def test_what_was_stored_meanwhile_stays() -> None:
    stage = Stage()
    stage.add(chain(1, 4), 0.0)
    stage.index.store(stage.slot, Tier.DEVICE, chain(1, 3))
    for now_s in range(0, 20, 1):
        stage.predictions.tick(now_s)
    assert stage.run(chain(1, 4)) == 3
    assert stage.index.count(stage.slot) == 3


def test_the_oldest_make_room_at_the_bound() -> None:
    stage = Stage()
    for i in range(20):
        stage.add(chain(100 * i, 30), 0.0, blocks_max=100)
        assert stage.run(chain(100 * i, 30)) == 30
        assert stage.index.predicted(stage.slot) <= 100
    assert stage.run(chain(1800, 30)) == 30
    assert stage.run(chain(0, 30)) == 0


def test_a_prompt_longer_than_the_bound_is_predicted_up_to_it() -> None:
    stage = Stage()
    stage.add(chain(0, 30), 0.0, blocks_max=10)
    assert stage.run(chain(0, 30)) == 10
    stage.add(chain(500, 30), 0.0, blocks_max=10)
    assert (stage.run(chain(0, 30)), stage.run(chain(500, 30))) == (0, 10)


def test_a_tick_ends_so_many_and_leaves_the_rest_for_the_next() -> None:
    stage = Stage()
    step = TICK_BLOCKS // 2
    for i in range(6):
        stage.add(chain(step * i, step), 0.0, blocks_max=10 * TICK_BLOCKS)
    stage.predictions.tick(TTL_S)  # the generations change places
    left = []
    for _ in range(3):
        stage.predictions.tick(2 * TTL_S)
        left.append(stage.index.predicted(stage.slot) // step)
    assert left == [4, 2, 0]


def test_a_forgotten_worker_leaves_nothing() -> None:
    stage = Stage()
    stage.add(chain(1, 4), 0.0)
    stage.index.forget(stage.slot)
    stage.predictions.forget(stage.slot)
    assert stage.index.open_slot() == stage.slot
    stage.add(chain(1, 2), 1.0)
    stage.predictions.tick(1.0 + TTL_S)
    assert stage.run(chain(1, 4)) == 2


def test_what_memory_was_there_for_ends_like_any_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    whole = stage.index.predict

    def half(slot: int, generation: int, prefixes: HashArray) -> None:
        whole(slot, generation, prefixes[: len(prefixes) // 2])
        raise MemoryError

    monkeypatch.setattr(stage.index, "predict", half)
    with pytest.raises(MemoryError):
        stage.add(chain(1, 4), 0.0)
    assert stage.index.predicted(stage.slot) == 2
    for now_s in (TTL_S, 2 * TTL_S, 3 * TTL_S):
        stage.predictions.tick(now_s)
    assert stage.index.predicted(stage.slot) == 0
