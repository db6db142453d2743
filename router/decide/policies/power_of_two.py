"""The power of two random choices."""

from math import comb

import numpy as np

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores


def score(rows: Candidates, _: Parameters) -> Scores:
    """Draws two workers at random and picks the less loaded; ignores caches.

        cost   = active_slots
        chance = (workers with more slots in use + half of the others that have as many) / pairs

    Two different workers out of n are drawn, each pair as likely as another: n * (n - 1) / 2 pairs.
    A worker is picked if the other worker of its pair is busier, and in half of the cases if that
    is as busy. So the chance of each worker is known without drawing pairs, and the core draws
    once. The busiest of three or more has chance 0, if no other is as busy. A single worker always
    is picked.

    Source: M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """
    slots = rows.active_slots
    can = rows.can_take
    chances = np.zeros(len(rows))
    count = int(np.count_nonzero(can))
    if count == 1:
        chances[can] = 1.0
    elif count:
        ascending = np.sort(slots[can])
        busier = count - np.searchsorted(ascending, slots[can], "right")
        as_busy = count - busier - np.searchsorted(ascending, slots[can], "left")
        chances[can] = (busier + (as_busy - 1) / 2) / comb(count, 2)
    return Scores(slots, {"active_slots": slots, "chance": chances}, chances=chances)


POWER_OF_TWO = Policy(
    "power-of-two",
    "the less loaded of two workers at random; blind to caches",
    "active_slots",
    Parameters(),
    score,
    draws=True,
)
