"""Priority bands and their turns."""

from math import inf

import pytest

from router.config.keys import ConfigError
from router.config.settings.queue_settings import BandSettings
from router.decide.queue_turns.bands import Bands
from router.decide.queue_turns.pool_queue import RISES_MAX
from router.decide.waiter import Waiter
from tests.router.decide.queue.waiting import POOL, drained, names, offered, queue_of, turns

LOW = BandSettings(name="low", from_priority=0)
MIDDLE = BandSettings(name="middle", from_priority=10, weight=2.0)
HIGH = BandSettings(name="high", from_priority=100, weight=5.0)
THREE = (HIGH, LOW, MIDDLE)


def level(priority: int, waited_s: float = 0.0, aging: float = 1.0) -> str:
    bands = Bands.of(THREE, aging)
    return bands.settings[bands.level(Waiter("", 0.0, priority=priority), waited_s)].name


@pytest.mark.parametrize(
    ("priority", "name"),
    [(-5, "low"), (0, "low"), (9, "low"), (10, "middle"), (99, "middle"), (100, "high")],
)
def test_a_request_is_in_the_highest_band_that_its_priority_reaches(
    priority: int, name: str
) -> None:
    assert level(priority) == name


def test_waiting_raises_a_request_into_the_next_band() -> None:
    assert level(4, 5.9) == "low"
    assert level(4, 6.0) == "middle"
    assert level(4, 1000.0, aging=0.0) == "low"
    bands = Bands.of(THREE, 2.0)
    waiter = Waiter("", 50.0, priority=4)
    assert [bands.rises_at_s(waiter, number) for number in range(3)] == [53.0, 98.0, inf]


def test_bands_that_are_alike_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"10 is used twice - at `\$.queue.bands\[1\]"):
        Bands.of((MIDDLE, BandSettings(name="other", from_priority=10)), 1.0)
    with pytest.raises(ConfigError, match=r"'low' is used twice - at `\$.queue.bands\[1\].name"):
        queue_of(bands=(LOW, BandSettings(name="low", from_priority=10)))


def test_without_bands_all_are_in_one() -> None:
    queue = queue_of()
    assert queue.bands == ["all"]
    assert queue.band(offered(queue, "a", priority=-9)) == "all"


class TestTurns:
    def test_strict_bands_go_one_after_the_other(self) -> None:
        queue = queue_of(bands=THREE, bands_strict=True)
        for number in range(2):
            for name, priority in (("l", 0), ("m", 10), ("h", 100)):
                offered(queue, f"{name}{number}", priority=priority)
        assert turns(queue) == "h0 h1 m0 m1 l0 l1"
        assert drained(queue) == "h0 h1 m0 m1 l0 l1"

    def test_weighted_bands_take_turns_by_their_weights(self) -> None:
        queue = queue_of(bands=THREE)
        for number in range(24):
            for name, priority in (("l", 0), ("m", 10), ("h", 100)):
                offered(queue, f"{name}{number}", priority=priority)
        order = "".join(name[0] for name in drained(queue).split()[:24])
        for start in range(0, 17):
            window = order[start : start + 8]
            for band, share in (("l", 1), ("m", 2), ("h", 5)):
                assert abs(window.count(band) - share) <= 1, order

    def test_within_a_band_the_order_decides(self) -> None:
        queue = queue_of(bands=THREE, order="priority")
        offered(queue, "a", priority=1)
        offered(queue, "b", priority=3)
        assert turns(queue) == "b a"

    def test_a_band_without_room_lets_others_go(self) -> None:
        queue = queue_of(bands=THREE, bands_strict=True, look_past=0)
        offered(queue, "low", priority=0)
        high = offered(queue, "high", priority=100)
        queue.passed(high, 1)
        assert names(queue.candidates(POOL, 1, 0.0)) == "low"

    def test_a_band_that_no_request_waits_in_has_no_turn(self) -> None:
        queue = queue_of(bands=THREE)
        offered(queue, "a", priority=0)
        offered(queue, "b", priority=0)
        assert drained(queue) == "a b"


class TestRising:
    def test_a_low_request_gets_into_the_higher_band_by_its_wait(self) -> None:
        queue = queue_of(bands=THREE, bands_strict=True, bands_aging=1.0, aging=1.0)
        low = offered(queue, "low", 0.0, priority=0)
        offered(queue, "middle", 9.5, priority=12)
        assert turns(queue, 9.9) == "middle low"
        assert queue.band(low) == "low"
        offered(queue, "later", 10.0, priority=10)
        assert turns(queue, 10.0) == "middle low later", "in one band, by priority and waiting"
        assert queue.band(low) == "middle"
        assert turns(queue, 100.0) == "middle low later"
        assert queue.band(low) == "high"

    def test_without_aging_it_stays(self) -> None:
        queue = queue_of(bands=THREE, bands_strict=True, bands_aging=0.0)
        offered(queue, "low", 0.0, priority=0)
        offered(queue, "high", 1e6, priority=100)
        assert turns(queue, 1e9) == "high low"

    def test_so_many_rise_in_one_round(self) -> None:
        queue = queue_of(bands=THREE, bands_strict=True, bands_aging=1.0)
        for number in range(RISES_MAX + 1):
            offered(queue, str(number), 0.0)
        next(queue.candidates(POOL, 1, 50.0))
        assert sum(queue.band(one) == "low" for _, one in queue.waiters()) == 1
        next(queue.candidates(POOL, 1, 50.0))
        assert all(queue.band(one) == "middle" for _, one in queue.waiters())

    def test_another_priority_is_another_band(self) -> None:
        queue = queue_of(bands=THREE)
        waiter = offered(queue, "a")
        queue.reprioritize(waiter, 100, 0.0)
        assert queue.band(waiter) == "high"
