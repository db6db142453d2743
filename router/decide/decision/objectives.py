"""Workers that keep a request's objectives: its times to the first token, and between tokens. Pure.

    missed = max(0, now_s + ttft_s - due_s) / ttft_slo_s + max(0, ERROR * tpot_s / tpot_slo_s - 1)

ttft_s is predicted as policies do (router/decide/policies/first_token.py), tpot_s was learned of
the worker (router/fleet/token_times.py); what is unknown is not missed. Of a pair, the first counts
at the prefill worker, the second at the decode worker.

Laws:
- among workers that miss nothing the policy picks, as without objectives;
- where all miss, it picks among those that miss least, within ERROR;
- a sheddable request gets no worker that misses, unless that is idle: it waits, or is refused. The
  wait is not the worker's miss: for such a request the first token is due ttft_slo_s from now;
- a request without objectives is decided as if there were none of all this.
"""

import numpy as np

from router.decide.policies.candidates import Candidates
from router.decide.policies.first_token import first_token
from router.fleet.eligibility import Barred
from router.fleet.table import Column, Flags
from router.request.request import Objective

NO_HEADROOM = "no headroom for the request's objectives"
ERROR = 1.25
"""Factor by which prompts that come later make an answer slower or faster than predicted
(docs/decisions.md). A worker has headroom if it keeps the objective with so much more; where all
miss, those that are worse than the least by less are as good, since the policy knows the caches."""


def missed_at(
    rows: Candidates, objective: Objective, due_s: float, *, computes: bool, answers: bool
) -> Column:
    """How much each worker misses, as shares of the objectives; 0: it keeps both. due_s: when the
    first token is due. computes, answers: whether it is to compute the prompt, and the answer.
    """
    missed = np.zeros(len(rows))
    if objective.ttft_s is not None and computes:
        late_s = rows.now_s + first_token(rows).total_s - due_s
        missed += np.maximum(late_s, 0.0) / objective.ttft_s
    if objective.tpot_s is not None and answers:
        over = np.nan_to_num(ERROR * rows.tpot_s / objective.tpot_s) - 1
        missed += np.maximum(over, 0.0)
    return missed


def least_missed(missed: Column, barred: Barred, full: Column) -> Barred:
    """Adds the workers that miss more than others do to the barred rows."""
    can = barred.can(len(missed)) & (full == 0)
    if not can.any():
        return barred
    least = missed[can].min()
    most = ERROR * (1 + least) - 1 if least else 0.0
    return barred.narrowed(missed <= most, NO_HEADROOM)


def held_from(missed: Column, rows: Candidates) -> Flags:
    """Workers that a sheddable request waits for rather than takes."""
    return (missed > 0) & (rows.active_slots > 0)


def none_keeps(
    rows: Candidates, objective: Objective, room: Flags, *, computes: bool, answers: bool
) -> bool:
    """Whether no worker of the pool with room keeps the objectives of a sheddable request,
    whatever its prompt: the prompts before it take too long, or tokens do."""
    misses = np.zeros(len(rows), np.bool_)
    if objective.ttft_s is not None and computes:
        misses |= first_token(rows).wait_s > objective.ttft_s
    if objective.tpot_s is not None and answers:
        misses |= ERROR * rows.tpot_s > objective.tpot_s
    keeps = ~misses | (rows.active_slots <= 0)
    return not (room & keeps).any()
