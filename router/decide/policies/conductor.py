"""Policy `conductor`: where the cache is, else near to it, as Mooncake's Conductor picks."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.first_token import first_token
from router.decide.policies.policy import Parameters, Policy, Scores

STAGE = 1e6
"""Cost of each stage, above any cost within a stage, so that an earlier stage always wins."""


class ConductorParameters(Parameters, frozen=True):
    """Parameters of `conductor`; the defaults are the Conductor's own numbers."""

    hit_ratio_min: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="least share of the prompt that must be cached on some worker for the"
            " cache to decide",
        ),
    ] = 0.1
    queue_max: Annotated[
        float,
        Meta(
            ge=0,
            description="most requests that may wait at a worker that holds the prefix for it to"
            " be picked",
        ),
    ] = 10.0
    distance_weight: Annotated[
        float,
        Meta(
            ge=0,
            description="weight of a worker's mean distance to those that hold the prefix: 0 on the"
            " same host, 1 in the same rack, 2 in the same cluster, 3 beyond",
        ),
    ] = 0.7
    queue_weight: Annotated[
        float,
        Meta(
            ge=0,
            description="weight of each waiting or reserved request at a worker, beside distance,"
            " for workers that do not hold the prefix or have more than queue_max such requests",
        ),
    ] = 0.3


def score(rows: Candidates, parameters: ConductorParameters) -> Scores:
    """Cost that prefers a worker with the cached prefix, then one near it, then the least loaded.

        hit_ratio = the most overlap_tokens of all workers / prompt_tokens
        queue     = max(0, waiting + reserved)
        fits      = free blocks >= the prompt's blocks that are not in use there yet
        stage 0   : hit_ratio >= hit_ratio_min (0.1), the worker has that hit_ratio, fits, queue
                    <= queue_max (10): the shortest queue
        stage 1   : hit_ratio >= hit_ratio_min, fits: the least of distance_weight (0.7) * distance
                    + queue_weight (0.3) * queue
        stage 2   : all others: the least loaded, by active_slots + load / (1 + load)
        cost      = 1e6 * stage + the number of that stage

    distance is a worker's mean to all holders, by labels: 0 the same host, 1 the same rack, 2 the
    same cluster, 3 beyond or unknown (router/fleet/topology.py). All live workers with the longest
    overlap are holders, even those that can't take the request: the cache travels least to workers
    near them. The role excludes workers, and has no cost. A worker whose total_blocks is unknown
    fits.

    latency_s, in receipts alone, is the Conductor's estimate: seconds of queue, cache load and
    computation.

    Requests for decode alone are decided alike: their holders are the workers with their KV cache.

    Source: Mooncake (Qin et al., FAST 2025) describes the Conductor, whose code is not public; the
    thresholds, weights and distances are those of an outsider's derivation from the paper, read
    2026-11-21.
    """
    overlap = rows.overlap_tokens
    best = float(overlap.max())
    hit_ratio = best / rows.prompt_tokens
    queue = np.maximum(rows.waiting + rows.reserved, 0.0)
    slots, load = rows.active_slots, rows.load
    least_loaded = slots + load / (1 + load)
    stage = np.full(len(rows), 2.0)
    distance = np.zeros(len(rows))
    within = least_loaded
    if best > 0 and hit_ratio >= parameters.hit_ratio_min:
        holders = overlap == best
        distance = rows.mean_distance(holders)
        fits = rows.free_blocks >= rows.new_blocks
        stage[fits] = 1.0
        stage[fits & holders & (queue <= parameters.queue_max)] = 0.0
        near = parameters.distance_weight * distance + parameters.queue_weight * queue
        within = np.choose(stage.astype(np.intp), (queue, near, least_loaded))
    return Scores(
        STAGE * stage + within,
        {
            "stage": stage,
            "queue": queue,
            "distance": distance,
            "active_slots": slots,
            "load": load,
            "latency_s": first_token(rows).total_s,
        },
        {"hit_ratio": hit_ratio},
    )


CONDUCTOR = Policy(
    name="conductor",
    summary="where the cache is, else near to it, else the least loaded; Mooncake's Conductor",
    formula="1e6 * stage + (queue if stage == 0"
    " else distance_weight * distance + queue_weight * queue if stage == 1"
    " else active_slots + load / (1 + load))",
    settings=ConductorParameters(),
    function=score,
    timed=True,
)
