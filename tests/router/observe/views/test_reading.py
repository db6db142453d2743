"""A reading has the numbers of the counts that metrics show."""

from collections import Counter

from router.decide.core.tally import TIERS, PickTally
from router.decide.queue.views import Depth, Sums
from router.fleet.health.time_check import TimeCheck
from router.observe.views.history import History, Waiting
from router.observe.views.reading import totals_of, waiting_of


def test_totals_are_those_of_picks_and_first_tokens() -> None:
    tally, check = PickTally(), TimeCheck()
    history = History(0.0, totals_of(tally, check))
    taken = [0] * len(TIERS)
    taken[0], taken[-1] = 300, 100  # of the fastest tier, and predicted
    tally.tokens += (1000, 600, *taken)
    tally.picks += 5
    tally.predicted(0.5, 0.25)
    tally.predicted(1.5, 0.25)
    check.on_pick("first", 0.5)
    check.on_done("first", 0.75)
    check.on_pick("second", 1.5)  # without a first token yet
    point = history.add(10.0, totals_of(tally, check), Waiting())
    assert point is not None
    assert point.picks_per_s == 0.5
    assert (point.hit_taken, point.hit_reachable) == (0.4, 0.6)
    assert (point.ttft_predicted_s, point.ttft_measured_s) == (1.0, 0.75)


def test_waiting_requests_are_those_of_the_queue() -> None:
    sums = Sums({"low": Depth(), "high": Depth(count=3)}, Counter(acme=2, zeta=1))
    waiting = waiting_of(sums)
    assert waiting.bands == {"low": 0, "high": 3}
    assert waiting.tenants == {"acme": 2, "zeta": 1}
