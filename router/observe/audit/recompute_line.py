"""Recomputes a line of the decision log, by the policy that it names. Pure."""

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np

from router.decide.decision import guard as pick_guard
from router.decide.policies import POLICIES
from router.decide.policies.affinity import with_bonus
from router.decide.policies.policy import Policy
from router.observe.audit.logged_decision import LoggedDecision, NoHashes, candidates, reasons
from router.observe.audit.recompute_receipt import FormulaError, Recomputed, Verdict

ROWS = 2
"""Most rows of a verdict: the pick, and the cheapest of the others."""


def check_line(line: LoggedDecision) -> Verdict:
    """Recomputes all costs of a line, and checks that its pick follows. Raises FormulaError.

    Costs are computed by the policy's code, to the last bit, not by the formula that people read.
    """
    picked = line.picked
    assert picked is not None, "a decision as it is read has a pick"
    policy = _policy(line)
    rows = candidates(line)
    try:
        scores = policy.score(rows)
    except NoHashes as error:
        raise FormulaError(str(error)) from error
    logged = np.array([np.nan if cost is None else cost for cost in line.costs])
    costs = np.where(np.isfinite(scores.costs), scores.costs, np.nan)
    excluded = reasons(line)
    complaints = [
        f"{_name(line, row)}: the line says {logged.item(row)!r}, {policy.name} {costs.item(row)!r}"
        " as the cost, by the rules of this release"
        for row in np.flatnonzero(
            (logged != costs) & ~(np.isnan(logged) & np.isnan(costs))
        ).tolist()
    ]
    can = np.array([not why for why in excluded], np.bool_) & ~np.isnan(costs)
    kept = can if line.guard is None else pick_guard.kept(rows, can, line.guard)
    if excluded[picked]:
        complaints.append(f"the pick is marked as excluded: {excluded[picked]}")
    elif scores.chances is not None:
        if not scores.chances[picked if line.cheapest is None else line.cheapest] > 0:
            complaints.append("the pick was drawn by chances, and its chance was 0")
    elif costs[kept].min(initial=np.inf) < costs[picked]:
        complaints.append("another worker is cheaper than the pick")
    elif not kept[picked]:
        complaints.append("the guard would not have left the pick there: it is over its bounds")
    order = [row for row in np.argsort(costs, kind="stable").tolist() if can[row] and row != picked]
    shown = []
    for row in [picked, *order][:ROWS]:
        worker_id, dp_rank = line.workers[row]
        terms = {name: column.item(row) for name, column in scores.row_terms.items()}
        shown.append(Recomputed(worker_id, dp_rank, logged.item(row), costs.item(row), terms))
    return Verdict(
        policy=policy.name,
        formula=policy.formula,
        shared={**policy.parameters, **scores.shared_terms},
        decided_at_s=line.at_s,
        replica=line.replica,
        prompt_tokens=line.prompt_tokens,
        candidates=len(line.workers),
        excluded=Counter(why for why in excluded if why),
        tied=line.tied,
        terms=sorted(scores.row_terms),
        rows=shown,
        complaints=complaints,
    )


def _policy(line: LoggedDecision) -> Policy:
    policy = POLICIES.get(line.policy)
    if policy is None:
        raise FormulaError(
            f"policy {line.policy!r} is not built in; `kvroute replay-log --policy {line.policy}`"
            " computes costs by a function of your own"
        )
    numbers = {**policy.parameters, **line.parameters}
    try:
        policy = replace(policy, settings=msgspec.convert(numbers, type(policy.settings)))
    except msgspec.ValidationError as error:
        raise FormulaError(f"parameters of policy {policy.name} are invalid: {error}") from error
    return with_bonus(policy, line.affinity_bonus or 0.0)


def _name(line: LoggedDecision, row: int) -> str:
    return "{}/{}".format(*line.workers[row])
