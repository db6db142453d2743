"""Workers that keep a request's objectives: its times to the first token, and between tokens. Pure.

    missed = max(0, now_s + ttft_s - due_s) / ttft_slo_s + max(0, ERROR * tpot_s / tpot_slo_s - 1)

missed is how far a worker misses the objectives ttft_slo_s and tpot_slo_s; 0: it keeps both. due_s
is when the first token is due. ttft_s is predicted (router/decide/policies/first_token.py), tpot_s
learned (router/fleet/token_times.py); an unknown time misses nothing. Of a pair, the first term
counts for the prefill worker, the second for the decode worker.

Laws:
- among workers that miss nothing the policy picks, as without objectives;
- where all workers miss, the policy picks among those that miss least, within ERROR;
- a sheddable request gets no worker that misses, unless that is idle: it waits, or is refused. Its
  wait counts as no miss: the first token of a sheddable request is due ttft_slo_s from now;
- this module changes no decision about a request without objectives.
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
(docs/decisions.md). A worker keeps tpot_slo_s if ERROR * tpot_s does. Where all workers miss, those
within this factor of the least count as equal, and the policy, which knows caches, picks."""


def missed_at(
    rows: Candidates, objective: Objective, due_s: float, *, computes: bool, answers: bool
) -> Column:
    """How much each worker misses, as shares of the objectives; 0: it keeps both. due_s: when the
    first token is due. computes, answers: whether the worker computes the prompt, and the answer.
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
    """Bars workers that miss more than the least of those with room, beyond the factor ERROR."""
    can = barred.can(len(missed)) & (full == 0)
    if not can.any():
        return barred
    least = missed[can].min()
    most = ERROR * (1 + least) - 1 if least else 0.0
    return barred.narrowed(missed <= most, NO_HEADROOM)


def held_from(missed: Column, rows: Candidates) -> Flags:
    """True for each worker that a sheddable request has to wait for: it misses and is not idle."""
    return (missed > 0) & (rows.active_slots > 0)


def none_keeps(
    rows: Candidates, objective: Objective, room: Flags, *, computes: bool, answers: bool
) -> bool:
    """Whether no worker of the pool with room keeps the objectives of a sheddable request,
    whatever its prompt: prompts in front take too long there, or the time between tokens is."""
    misses = np.zeros(len(rows), np.bool_)
    if objective.ttft_s is not None and computes:
        misses |= first_token(rows).wait_s > objective.ttft_s
    if objective.tpot_s is not None and answers:
        misses |= ERROR * rows.tpot_s > objective.tpot_s
    keeps = ~misses | (rows.active_slots <= 0)
    return not (room & keeps).any()
