"""Session affinity: a session's next request goes to the worker of its last one. Pure.

Soft: the cost of that worker is less by a bonus in the policy's own unit, so that whatever else the
cost weighs can outweigh it.

    cost = the policy's own - affinity
    affinity = bonus  where the session's last request went, else 0

Hard: all other workers are left out while that worker may take the request and has room. Where it
is full, drained, ejected, silent or gone, nothing is left out, the next by cost is picked, and the
session goes on there.

Where a session's last request went is what replicas remember, and tell
(router/fleet/reservations/sessions.py). Requests without a session, and first requests of one, are
decided as if affinity were off.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from router.decide.policies.policy import Policy
from router.fleet.eligibility import Barred
from router.fleet.table import Column

OTHER_WORKER = "the session goes on at another worker"
_POLICIES_MAX = 256
"""Policies with a bonus that are kept, so that each has one identity."""


@lru_cache(_POLICIES_MAX)
def with_bonus(policy: Policy, bonus: float) -> Policy:
    """Returns a policy with soft affinity added; the policy itself for a bonus of 0."""
    if not bonus:
        return policy
    expression, *clauses = policy.formula.split(";")
    formula = ";".join([f"({expression}) - affinity", *clauses])
    return replace(policy, formula=formula, affinity_bonus=bonus)


def held(barred: Barred, row: int, full: Column) -> Barred:
    """Returns what is barred under hard affinity: all workers but the session's, if that one may be
    picked and has room. row: of the session's worker; -1: it is in no row.
    """
    if row < 0 or full[row] or (barred.mask is not None and barred.mask[row]):
        return barred
    here = np.zeros(len(full), np.bool_)
    here[row] = True
    return barred.narrowed(here, OTHER_WORKER)
