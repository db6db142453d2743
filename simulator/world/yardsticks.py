"""Policies to compare others with, that no router has by name. Pure.

kvroute replay TRACE --compare simulator.world.yardsticks:random
"""

import numpy as np

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Scores


def random(rows: Candidates) -> Scores:
    """Any worker that may take the request, each with the same chance."""
    return Scores(np.zeros(len(rows)), chances=np.ones(len(rows)))
