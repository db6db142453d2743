"""Policy `ttft`: seconds to the first token, by rates learned from each worker. Ours."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.first_token import DISK_RATE, HOST_RATE, first_token
from router.decide.policies.policy import Parameters, Policy, Scores

FULL_TPOT_S = 0.04
"""Seconds between tokens by which a worker whose KV blocks are all in use is slower than an idle
one, as long as nothing was learned: with 25 tokens, the cost of a full worker is a second."""


class TtftParameters(Parameters, frozen=True):
    """Parameters of `ttft`; the defaults did best over traces in the simulator
    (docs/choose-a-policy.md).
    """

    keep: Annotated[
        float,
        Meta(
            ge=0,
            description="weight of computing again what the pick evicts: 1 counts each evicted"
            " recent token as one token to compute",
        ),
    ] = 1.0
    crowding: Annotated[
        float, Meta(ge=0, description="weight of the delay to prompts that the worker is computing")
    ] = 0.6
    stall: Annotated[
        float, Meta(ge=0, description="weight of the delay to each active request of the worker")
    ] = 0.06
    step_tokens: Annotated[
        float, Meta(gt=0, description="most prompt tokens that an engine computes in one step")
    ] = 8192.0
    tokens: Annotated[
        float,
        Meta(ge=0, description="tokens of the answer whose predicted time counts in the cost"),
    ] = 25.0
    stay_s: Annotated[
        float,
        Meta(ge=0, description="seconds until a running request is expected to free its blocks"),
    ] = 5.0
    host_rate: Annotated[
        float,
        Meta(gt=0, description="tokens a second that are loaded from host memory to the device"),
    ] = HOST_RATE
    disk_rate: Annotated[
        float, Meta(gt=0, description="tokens a second that are loaded from disk to the device")
    ] = DISK_RATE


def score(rows: Candidates, parameters: TtftParameters) -> Scores:
    """Cost in seconds: the time to the request's first token, and the delay to other requests.

        cost      = ttft_s + room_s + keep (1) * evicted_share * prefill_s
                    + crowding (0.6) * crowded_s + stall (0.06) * stalled_s + tokens (25) * tpot_s
        ttft_s    = wait_s + load_s + prefill_s
        wait_s    = until the worker has computed the prompts under way there
        prefill_s = work / rate
        load_s    = from host or disk to the device    (these three: first_token.py)
        room_s    = stay_s (5)  where fewer blocks are free than the prompt needs, else 0
        crowded_s = min(work, step_tokens) / rate  while prompts are under way there, else 0
        stalled_s = active_slots * prefill_s
        tpot_s    = predicted time between tokens (Candidates.tpot_s); FULL_TPOT_S * load for
                    all rows, as long as some row's is unknown
        evicted_share = share of the request's new blocks that have no place beside the worker's
                    working set, from 0 to 1 (Candidates.evicted_share)

    All in seconds, of which only differences matter: what all workers hold alike decides nothing.

    ttft_s and room_s are delays of this request: an engine begins no prompt whose blocks don't fit
    beside those of running requests. The other terms are delays of other requests. evicted_share: a
    token that takes the place of a token used a minute ago will have that token computed again; a
    token that takes a free or an old place costs nothing. So a request that lost its cache on a
    crowded worker goes to a worker with space, and does not evict others' blocks in turn.
    crowded_s: the prompt's tokens join the steps of earlier prompts, which become longer.
    stalled_s: no running request there gets a token while the prompt is computed, a delay between
    tokens, which weighs less. tpot_s: the more requests run there and the more cache they read, the
    slower come the tokens of this request and, because of it, of theirs.

    Source: ours. Workers without reports all have the configured rate.
    """
    first = first_token(rows, parameters.host_rate, parameters.disk_rate)
    at_once_s = np.minimum(first.work, parameters.step_tokens) / first.rate
    crowded_s = np.where(first.wait_s > 0, at_once_s, 0.0)
    stalled_s = np.maximum(rows.active_slots, 0.0) * first.prefill_s
    room_s = np.where(rows.new_blocks > rows.free_blocks, parameters.stay_s, 0.0)
    evicted_share = rows.evicted_share
    tpot_s = rows.tpot_s
    if np.isnan(tpot_s).any():
        tpot_s = FULL_TPOT_S * rows.load
    return Scores(
        costs=first.total_s
        + room_s
        + parameters.keep * evicted_share * first.prefill_s
        + parameters.crowding * crowded_s
        + parameters.stall * stalled_s
        + parameters.tokens * tpot_s,
        row_terms={
            "prefill_rate": first.rate,
            "wait_s": first.wait_s,
            "load_s": first.load_s,
            "prefill_s": first.prefill_s,
            "room_s": room_s,
            "evicted_share": evicted_share,
            "crowded_s": crowded_s,
            "stalled_s": stalled_s,
            "tpot_s": tpot_s,
        },
        ttft_s=first.total_s,
    )


TTFT = Policy(
    name="ttft",
    summary="seconds to the first token, by learned rates, and what the pick costs others",
    formula="wait_s + load_s + room_s + (1 + keep * evicted_share) * prefill_s"
    " + crowding * crowded_s + stall * stalled_s + tokens * tpot_s",
    settings=TtftParameters(),
    function=score,
    timed=True,
)
