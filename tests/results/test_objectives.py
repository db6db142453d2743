"""What objectives in the pick are worth, on a slice of a trace and a single engine."""

import numpy as np
import pytest

from simulator.traffic.results import Outcome, Slo
from simulator.traffic.trace_file import load_trace
from tests.results.objectives import SHEDDABLE, play, traffic

RATE = 6.0


@pytest.mark.long
def test_the_numbers_hold_and_a_sheddable_band_leaves_the_others_their_times() -> None:
    trace = load_trace("conversation")
    alone = play(traffic(trace, RATE, SHEDDABLE), 1)
    assert alone.model_error < 0.1
    slo = Slo(2.0, float(np.nanmedian(alone.result.itl_s)))  # which half of the answers keep
    wanted = play(traffic(trace, RATE, SHEDDABLE, slo), 1)
    assert wanted.model_error < 0.1
    kept = ~alone.sheddable
    assert (kept == ~wanted.sheddable).all()
    assert wanted.good(slo).sum() >= 1.1 * alone.good(slo).sum()
    assert wanted.good(slo)[kept].sum() >= 1.3 * alone.good(slo)[kept].sum()
    assert (wanted.result.outcome[kept] == Outcome.SERVED).all()


def test_traffic_without_objectives_is_the_same_but_for_them() -> None:
    trace = load_trace("conversation")
    without, wanting = traffic(trace, 1.0, 0.5), traffic(trace, 1.0, 0.5, Slo(1.0, 0.03))
    for one, other in zip(without.requests, wanting.requests, strict=True):
        assert (one.arrival_s, one.priority) == (other.arrival_s, other.priority)
        assert (one.ttft_slo_s, one.tpot_slo_s) == (None, None)
        assert (other.ttft_slo_s, other.tpot_slo_s) == (1.0, 0.03)
