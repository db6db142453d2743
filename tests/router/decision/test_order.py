"""The rows of a decision in the order of their costs."""

import numpy as np
import pytest

from router.decision.order import cheapest

SEED = 11


@pytest.mark.parametrize("seed", range(SEED, SEED + 30))
def test_the_cheapest_rows_are_those_of_a_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 40))
    costs = rng.choice([0.0, 0.5, 1.0, -2.5, np.inf, np.nan, -np.inf], rows) + rng.choice(
        [0.0, rng.random()], rows
    )
    can = rng.random(rows) < 0.8 if seed % 3 else None
    count = int(rng.integers(1, 6))
    tied, following, bad = cheapest(costs, can, count)
    assert bad == np.flatnonzero(~np.isfinite(costs)).tolist()
    open_rows = [row for row in range(rows) if row not in bad and (can is None or can[row])]
    ordered = sorted(open_rows, key=lambda row: (costs[row], row))
    assert tied == [row for row in ordered if costs[row] == costs[ordered[0]]]
    assert [*tied, *following] == ordered[: max(count, len(tied))]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bools for 3 costs"):
        cheapest(np.zeros(3), np.ones(2, np.bool_), 1)
