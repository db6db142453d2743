"""The cost function of NVIDIA Dynamo's later releases, in blocks."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores
from router.fleet.table import Column, Flags


class BlocksParameters(Parameters, frozen=True):
    """Parameters of `dynamo-blocks`; the defaults are Dynamo's own numbers."""

    prefill_load_scale: Annotated[
        float,
        Meta(ge=0, description="weight of the blocks to prefill, relative to the blocks in use"),
    ] = 1.0
    overlap_credit: Annotated[
        float, Meta(ge=0, description="blocks of work that each prompt block on the device saves")
    ] = 1.0
    host_credit: Annotated[
        float,
        Meta(ge=0, description="blocks of work that each prompt block in host memory alone saves"),
    ] = 0.75
    disk_credit: Annotated[
        float, Meta(ge=0, description="blocks of work that each prompt block on disk alone saves")
    ] = 0.25
    credit_decay: Annotated[
        float,
        Meta(
            ge=0,
            description="number d: overlap_credit is divided by 1 + d * backlog; backlog: prompt"
            " tokens that the worker has to compute, less the fewest of any worker, / this"
            " prompt's tokens",
        ),
    ] = 0.0
    request_weight: Annotated[
        float,
        Meta(ge=0, description="blocks that each active request of a worker adds to its cost"),
    ] = 0.0
    temperature: Annotated[
        float,
        Meta(
            ge=0,
            description="0: the worker of the lowest cost is picked; above 0: workers are drawn"
            " by their costs, the more evenly the higher it is",
        ),
    ] = 0.0


def score(rows: Candidates, parameters: BlocksParameters) -> Scores:
    """Blocks to prefill, less what is cached, and blocks held while decoding.

        raw_prefill   = (prefill_tokens_active + prompt_tokens) / block_size
        credit        = overlap_credit (1) / (1 + credit_decay (0) * backlog) * device_blocks
                        + host_credit (0.75) * host_blocks + disk_credit (0.25) * disk_blocks
        backlog       = (prefill_tokens_active - least_active) / prompt_tokens
        decode_blocks = active_blocks + the prompt's blocks not in use there yet
        cost          = prefill_load_scale (1) * max(raw_prefill - credit, 0) + decode_blocks
                        + request_weight (0) * active_slots

    All are in blocks but backlog, which is in lengths of this prompt; least_active is the least
    prefill_tokens_active of workers that can be picked. The lowest cost is picked, ties at random;
    at temperature > 0 a row is drawn with a chance in proportion to

        chance = exp(-(cost - least) / (range * temperature))    over rows that can be picked

    where range is the largest cost less the least; a range of 0 makes all chances equal.

    Source: ai-dynamo/dynamo 1.6, lib/kv-router/src/scheduling/selector, read 2026-11-21, with the
    defaults of the wheel ai-dynamo-runtime 1.6.1. There all load is what the router sent itself;
    here it is what the engines report, and what was sent since.
    """
    size = rows.block_tokens
    can = rows.can_take
    raw_prefill = (rows.prefill_tokens_active + rows.prompt_tokens) / size
    device_credit = parameters.overlap_credit * rows.device_tokens / size
    if parameters.credit_decay:
        active = rows.prefill_tokens_active
        least = float(active[can].min()) if can.any() else 0.0
        backlog = np.maximum(active - least, 0.0) / rows.prompt_tokens
        device_credit = device_credit / (1 + parameters.credit_decay * backlog)
    credit = (
        device_credit
        + parameters.host_credit * rows.host_tokens / size
        + parameters.disk_credit * rows.disk_tokens / size
    )
    prefill_blocks = np.maximum(raw_prefill - credit, 0.0)
    new_blocks = rows.new_blocks
    decode_blocks = rows.active_blocks + new_blocks
    costs = (
        parameters.prefill_load_scale * prefill_blocks
        + decode_blocks
        + parameters.request_weight * rows.active_slots
    )
    terms = {
        "raw_prefill": raw_prefill,
        "credit": credit,
        "block_size": size,
        "new_blocks": new_blocks,
        "decode_blocks": decode_blocks,
        "active_slots": rows.active_slots,
    }
    if not parameters.temperature:
        return Scores(costs, terms)
    chances = softmax(costs, can, parameters.temperature)
    return Scores(costs, {**terms, "chance": chances}, chances=chances)


def softmax(costs: Column, can: Flags, temperature: float) -> Column:
    """Chances by cost, as `score` has them: their sum is 1; 0 for rows that can't be picked."""
    chances = np.zeros(len(costs))
    if can.any():
        pickable = costs[can]
        least = pickable.min()
        spread = pickable.max() - least
        weights = (
            np.exp(-(pickable - least) / (spread * temperature))
            if spread
            else np.ones(len(pickable))
        )
        chances[can] = weights / weights.sum()
    return chances


DYNAMO_BLOCKS = Policy(
    name="dynamo-blocks",
    summary="blocks to prefill less cached ones, and blocks in use; Dynamo's present form",
    formula="prefill_load_scale * max(raw_prefill - credit, 0) + decode_blocks"
    " + request_weight * active_slots",
    settings=BlocksParameters(),
    function=score,
)
