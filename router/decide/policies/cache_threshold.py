"""The longest cached prefix if it is long enough, else the least load: SGLang's cache_aware."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores


class ThresholdParameters(Parameters, frozen=True):
    """The one parameter of `cache-threshold`, which SGLang's router has under the same name."""

    cache_threshold: Annotated[
        float,
        Meta(ge=0, le=1, description="cached share of the prompt above which the cache decides"),
    ] = 0.5


def score(rows: Candidates, parameters: ThresholdParameters) -> Scores:
    """Cost by the cached prefix alone if one is long enough, else by load alone.

        queue      = active_slots + load / (1 + load)      (as least-loaded)
        best_share = largest overlap_tokens of the rows that can be picked / prompt_tokens
        cost       = new_tokens + queue / (1 + queue) if best_share > cache_threshold (0.5)
                     else queue

    queue / (1 + queue) is below 1, so that it decides only between equally long prefixes.

    Source: sgl-project/sglang, sgl-router/src/policies/cache_aware.rs at 026f853, read 2026-11-28.
    There the match is by characters, in a tree of the texts sent to each worker; without a match
    that is long enough the worker with the smallest tree is picked; and where loads differ by more
    than thresholds, which are left out here, the worker with the fewest requests.
    """
    load = rows.load
    queue = rows.active_slots + load / (1 + load)
    best = np.where(rows.can_take, rows.overlap_tokens, 0.0).max() / rows.prompt_tokens
    by_cache = bool(best > parameters.cache_threshold)
    return Scores(
        costs=rows.new_tokens + queue / (1 + queue) if by_cache else queue,
        row_terms={"new_tokens": rows.new_tokens, "queue": queue},
        shared_terms={"best_share": float(best), "by_cache": float(by_cache)},
    )


CACHE_THRESHOLD = Policy(
    name="cache-threshold",
    summary="the longest cached prefix if it is long enough, else the least load; SGLang's"
    " cache_aware",
    formula="new_tokens + queue / (1 + queue) if best_share > cache_threshold else queue",
    settings=ThresholdParameters(),
    function=score,
)
