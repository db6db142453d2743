"""The order of a decision's rows, in C (native/order.h): the fast path uses the same. Pure."""

import numpy as np
import numpy.typing as npt

def cheapest(
    costs: npt.NDArray[np.float64], can: npt.NDArray[np.bool_] | None, count: int
) -> tuple[list[int], list[int], list[int]]:
    """The lowest costs: (rows that tie for the lowest, the next rows after them, bad rows).

    can: a bool for each row, False: the row must not be picked; None: all rows may be. count: rows
    to return in all: all tied rows, then the next rows, cheapest first. bad: rows whose cost is no
    finite number; they are never among the others.
    """
