"""Sessions that go on where their last requests went. Pure.

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
    """A policy under soft affinity; the policy itself for a bonus of 0."""
    if not bonus:
        return policy
    expression, *clauses = policy.formula.split(";")
    formula = ";".join([f"({expression}) - affinity", *clauses])
    return replace(policy, formula=formula, affinity_bonus=bonus)


def held(barred: Barred, row: int, full: Column) -> Barred:
    """What is barred under hard affinity: the session's worker leaves all others out, if it may be
    picked and has room. row: of that worker; -1: it is in no row."""
    if row < 0 or full[row] or (barred.mask is not None and barred.mask[row]):
        return barred
    here = np.zeros(len(full), np.bool_)
    here[row] = True
    return barred.narrowed(here, OTHER_WORKER)
