"""The rows of a decision in the order of their costs."""

import random

import numpy as np
import pytest

from router.decide.decision.decision import Overlap
from router.decide.decision.ranking import WANTED_MAX, Ranking
from router.fleet.table import COLUMNS

SEED = 11
FULL, LAST_PICKED = COLUMNS.index("full"), COLUMNS.index("last_picked")


@pytest.mark.parametrize("seed", range(SEED, SEED + 60))
def test_the_cheapest_rows_are_those_of_a_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 40))
    costs = rng.choice([0.0, 0.5, 1.0, -2.5, np.inf, np.nan, -np.inf], rows) + rng.choice(
        [0.0, rng.random()], rows
    )
    table = np.zeros((len(COLUMNS), rows))
    table[FULL] = rng.random(rows) < 0.2
    table[LAST_PICKED] = rng.integers(0, 5, rows)
    barred = rng.random(rows) < 0.2 if seed % 3 else None
    wanted, in_turn = int(rng.integers(1, 6)), bool(seed % 2)
    ranking = Ranking(table, np.zeros((len(Overlap._fields), rows), np.int32), 1, None, barred)
    ranking.take(costs, None)
    order = ranking.in_order(wanted, in_turn, random.Random(seed))

    bad = np.flatnonzero(~np.isfinite(costs)).tolist()
    assert ranking.bad_rows() == bad
    free = [row for row in range(rows) if barred is None or not barred[row]]
    can = [row for row in free if row not in bad and not table[FULL, row]]
    by_cost = sorted(can, key=lambda row: (costs[row], row))
    tied = [row for row in by_cost if costs[row] == costs[by_cost[0]]]
    assert ranking.tied == len(tied)
    assert ranking.full == sum(table[FULL, row] > 0 for row in free)
    assert ranking.not_finite == sum(not table[FULL, row] and row in bad for row in free)
    first = 0
    if len(tied) > 1:
        picked = table[LAST_PICKED, tied]
        first = int(picked.argmin()) if in_turn else random.Random(seed).randrange(len(tied))
    assert order == [*tied[first:], *tied[:first], *by_cost[len(tied) :]][:wanted]


def test_no_more_rows_are_in_order_than_the_bound() -> None:
    rows = 2 * WANTED_MAX
    table = np.zeros((len(COLUMNS), rows))
    ranking = Ranking(table, np.zeros((len(Overlap._fields), rows), np.int32), 1, None, None)
    ranking.take(np.arange(rows, dtype=np.float64), None)
    order = ranking.in_order(rows, in_turn=False, rng=random.Random(0))
    assert order == list(range(WANTED_MAX))
