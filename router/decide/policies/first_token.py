"""Predicted time to a request's first token at each worker, from measured rates."""

from typing import NamedTuple

import numpy as np

from router.decide.policies.candidates import Candidates
from router.fleet.rates import work
from router.fleet.table import Column

HOST_RATE = 400_000.0
"""Tokens a second from the host's memory to the device: 128 KiB a token over 50 GB/s."""
DISK_RATE = 80_000.0
"""Tokens a second from disk to the device: 128 KiB a token over 10 GB/s."""


class FirstToken(NamedTuple):
    """The terms of the prediction, a column each: tokens of work, tokens a second, and seconds."""

    work: Column
    rate: Column
    wait_s: Column
    load_s: Column
    prefill_s: Column

    @property
    def total_s(self) -> Column:
        """Seconds from the pick to the first token."""
        seconds: Column = self.wait_s + self.load_s + self.prefill_s
        return seconds


def first_token(
    rows: Candidates, host_rate: float = HOST_RATE, disk_rate: float = DISK_RATE
) -> FirstToken:
    """Predicts for each row the seconds of queue, cache load and computation.

    wait_s    = until the worker has computed the prompts under way there, and a prompt of mean
                length for each request that others have waiting there
    load_s    = host_tokens / host_rate + disk_tokens / disk_rate, never more than the time to
                compute them again
    prefill_s = work / rate, as router/fleet/rates.py counts and measures
    """
    prefill = rows.prefill
    todo = np.asarray(work(rows.new_tokens, rows.prompt_tokens))
    unseen = np.maximum(rows.prefill_tokens_active - prefill.tokens, 0.0)
    others = rows.others_waiting * prefill.mean_work
    return FirstToken(
        work=todo,
        rate=prefill.rate,
        wait_s=prefill.wait_s + (unseen + others) / prefill.rate,
        load_s=rows.host_tokens / np.maximum(host_rate, prefill.rate)
        + rows.disk_tokens / np.maximum(disk_rate, prefill.rate),
        prefill_s=todo / prefill.rate,
    )
