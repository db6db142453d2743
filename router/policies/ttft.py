"""Time to the first token, in seconds, by rates learned from each worker. Ours."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from router.candidates import Candidates
from router.policies.first_token import DISK_RATE, HOST_RATE, first_token
from router.policies.policy import Parameters, Policy, Scores


class TtftParameters(Parameters, frozen=True):
    """The defaults are those that did best over traces in the simulator (router/README.md)."""

    keep: Annotated[
        float, Meta(ge=0, description="worth to later requests of a token that is computed once")
    ] = 0.5
    crowding: Annotated[
        float, Meta(ge=0, description="of the delay to prompts that are being computed there")
    ] = 0.6
    stall: Annotated[
        float, Meta(ge=0, description="of the delay to each request that is there")
    ] = 0.02
    step_tokens: Annotated[
        float, Meta(gt=0, description="that an engine computes at once, at most")
    ] = 8192.0
    decode_s: Annotated[
        float, Meta(ge=0, description="seconds that a cache full of active blocks is worth")
    ] = 1.0
    host_rate: Annotated[
        float, Meta(gt=0, description="tokens a second, from the host to the device")
    ] = HOST_RATE
    disk_rate: Annotated[
        float, Meta(gt=0, description="tokens a second, from disk to the device")
    ] = DISK_RATE


def score(rows: Candidates, parameters: TtftParameters) -> Scores:
    """When its first token would come, and what the pick costs other requests.

        cost      = ttft_s + keep (0.5) * prefill_s + crowding (0.6) * crowded_s
                    + stall (0.02) * stalled_s + decode_s (1) * load
        ttft_s    = wait_s + load_s + prefill_s
        wait_s    = until the prompts under way there are computed
        prefill_s = work / rate
        load_s    = from host or disk to the device    (these three: router/policies/first_token.py)
        crowded_s = min(work, step_tokens) / rate  while prompts are under way there, else 0
        stalled_s = active_slots * prefill_s

    All in seconds, of which only differences matter: what all workers hold alike decides nothing.

    ttft_s is this request's own; the other terms are what it does to others. keep: a token that is
    computed although another worker holds it takes the place of one that somebody may ask for, and
    makes a second copy of what one copy was enough for. crowded_s: its tokens join the steps of
    those before it, which become longer. stalled_s: nobody there gets a token while it is computed,
    which is time between tokens and weighs less. load: its own tokens come the slower, and make
    those of others slower, the more of the cache is read in each step. Each weight is one number,
    and with half or double of it the policy does nearly as well.

    Source: ours. The rates of workers that nobody reports of are the configured one, alike.
    """
    first = first_token(rows, parameters.host_rate, parameters.disk_rate)
    at_once_s = np.minimum(first.work, parameters.step_tokens) / first.rate
    crowded_s = np.where(first.wait_s > 0, at_once_s, 0.0)
    stalled_s = np.maximum(rows.active_slots, 0.0) * first.prefill_s
    load = rows.load
    return Scores(
        costs=first.total_s
        + parameters.keep * first.prefill_s
        + parameters.crowding * crowded_s
        + parameters.stall * stalled_s
        + parameters.decode_s * load,
        row_terms={
            "prefill_rate": first.rate,
            "wait_s": first.wait_s,
            "load_s": first.load_s,
            "prefill_s": first.prefill_s,
            "crowded_s": crowded_s,
            "stalled_s": stalled_s,
            "load": load,
        },
        ttft_s=first.total_s,
    )


TTFT = Policy(
    name="ttft",
    summary="seconds to the first token, by learned rates, and what the pick costs others",
    formula="wait_s + load_s + (1 + keep) * prefill_s + crowding * crowded_s"
    " + stall * stalled_s + decode_s * load",
    settings=TtftParameters(),
    function=score,
    timed=True,
)
