"""Rates learned from reports: right, slow to be misled, bounded."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.identity import WorkerKey
from router.fleet.rates import ALIKE, PrefillColumns, PrefillRates, work

PRIOR = 10_000.0
SEED = 20261121
KEYS = [WorkerKey(f"w{i}", 0) for i in range(4)]


def columns(rates: PrefillRates, now_s: float, count: int = 4) -> PrefillColumns:
    return rates.columns(np.arange(count), ["m"] * count, now_s)


class Engine:
    """Computes prompts one after the other, at its own speed."""

    def __init__(self, rates: PrefillRates, slot: int, tokens_s: float) -> None:
        self.rates, self.slot, self.tokens_s = rates, slot, tokens_s
        self.free_at_s = 0.0

    def serve(self, new_tokens: int, now_s: float, late_s: float = 0.0) -> float:
        begins_s = max(now_s, self.free_at_s)
        self.free_at_s = begins_s + float(work(new_tokens, new_tokens)) / self.tokens_s
        key = KEYS[self.slot]
        done_s = self.free_at_s + late_s
        self.rates.on_done(key, self.slot, "m", new_tokens, new_tokens, now_s, done_s)
        return self.free_at_s


@pytest.fixture
def rates() -> PrefillRates:
    return PrefillRates(PRIOR)


def test_work_is_new_tokens_and_what_they_attend_to() -> None:
    assert work(0, 5000) == 500
    # 1000 new ones after 9000: they attend to 9500 on average
    assert work(1000, 10_000) == pytest.approx(500 + 1000 * (1 + 9500 / 50_000))


def test_before_any_report_the_rate_is_the_configured_one(rates: PrefillRates) -> None:
    assert columns(rates, 0.0).rate.tolist() == [PRIOR] * 4
    assert rates.rate(KEYS[0], "m") == PRIOR
    assert rates.samples(KEYS[0]) == 0


def test_a_rate_is_learned_whether_prompts_queue_or_not() -> None:
    rng = random.Random(SEED)
    for gap_s in (0.05, 1.0):
        rates = PrefillRates(PRIOR)
        engines = [Engine(rates, slot, 40_000.0) for slot in range(4)]
        now_s = 0.0
        for _ in range(400):
            now_s += rng.expovariate(1 / gap_s)
            rng.choice(engines).serve(rng.randrange(100, 20_000), now_s)
            rates.tick()
        assert columns(rates, now_s).rate == pytest.approx([40_000.0] * 4, rel=0.02), gap_s


def test_prompts_that_are_done_in_one_step_count_together(rates: PrefillRates) -> None:
    both = 2 * float(work(1000, 1000))
    for i in range(300):
        for _ in range(2):
            rates.on_done(KEYS[0], 0, "m", 1000, 1000, float(i), i + both / 25_000)
        rates.tick()
    assert rates.rate(KEYS[0], "m") == pytest.approx(25_000, rel=0.02)


def test_equal_workers_have_one_rate_and_a_slow_one_its_own() -> None:
    rng = random.Random(SEED)
    rates = PrefillRates(PRIOR)
    speeds = [30_000.0, 28_000.0, 33_000.0, 10_000.0]
    engines = [Engine(rates, slot, speed) for slot, speed in enumerate(speeds)]
    for i in range(600):
        engines[i % 4].serve(rng.randrange(100, 20_000), float(i))
        rates.tick()
    learned = columns(rates, 600.0).rate
    assert learned[0] == learned[1] == learned[2] == pytest.approx(29_000, rel=0.05)
    assert 10_000 < learned[3] < 29_000 / ALIKE


def test_a_worker_that_was_not_measured_has_the_rate_of_its_models_others() -> None:
    rates = PrefillRates(PRIOR)
    Engine(rates, 0, 40_000.0).serve(100_000, 0.0)
    rates.tick()
    one = rates.rate(KEYS[0], "m")
    assert one > PRIOR
    assert columns(rates, 0.0).rate.tolist() == pytest.approx([one] * 4)
    assert rates.rate(KEYS[1], "other model") == PRIOR


def test_late_reports_move_a_rate_by_little(rates: PrefillRates) -> None:
    engine = Engine(rates, 0, 40_000.0)
    for i in range(200):
        engine.serve(5000, float(i))
        rates.tick()
    before = rates.rate(KEYS[0], "m")
    engine.serve(5000, 300.0, late_s=3600.0)
    rates.tick()
    assert rates.rate(KEYS[0], "m") > 0.9 * before


def test_a_reported_time_that_went_back_is_none(rates: PrefillRates) -> None:
    rates.on_done(KEYS[0], 0, "m", 100, 100, 50.0, 40.0)
    rates.tick()
    assert 0 < rates.rate(KEYS[0], "m") < np.inf


class TestWaiting:
    def test_it_adds_up_and_goes_down_as_time_passes(self, rates: PrefillRates) -> None:
        seconds = float(work(1000, 1000)) / PRIOR
        for i in range(3):
            rates.on_pick(KEYS[0], 0, "m", f"{i}", 1000, 1000, 0.0)
        found = columns(rates, 0.0)
        assert found.wait_s == pytest.approx([3 * seconds, 0, 0, 0])
        assert found.tokens.tolist() == [3000, 0, 0, 0]
        assert found.count.tolist() == [3, 0, 0, 0]
        assert columns(rates, 0.1).wait_s[0] == pytest.approx(3 * seconds - 0.1)
        assert columns(rates, 99.0).wait_s[0] == 0  # nobody reports there, so time tells

    def test_where_there_are_reports_a_prompt_is_not_done_before_its_own(self) -> None:
        rates = PrefillRates(PRIOR)
        rates.on_done(KEYS[0], 0, "m", 1000, 1000, 0.0, 0.151)
        seconds = 1510 / rates.rate(KEYS[0], "m")
        rates.on_pick(KEYS[0], 0, "m", "a", 1000, 1000, 1.0)
        rates.on_pick(KEYS[0], 0, "m", "b", 1000, 1000, 1.0)
        assert columns(rates, 99.0).wait_s[0] == pytest.approx(1.1 * seconds)
        rates.on_end(KEYS[0], "a")
        assert columns(rates, 99.0).wait_s[0] == pytest.approx(0.1 * seconds)

    def test_an_end_takes_its_prompt_out_once(self, rates: PrefillRates) -> None:
        rates.on_pick(KEYS[0], 0, "m", "a", 1000, 1000, 0.0)
        for _ in range(2):
            rates.on_end(KEYS[0], "a")
            assert columns(rates, 0.0).wait_s[0] == 0
        rates.on_end(KEYS[1], "never there")

    def test_a_worker_that_is_forgotten_leaves_nothing_to_whoever_has_its_place(self) -> None:
        rates = PrefillRates(PRIOR)
        rates.on_done(KEYS[0], 0, "m", 1000, 1000, 0.0, 0.01)
        rates.on_pick(KEYS[0], 0, "m", "a", 1000, 1000, 0.0)
        rates.on_forgotten([KEYS[0], KEYS[3]])
        rates.tick()
        found = columns(rates, 0.0)
        assert (found.rate[0], found.wait_s[0], found.count[0]) == (PRIOR, 0, 0)
        assert len(rates) == 0

    def test_a_worker_that_gets_another_slot_takes_its_columns_with_it(self) -> None:
        rates = PrefillRates(PRIOR)
        for key, slot in ((KEYS[0], 0), (KEYS[1], 1)):
            rates.on_done(key, slot, "m", 1000, 1000, 0.0, 0.01)
            rates.on_pick(key, slot, "m", f"r{slot}", 1000 + slot, 2000, 0.0)
        rates.on_moved(KEYS[1], 0)  # before it is said where the one there has gone
        rates.tick()
        rates.on_moved(KEYS[0], 2)
        assert columns(rates, 0.0).tokens.tolist() == [1001, 0, 1000, 0]
        assert (rates.samples(KEYS[0]), rates.samples(KEYS[1])) == (1, 1)
        rates.on_forgotten([KEYS[0]])
        assert columns(rates, 0.0).tokens.tolist() == [1001, 0, 0, 0]

    def test_a_worker_that_comes_back_with_another_model_is_another(self) -> None:
        rates = PrefillRates(PRIOR)
        rates.on_done(KEYS[0], 0, "m", 1000, 1000, 0.0, 0.01)
        rates.on_pick(KEYS[0], 0, "m", "a", 1000, 1000, 0.0)
        rates.on_pick(KEYS[0], 0, "n", "b", 500, 1000, 0.0)
        assert rates.samples(KEYS[0]) == 0
        assert rates.rate(KEYS[0], "n") == PRIOR
        assert columns(rates, 0.0).tokens[0] == 500

    @settings(derandomize=True, deadline=None, max_examples=80)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["pick", "done", "end", "tick"]),
                st.integers(0, 3),
                st.integers(0, 5),
                st.integers(0, 100_000),
                st.floats(-1, 30),
            ),
            max_size=60,
        )
    )
    def test_rates_are_positive_and_waits_never_negative_whatever_comes(
        self, steps: list[tuple[str, int, int, int, float]]
    ) -> None:
        rates = PrefillRates(PRIOR)
        open_ = [dict[str, int]() for _ in KEYS]
        now_s = 1000.0
        for what, slot, name, tokens, passed_s in steps:
            now_s += passed_s
            key, id_ = KEYS[slot], f"{name}"
            match what:
                case "pick" if id_ not in open_[slot]:
                    rates.on_pick(key, slot, "m", id_, tokens, tokens + 1, now_s)
                    open_[slot][id_] = tokens
                case "done" if id_ in open_[slot]:
                    rates.on_end(key, id_)
                    told = open_[slot].pop(id_)
                    rates.on_done(key, slot, "m", told, told + 1, now_s - 5, now_s)
                case "end":
                    rates.on_end(key, id_)
                    open_[slot].pop(id_, None)
                case _:
                    rates.tick()
            found = columns(rates, now_s)
            assert (found.rate > 0).all()
            assert np.isfinite(found.rate).all()
            assert (found.wait_s >= 0).all()
            assert found.tokens.tolist() == [sum(one.values()) for one in open_]
            assert found.count.tolist() == [len(one) for one in open_]
            assert not found.wait_s[[not one for one in open_]].any()


def test_prompts_under_way_are_counted_until_they_end_or_their_worker_is_gone() -> None:
    rates = PrefillRates(PRIOR)
    for slot in (0, 1):
        for i in range(3):
            rates.on_pick(KEYS[slot], slot, "m", f"{slot}-{i}", 100, 100, 0.0)
    assert rates.under_way == 6
    rates.on_end(KEYS[0], "0-1")
    rates.on_end(KEYS[0], "0-1")
    rates.on_end(KEYS[3], "0-2")
    assert rates.under_way == 5
    rates.on_forgotten([KEYS[1], KEYS[2]])
    assert rates.under_way == 2
    rates.on_pick(KEYS[0], 3, "m", "0-3", 100, 100, 0.0)  # it has another slot now
    for i, left in ((0, 2), (3, 1), (2, 0)):
        rates.on_end(KEYS[0], f"0-{i}")
        assert rates.under_way == left
