"""The cost function of NVIDIA Dynamo's first Python router."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores


class LogitParameters(Parameters, frozen=True):
    """The one parameter of `dynamo-logit`, a weight."""

    overlap_weight: Annotated[
        float, Meta(ge=0, description="weight of the cached share of the prompt")
    ] = 2.0


def score(rows: Candidates, parameters: LogitParameters) -> Scores:
    """Twice the cached share of the prompt, less cache usage, less the share of the longest queue.

        logit = overlap_weight (2) * overlap_tokens / prompt_tokens
                - cache_usage - waiting / max(waiting)
        cost  = -logit

        cache_usage = active_blocks / total_blocks          (0 where the total is unknown)
        waiting     = max(0, reported waiting + reserved)   (the last term is 0 when nobody waits)

    Requests that were sent and that the engine has not counted yet wait, too: without them a burst
    between two samples would all see the same queue. (The Rust form of v0.2 does the same: it adds
    1 to a worker's waiting requests with each pick.) Requests that ended since the sample shorten
    the queue, and never below none.

    Source: ai-dynamo/dynamo v0.1.0, examples/llm/components/kv_router.py, read 2026-11-21. There
    an all-zero fleet leaves the choice to the caller; here it is a tie.
    """
    overlap_share = rows.overlap_tokens / rows.prompt_tokens
    usage = rows.load
    waiting = np.maximum(0.0, rows.waiting + rows.reserved)
    longest = float(waiting.max())
    queue_share = waiting / longest if longest > 0 else np.zeros(len(rows))
    return Scores(
        costs=-(parameters.overlap_weight * overlap_share - usage - queue_share),
        row_terms={
            "overlap_share": overlap_share,
            "cache_usage": usage,
            "waiting": waiting,
            "queue_share": queue_share,
        },
        shared_terms={"waiting_max": longest},
    )


DYNAMO_LOGIT = Policy(
    name="dynamo-logit",
    summary="cached share against cache usage and queue; Dynamo's first Python router",
    formula="-(overlap_weight * overlap_share - cache_usage - queue_share)",
    settings=LogitParameters(),
    function=score,
)
