"""Session affinity: a session's next request goes to the worker of its last one. Pure.

Soft: the cost of that worker is less by a bonus in the policy's own unit, which other parts of the
cost can outweigh.

    cost = the policy's own cost - affinity
    affinity = bonus  for the worker of the session's last request, else 0

Hard: all other workers are barred while that worker may take the request and has room. Where it is
full, drained, ejected, silent or gone, no worker is barred: the cheapest is picked, and the session
goes on there.

Replicas remember the worker of a session's last request, and send it to one another
(router/fleet/reservations/sessions.py). Requests without a session, and the first request of a
session, are decided as if affinity were off.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from router.decide.policies.policy import Policy
from router.fleet.eligibility import Barred
from router.fleet.table import Column

OTHER_WORKER = "the session goes on at another worker"
_POLICIES_MAX = 256
"""Policies with a bonus that are cached, so that equal ones are one object."""


@lru_cache(_POLICIES_MAX)
def with_bonus(policy: Policy, bonus: float) -> Policy:
    """Returns a policy with soft affinity added. bonus: in the unit of its cost; 0: no change."""
    if not bonus:
        return policy
    expression, *clauses = policy.formula.split(";")
    formula = ";".join([f"({expression}) - affinity", *clauses])
    return replace(policy, formula=formula, affinity_bonus=bonus)


def held(barred: Barred, row: int, full: Column) -> Barred:
    """Returns the rows barred under hard affinity: all but the session's worker, if that may be
    picked and has room; else `barred`. row: of the session's worker; -1: it is in no row. full: not
    0 for each row without room.
    """
    if row < 0 or full[row] or (barred.mask is not None and barred.mask[row]):
        return barred
    here = np.zeros(len(full), np.bool_)
    here[row] = True
    return barred.narrowed(here, OTHER_WORKER)
