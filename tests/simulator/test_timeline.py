"""Virtual time: order, clocks, and the quiet that is skipped."""

from simulator.world.timeline import QUIET_S, Timeline


def test_calls_are_made_in_order_of_time_and_then_of_asking() -> None:
    timeline, made = Timeline(), []
    timeline.every(100.0, 50.0, lambda: made.append("clock"))
    for name, when_s in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        timeline.at(when_s, lambda name=name: made.append(name))
    for _ in range(4):
        timeline.step()
    assert made == ["a", "b", "c", "clock"]
    assert timeline.now_s == 50.0


def test_a_call_for_the_past_is_made_now() -> None:
    timeline, at_s = Timeline(), []
    timeline.every(100.0, 50.0, lambda: None)
    timeline.at(3.0, lambda: timeline.at(1.0, lambda: at_s.append(timeline.now_s)))
    timeline.step()
    timeline.step()
    assert at_s == [3.0]


def strokes_until(when_s: float, *, busy: bool) -> tuple[Timeline, list[tuple[str, float]]]:
    """Two clocks, one of them with a lead, and a call at the end."""
    timeline: Timeline = Timeline()
    made: list[tuple[str, float]] = []
    timeline.quiet_since_s = None if busy else 0.0
    timeline.every(1.0, 0.0, lambda: made.append(("tick", timeline.now_s)))
    timeline.every(1.0, 0.5, lambda: made.append(("beat", timeline.now_s)), 2.0)
    timeline.at(when_s, lambda: made.append(("call", timeline.now_s)))
    while not made or made[-1][0] != "call":
        timeline.step()
    return timeline, made


def test_nothing_is_skipped_while_somebody_is_busy() -> None:
    _, made = strokes_until(2000.0, busy=True)
    assert [at_s for name, at_s in made if name == "tick"] == [float(i) for i in range(2001)]


def test_a_short_quiet_is_lived_through() -> None:
    _, made = strokes_until(QUIET_S, busy=False)
    assert [at_s for name, at_s in made if name == "tick"] == [float(i) for i in range(301)]


def test_the_end_of_a_long_quiet_is_skipped_and_leading_clocks_strike_first() -> None:
    timeline, made = strokes_until(1e6 + 0.25, busy=False)
    assert timeline.strokes < 2.1 * QUIET_S
    after = [one for one in made if one[1] > QUIET_S + 2.0]
    assert after[0][0] == "beat"
    assert [name for name, _ in after].index("tick") >= 2
    assert after[-1] == ("call", 1e6 + 0.25)
    assert after[-2][1] > 1e6 - 1.0
    times = [at_s for _, at_s in made]
    assert times == sorted(times)
    phases = {name: {at_s % 1.0 for one, at_s in made if one == name} for name in ("tick", "beat")}
    assert phases == {"tick": {0.0}, "beat": {0.5}}
