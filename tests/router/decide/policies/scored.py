"""What tests of policies share."""

from collections import Counter
from typing import Any

import numpy as np

from router.decide.policies import POLICIES
from router.decide.policies.policy import Scores
from tests.stage.rows import rows

CHI_SQUARE_7 = 24.3
"""7 degrees of freedom: exceeded by one fair die in a thousand. The seeds are fixed."""


def score(policy: str, *args: Any, **about: Any) -> Scores:
    return POLICIES[policy].score(rows(*args, **about))


def best(scores: Scores) -> list[int]:
    """The rows that tie for the lowest cost."""
    return np.flatnonzero(scores.costs == scores.costs.min()).tolist()


def chi_square(counts: Counter[str], kinds: int) -> float:
    expected = counts.total() / kinds
    seen = [*counts.values(), *[0] * (kinds - len(counts))]
    return sum((count - expected) ** 2 / expected for count in seen)
