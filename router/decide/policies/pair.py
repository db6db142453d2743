"""The costs of a pair's two halves: the prefill worker, and the decode worker."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores
from router.fleet.topology import BEYOND

NO_ROOM = 1e3
"""Cost of a worker without room for the request, above any cost of a worker with room."""


def prefill_queue(rows: Candidates, _: Parameters) -> Scores:
    """Cost of a prefill worker: prompt tokens it has to compute until this prompt is computed.

        cost = prefill_tokens_active + new_tokens

    prefill_tokens_active: tokens still to compute of prompts sent there before. new_tokens: tokens
    of this prompt that are not cached there. So a worker with the cache is picked as long as its
    queue is longer by less than the cache saves.
    """
    ahead, new = rows.prefill_tokens_active, rows.new_tokens
    return Scores(ahead + new, {"prefill_tokens_active": ahead, "new_tokens": new})


class RoomParameters(Parameters, frozen=True):
    """Parameters of `decode-room`: a weight of distance, and the slots of workers that name
    none.
    """

    way_weight: Annotated[
        float,
        Meta(
            ge=0,
            description="cost of a decode worker that is in another cluster than the KV cache of"
            " the prompt; 1 is the cost of a worker all of whose slots are in use",
        ),
    ] = 0.05
    slots_unknown: Annotated[
        float, Meta(ge=1, description="number of slots assumed for a worker that names none")
    ] = 256.0


def decode_room(rows: Candidates, parameters: RoomParameters) -> Scores:
    """Cost of a decode worker: its share in use, and how far the KV cache has to travel.

        need     = blocks of the prompt that are not in use there yet, and of the output expected
        kv_share = (active_blocks + need) / total_blocks        (0 where the total is unknown)
        batch    = active_slots / total_slots                   (slots_unknown where unknown)
        way      = (1 + kv_distance) / 4 * new_tokens / prompt_tokens
        no_room  = 1 where need > free_blocks
        cost     = kv_share + batch + way_weight (0.05) * way + 1000 * no_room

    kv_distance: from where the KV cache is: 0 the same host, or nothing to fetch; 1 the same rack,
    2 the same cluster, 3 beyond or unknown (router/fleet/topology.py). What is cached on a worker
    does not travel. A request takes about 0.01 of a worker, so that by way_weight a step of
    kv_distance costs as much as one more request in the batch.

    Source: ours; Mooncake's Conductor picks decode workers near the KV cache with room for it, too.
    """
    tokens = rows.prompt_tokens + (rows.request.expected_output_tokens or 0)
    need = np.ceil(tokens / rows.block_tokens) - rows.prompt_blocks + rows.new_blocks
    known = rows.total_blocks > 0
    kv_share = np.zeros(len(rows))
    np.divide(rows.active_blocks + need, rows.total_blocks, out=kv_share, where=known)
    slots = np.where(np.isnan(rows.total_slots), parameters.slots_unknown, rows.total_slots)
    batch = rows.active_slots / np.maximum(slots, 1.0)
    kv_way = (1 + rows.kv_distance) / (1 + BEYOND) * rows.new_tokens / rows.prompt_tokens
    no_room = np.where(need > rows.free_blocks, 1.0, 0.0)
    return Scores(
        kv_share + batch + parameters.way_weight * kv_way + NO_ROOM * no_room,
        {
            "need_blocks": need,
            "kv_share": kv_share,
            "batch": batch,
            "way": kv_way,
            "kv_distance": rows.kv_distance,
            "no_room": no_room,
        },
    )


PREFILL_QUEUE = Policy(
    name="prefill-queue",
    summary="the fewest prompt tokens to compute before the first token; for prefill workers",
    formula="prefill_tokens_active + new_tokens",
    settings=Parameters(),
    function=prefill_queue,
)
DECODE_ROOM = Policy(
    name="decode-room",
    summary="the most room, near to where the KV cache is; for decode workers",
    formula="kv_share + batch + way_weight * way + 1000 * no_room",
    settings=RoomParameters(),
    function=decode_room,
)
