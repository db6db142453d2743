"""Sessions that go on where their last requests went. Pure.

Soft: the cost of that worker is less by a bonus in the policy's own unit, so that whatever else the
cost weighs can outweigh it.

    cost = the policy's own - affinity
    affinity = bonus  where the session's last request went, else 0

Hard: all other workers are left out while that worker may take the request and has room. Where it
is full, drained, ejected, silent or gone, nothing is left out, the next by cost is picked, and the
session goes on there.

Where a session's last request went is what replicas remember, and tell
(router/reservations/sessions.py). Requests without a session, and first requests of one, are
decided as if affinity were off.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from router.fleet.table import Column, Flags
from router.policies.policy import Policy

OTHER_WORKER = "the session goes on at another worker"
_POLICIES_MAX = 256
"""With a bonus, kept so that each has one identity."""


@lru_cache(_POLICIES_MAX)
def with_bonus(policy: Policy, bonus: float) -> Policy:
    """A policy under soft affinity; the policy itself for a bonus of 0."""
    if not bonus:
        return policy
    expression, *clauses = policy.formula.split(";")
    formula = ";".join([f"({expression}) - affinity", *clauses])
    return replace(policy, formula=formula, affinity_bonus=bonus)


def held(reasons: Sequence[str], of_session: Flags, full: Column) -> Sequence[str]:
    """Reasons against workers under hard affinity: the session's worker leaves all others out, if
    there is none against it and it has room."""
    rows = of_session.nonzero()[0].tolist()
    if not any(not reasons[row] and not full[row] for row in rows):
        return reasons
    return [reason or ("" if row in rows else OTHER_WORKER) for row, reason in enumerate(reasons)]
