"""NVIDIA Dynamo's first cost function, with an adaptive weight of load, queues and evictions."""

from dataclasses import replace
from math import sqrt
from typing import Annotated

import numpy as np
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores


class AdaptiveParameters(Parameters, frozen=True):
    """Parameters of `dynamo-adaptive`; the defaults did best over traces (docs/decisions.md)."""

    balance_threshold: Annotated[
        float, Meta(ge=0, description="std / mean of load above which the fleet is uneven")
    ] = 0.1
    alpha_balance: Annotated[
        float, Meta(ge=0, le=1, description="weight of load while the fleet is uneven")
    ] = 0.3
    alpha_cache: Annotated[
        float, Meta(ge=0, le=1, description="weight of load in an even fleet")
    ] = 0.2
    gamma: Annotated[float, Meta(ge=0, description="weight of the slots in use")] = 0.1
    queue_weight: Annotated[
        float,
        Meta(
            ge=0,
            description="weight of the prompt tokens that a worker has still to compute for other"
            " requests, beside the request's own new tokens; in the published formula 0",
        ),
    ] = 1.0
    keep: Annotated[
        float,
        Meta(
            ge=0,
            description="weight of computing again what the pick evicts: 1 counts each evicted"
            " recent token as one token to compute; in the published formula 0",
        ),
    ] = 1.0


def score(rows: Candidates, parameters: AdaptiveParameters) -> Scores:
    """Weighs load against new work; weighs load more when the fleet is uneven.

        load  = active_blocks / total_blocks                     (0 where the total is unknown)
        mean, std of load over all live workers, before any exclusion (population std)
        alpha = alpha_balance (0.3) if mean > 0 and std > balance_threshold (0.1) * mean
                else alpha_cache (0.2)
        work  = ((1 + keep (1) * evicted_share) * new_tokens - invested_tokens
                 + queue_weight (1) * prefill_tokens_active) / prompt_tokens
        cost  = alpha * (load - mean) + (1 - alpha) * work
                + gamma (0.1) * active_slots / total_slots       (0 where the total is unknown)

    Source: ai-dynamo/dynamo v0.1.0, lib/llm/src/kv_router/scheduler.rs, read 2026-11-21. Six
    things differ from the published code. There alpha is 0.7 or 0.3. There `work` is new_tokens /
    prompt_tokens: of two workers with like load the one that computes a long prompt is as good as
    the one that computes none, and the one whose cache is full of prompts of the last minute as
    good as the one with free blocks, though each evicted token is computed again when its session
    goes on (Candidates.evicted_share; docs/decisions.md has the numbers of all three). There a
    prefix that many prompts share keeps all of them at the workers that computed it first, since a
    prompt that brings it to another worker seems to be the only one that pays
    (router/fleet/shared_prefixes.py). There the mean is in blocks but is subtracted from a ratio;
    here both are ratios. There a worker's overlap is looked up by its place in a list that need not
    line up with the list of endpoints; here a row is one worker's. And ties, which there went to
    the first in the list, are broken at random.
    """
    load = rows.load
    # Sums row after row: the same to the last bit wherever they are made
    # (router/decide/decision/native/adaptive.h).
    mean = float(np.add.accumulate(load)[-1]) / len(rows)
    deviation = load - mean
    std = sqrt(float(np.add.accumulate(deviation * deviation)[-1]) / len(rows))
    balance = mean > 0 and std > parameters.balance_threshold * mean
    alpha = parameters.alpha_balance if balance else parameters.alpha_cache
    new_share = rows.new_tokens / rows.prompt_tokens
    queue_share = rows.prefill_tokens_active / rows.prompt_tokens
    slot_ratio = rows.slot_ratio
    evicted_share = rows.evicted_share
    invested_share = rows.invested_tokens / rows.prompt_tokens
    computed = (1 + parameters.keep * evicted_share) * new_share - invested_share
    work = computed + parameters.queue_weight * queue_share
    return Scores(
        costs=alpha * deviation + (1 - alpha) * work + parameters.gamma * slot_ratio,
        row_terms={
            "load": load,
            "load_deviation": deviation,
            "new_share": new_share,
            "evicted_share": evicted_share,
            "invested_share": invested_share,
            "queue_share": queue_share,
            "slot_ratio": slot_ratio,
            "total_blocks_unknown": rows.load_unknown,
        },
        shared_terms={"load_mean": mean, "load_std": std, "alpha": alpha},
    )


DYNAMO_ADAPTIVE = Policy(
    name="dynamo-adaptive",
    summary="load against new and queued work, load more when the fleet is uneven; the default",
    formula="alpha * (load - load_mean) + (1 - alpha)"
    " * ((1 + keep * evicted_share) * new_share - invested_share + queue_weight * queue_share)"
    " + gamma * slot_ratio;"
    " alpha = alpha_balance if load_mean > 0 and load_std > balance_threshold * load_mean"
    " else alpha_cache",
    settings=AdaptiveParameters(),
    function=score,
    timed=True,
    invests=True,
)

DYNAMO_UNGUARDED = replace(
    DYNAMO_ADAPTIVE,
    name="dynamo-unguarded",
    summary="dynamo-adaptive as it was published: new work alone, and no guard over its picks",
    settings=AdaptiveParameters(alpha_balance=0.7, alpha_cache=0.3, queue_weight=0.0, keep=0.0),
    timed=False,
    invests=False,
)
