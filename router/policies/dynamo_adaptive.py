"""NVIDIA Dynamo's first cost function, with adaptive alpha."""

from math import sqrt

import numpy as np

from router.candidates import Candidates
from router.policies.policy import Policy, Scores

BALANCE_THRESHOLD = 0.1
ALPHA_BALANCE = 0.7
ALPHA_CACHE = 0.3
GAMMA = 0.1


def score(rows: Candidates) -> Scores:
    """Weighs load against new work; weighs load more when the fleet is uneven.

        load  = active_blocks / total_blocks                     (0 where the total is unknown)
        mean, std over all live workers, before any exclusion    (population std)
        alpha = 0.7 if mean > 0 and std > 0.1 * mean else 0.3
        cost  = alpha * (load - mean) + (1 - alpha) * new_tokens / prompt_tokens
                + 0.1 * active_slots / total_slots               (0 where the total is unknown)

    Source: ai-dynamo/dynamo v0.1.0, lib/llm/src/kv_router/scheduler.rs, read 2026-11-21. Two things
    differ from the published code. There the mean is in blocks but is subtracted from a ratio; here
    both are ratios. There a worker's overlap is looked up by its place in a list that need not line
    up with the list of endpoints; here a row is one worker's. And ties, which there went to the
    first in the list, are broken at random.
    """
    load = rows.load
    # Sums row after row, which are the same to the last bit wherever they are made (router/lane.pyx).
    mean = float(np.add.accumulate(load)[-1]) / len(rows)
    deviation = load - mean
    std = sqrt(float(np.add.accumulate(deviation * deviation)[-1]) / len(rows))
    balance = mean > 0 and std > BALANCE_THRESHOLD * mean
    alpha = ALPHA_BALANCE if balance else ALPHA_CACHE
    new_share = rows.new_tokens / rows.prompt_tokens
    slot_ratio = rows.slot_ratio
    return Scores(
        costs=alpha * deviation + (1 - alpha) * new_share + GAMMA * slot_ratio,
        row_terms={
            "load": load,
            "load_deviation": deviation,
            "new_share": new_share,
            "slot_ratio": slot_ratio,
            "total_blocks_unknown": rows.load_unknown,
        },
        shared_terms={"load_mean": mean, "load_std": std, "alpha": alpha},
    )


DYNAMO_ADAPTIVE = Policy(
    name="dynamo-adaptive",
    summary="load against new work, load more when the fleet is uneven; the default",
    formula="alpha * (load - load_mean) + (1 - alpha) * new_share + gamma * slot_ratio;"
    " alpha = alpha_balance if load_mean > 0 and load_std > balance_threshold * load_mean"
    " else alpha_cache",
    parameters={
        "balance_threshold": BALANCE_THRESHOLD,
        "alpha_balance": ALPHA_BALANCE,
        "alpha_cache": ALPHA_CACHE,
        "gamma": GAMMA,
    },
    score=score,
)
