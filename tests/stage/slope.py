"""Growth of resident memory: a line through its least value in each period."""

from collections.abc import Mapping
from math import sqrt
from statistics import linear_regression, pvariance

FLOOR_S = 30.0
"""Seconds of a period, of which the least value counts: a burst of long prompts is no growth."""


def growth(floors: Mapping[int, int]) -> tuple[float, float]:
    """Bytes a minute, and the standard error. floors: the least bytes by the period's number, of
    three periods at least."""
    line = linear_regression(list(floors), list(floors.values()))
    rest = [size - line.intercept - line.slope * at for at, size in floors.items()]
    spread = len(floors) * pvariance(floors)
    error = sqrt(sum(each * each for each in rest) / (len(floors) - 2) / spread)
    minute = 60.0 / FLOOR_S
    return minute * line.slope, minute * error
