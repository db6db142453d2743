"""The time between tokens: learned from answers whose times a known engine made."""

import random
from math import isnan
from statistics import fmean

import pytest

from events.plane.facts import Epoch, Heartbeat
from indexer.identity import WorkerKey
from router.fleet.reservations.load import WorkerLoad
from router.fleet.token_times import (
    FACTOR,
    FADE,
    KINDS_MAX,
    MEASURED,
    SHORTEST_S,
    STRETCH_MAX,
    TOKENS_MAX,
    TOKENS_MIN,
    TokenTimes,
)

KEY = WorkerKey("w0", 0)
BASE_S, REQUEST_S, BLOCK_S, WORK_S = 0.008, 0.0002, 1e-6, 1.5e-5


def heartbeat(**about: object) -> Heartbeat:
    said: dict[str, object] = {"engine": "vllm", "model": "m", "block_size": 16}
    return Heartbeat(epoch=Epoch(1, 1), sent_at_s=0.0, address="http://w", **said | about)  # type: ignore[arg-type]


class Engines:
    """Workers of one kind, whose answers take what the four numbers say."""

    def __init__(self, seed: int = 0, **about: object) -> None:
        self.times, self.rng, self.now_s = TokenTimes(), random.Random(seed), 1000.0
        self.heartbeat = heartbeat(**about)
        self.load = WorkerLoad()
        self.answers = 0

    def has(self, requests: float, blocks: float) -> None:
        self.load.external_requests, self.load.external_blocks = requests, blocks

    def answer(
        self, tokens: int = 200, work: float = 0.0, late: float = 1.0, key: WorkerKey = KEY
    ) -> float | None:
        """An answer at the present load. work: of prompts meanwhile; late: factor of its time."""
        self.answers += 1
        about = key, self.heartbeat, self.load
        self.times.on_first(*about, f"{self.answers}", self.now_s)
        requests, blocks = self.load.active_requests(), self.load.active_blocks()
        step_s = BASE_S + REQUEST_S * requests + BLOCK_S * blocks
        self.now_s += late * (tokens * step_s + WORK_S * work)
        self.times.on_prompt(*about, work, self.now_s)
        return self.times.on_finished(f"{self.answers}", self.load, tokens + 1, 100, self.now_s)

    def learn(self, answers: int = 300) -> None:
        for _ in range(answers):
            self.has(self.rng.randrange(100), self.rng.randrange(20_000))
            self.answer(self.rng.randrange(20, 600), self.rng.choice([0.0, 0.0, 9000.0, 20_000.0]))
        self.times.tick(lambda _: self.load, self.now_s)

    def at(self, requests: float, blocks: float) -> float:
        return self.times.of(KEY, self.heartbeat).at(requests, blocks)


def quiet(engines: Engines) -> None:
    """Long enough for the pace of prompts to be over."""
    for _ in range(20):
        engines.now_s += 60.0
        engines.times.tick(lambda _: engines.load, engines.now_s)


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def learned(engines: Engines) -> Engines:
    """Engines whose numbers are learned, and that compute no prompt."""
    engines.learn()
    quiet(engines)
    return engines


@pytest.mark.parametrize("seed", range(5))
def test_the_numbers_of_an_engine_are_learned(seed: int) -> None:
    engines = Engines(seed)
    engines.learn()
    quiet(engines)
    for requests, blocks in ((0, 0), (20, 3000), (90, 18_000)):
        expected_s = BASE_S + REQUEST_S * (requests + 1) + BLOCK_S * (blocks + 100)
        assert engines.at(requests, blocks) == pytest.approx(expected_s, rel=0.01)
    before_s = engines.times.measured_s
    engines.learn(10)
    assert engines.times.measured_s > before_s
    assert engines.times.off_s < 0.01 * engines.times.measured_s


def test_prompts_that_come_make_answers_slower(learned: Engines) -> None:
    before_s, pace = learned.at(10, 1000), 20_000.0
    for _ in range(300):  # half of a minute's weight is of the last 42 seconds
        learned.now_s += 1.0
        learned.times.on_prompt(KEY, learned.heartbeat, learned.load, pace, learned.now_s)
        learned.times.tick(lambda _: learned.load, learned.now_s)
    assert learned.at(10, 1000) == pytest.approx(before_s / (1 - WORK_S * pace), rel=0.02)


def test_prompts_without_end_make_answers_slower_by_a_bound(learned: Engines) -> None:
    before_s = learned.at(10, 1000)
    for _ in range(300):
        learned.now_s += 1.0
        learned.times.on_prompt(KEY, learned.heartbeat, learned.load, 1e9, learned.now_s)
        learned.times.tick(lambda _: learned.load, learned.now_s)
    assert learned.at(10, 1000) == pytest.approx(STRETCH_MAX * before_s)


def test_nothing_is_predicted_before_enough_answers(engines: Engines) -> None:
    engines.learn(MEASURED - 1)
    assert isnan(engines.at(1, 1))
    engines.learn(1)
    assert engines.at(1, 1) > 0


def test_more_load_never_makes_an_answer_faster(engines: Engines) -> None:
    for _ in range(100):  # noise alone, and less of it with more load
        engines.has(requests := engines.rng.randrange(50), 100 * requests)
        engines.answer(late=engines.rng.uniform(1, 2) / (1 + requests / 10))
    engines.times.tick(lambda _: engines.load, engines.now_s)
    predicted = engines.times.of(KEY, engines.heartbeat)
    assert min(predicted) >= 0
    assert engines.at(0, 0) > 0


def test_a_short_answer_says_nothing(engines: Engines) -> None:
    assert engines.answer(TOKENS_MIN - 1) is None
    assert engines.answer(TOKENS_MIN) is not None


def test_a_long_answer_weighs_as_a_few_hundred_tokens(engines: Engines) -> None:
    engines.answer(TOKENS_MAX)
    engines.answer(1000 * TOKENS_MAX)
    first, both = TOKENS_MAX / BASE_S**2, engines.times._workers[KEY].kind.squares[0]
    assert both == pytest.approx((1 + FADE) * first, rel=0.01)


def test_an_answer_that_came_at_once_says_nothing(engines: Engines) -> None:
    assert engines.answer(late=0.001) is None  # at first, no token takes under a millisecond
    engines.learn()
    quiet(engines)
    engines.has(20, 3000)
    before_s = engines.at(20, 3000)
    for _ in range(50):
        assert engines.answer(late=0.9 / FACTOR) is None
    engines.times.tick(lambda _: engines.load, engines.now_s)
    assert engines.at(20, 3000) == pytest.approx(before_s)


def test_a_client_that_reads_slowly_moves_a_prediction_by_little(learned: Engines) -> None:
    learned.has(20, 3000)
    before_s = learned.at(20, 3000)
    learned.answer(late=1000.0)
    quiet(learned)
    assert learned.at(20, 3000) == pytest.approx(before_s, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_answers_of_unlike_times_are_predicted_by_their_mean(seed: int) -> None:
    """Weighed by their own times, the quick ones would draw it down by 30 %."""
    engines = Engines(seed)
    lateness = [engines.rng.lognormvariate(0.0, 0.35) for _ in range(1000)]
    engines.has(20, 3000)
    for late in lateness:
        engines.answer(late=late)
    quiet(engines)
    mean_s = fmean(lateness) * (BASE_S + REQUEST_S * 21 + BLOCK_S * 3100)
    assert engines.at(20, 3000) == pytest.approx(mean_s, rel=0.08)


def test_workers_configured_alike_share_what_is_learned_and_others_do_not(engines: Engines) -> None:
    engines.learn()
    assert engines.times.of(WorkerKey("w1", 0), heartbeat()) is engines.times.of(KEY, heartbeat())
    assert isnan(engines.times.of(WorkerKey("w1", 0), heartbeat(total_blocks=7)).base_s)


def test_load_counts_as_its_mean_over_the_time_of_an_answer() -> None:
    engines, rng = Engines(), random.Random(1)
    about = KEY, engines.heartbeat, engines.load
    for number in range(300):
        first, last = (rng.randrange(100), rng.randrange(20_000)), (rng.randrange(100), 0)
        engines.has(*first)
        engines.times.on_first(*about, f"{number}", engines.now_s)
        means = ((one + other) / 2 for one, other in zip(first, last, strict=True))
        requests, blocks = means
        took_s = 100 * (BASE_S + REQUEST_S * requests + BLOCK_S * blocks)
        engines.now_s += took_s / 2
        engines.has(*last)
        engines.times.on_prompt(*about, 0.0, engines.now_s)
        engines.now_s += took_s / 2
        engines.times.on_finished(f"{number}", engines.load, 101, 100, engines.now_s)
    quiet(engines)
    expected_s = BASE_S + 91 * REQUEST_S + 10_100 * BLOCK_S
    assert engines.at(90, 10_000) == pytest.approx(expected_s, rel=0.01)


def test_what_is_kept_is_bounded_and_ends(engines: Engines) -> None:
    engines.learn()
    about = KEY, engines.heartbeat, engines.load
    engines.times.on_first(*about, "open", engines.now_s)
    assert len(engines.times) == 1
    engines.times.on_end("open")
    engines.times.on_forgotten([KEY])
    assert len(engines.times) == 0
    assert engines.at(1, 1) > 0  # its kind is known for when it comes back
    for number in range(KINDS_MAX):
        other = heartbeat(total_blocks=number)
        engines.times.on_prompt(WorkerKey(f"x{number}", 0), other, engines.load, 1.0, 2000.0)
    assert isnan(engines.at(1, 1))
    assert len(engines.times._kinds) == KINDS_MAX


def test_a_prediction_is_above_zero_where_the_prompts_computed_explain_all() -> None:
    engines = Engines()
    for _ in range(400):
        work = engines.rng.uniform(100, 10_000)
        engines.answers += 1
        about = KEY, engines.heartbeat, engines.load
        engines.times.on_first(*about, f"{engines.answers}", engines.now_s)
        engines.times.on_prompt(*about, work, engines.now_s)
        engines.now_s += 100 * max((work / 100) ** 2 * 1e-5, 0.002)
        engines.times.on_finished(f"{engines.answers}", engines.load, 101, 10, engines.now_s)
        engines.times.tick(lambda _: engines.load, engines.now_s)
    assert engines.at(0, 0) >= SHORTEST_S
