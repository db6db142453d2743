"""The offset of another host's clock, from messages that are delayed."""

from math import inf

from events.feed.clock_offset import WINDOW_S, ClockOffset


def test_messages_that_are_late_leave_the_offset_as_it_is() -> None:
    offset = ClockOffset()
    assert offset.seconds == inf
    for second, delay_s in enumerate([0.25, 0.125, 4.0, 8.0]):
        offset.heard(1000.0 + second, 5000.0 + second + delay_s)
    assert offset.seconds == 4000.125


def test_a_clock_that_is_set_forward_shows_at_once() -> None:
    offset = ClockOffset()
    offset.heard(100.0, 100.0)
    offset.heard(102.0, 101.0)
    assert offset.seconds == -1.0


def test_a_clock_that_is_set_back_shows_after_two_windows() -> None:
    offset = ClockOffset()
    offset.heard(100.0, 100.0)
    for second in range(1, int(2 * WINDOW_S)):
        offset.heard(90.0 + second, 100.0 + second)
    assert offset.seconds == 0.0, "nothing tells a delay from a clock that was set back"
    offset.heard(90.0 + 2 * WINDOW_S, 100.0 + 2 * WINDOW_S)
    assert offset.seconds == 10.0


def test_after_a_long_silence_only_what_comes_then_counts() -> None:
    offset = ClockOffset()
    offset.heard(100.0, 100.0)
    offset.heard(500.0, 507.0)
    assert offset.seconds == 7.0
