"""Growth of resident memory, as a line through its least of each while."""

from collections.abc import Mapping
from math import sqrt
from statistics import linear_regression, pvariance

FLOOR_S = 30.0
"""Of each while, whose least counts: a burst of long prompts is no growth."""


def growth(floors: Mapping[int, int]) -> tuple[float, float]:
    """Bytes a minute, and the standard error. floors: least bytes by the number of the while, of
    three at least."""
    line = linear_regression(list(floors), list(floors.values()))
    rest = [size - line.intercept - line.slope * at for at, size in floors.items()]
    spread = len(floors) * pvariance(floors)
    error = sqrt(sum(each * each for each in rest) / (len(floors) - 2) / spread)
    minute = 60.0 / FLOOR_S
    return minute * line.slope, minute * error
