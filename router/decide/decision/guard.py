"""The guard: moves a pick from a worker whose queue costs more than its cache saves. Pure.

A cost function may send every request that shares a prefix to the one worker that holds it, however
long the queue is there. The guard computes for each worker, in tokens:

    ahead = prefill_tokens_active + request_tokens * active_slots   work in front of the request
    wait  = ahead + COMPUTED (2) * new_tokens - INVESTED (2.2) * invested_tokens

New tokens count twice, since the requests that come after wait for them, too: a session that leaves
its cache for a wait that is a little shorter costs the fleet what it computes again. Invested
tokens, computed for later prompts, too (router/fleet/shared_prefixes.py), are taken off a little
more than twice (docs/decisions.md says why), so that a wait may be below 0. least_wait and
least_slots are the least of workers that can be picked. The guard passes over workers where both

    wait         > least_wait + margin * prompt_tokens
    active_slots > least_slots

hold. The pick is the cheapest of the others, by the policy's own cost. Consistent hashing with
bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016) also goes on to the next worker from one that
has more than its share of the load; there the load is a count of requests, here it is weighed
against what the cache saves.

Laws:
- a worker that can't be picked is never moved to, and the shortest wait is never passed over;
- where all workers have the same number of requests, no pick changes;
- given the costs, a worker whose wait or requests rise is never moved to because of that.
"""

from dataclasses import dataclass

import numpy as np

from router.config.settings.routing_settings import GuardSettings
from router.decide.policies.candidates import Candidates
from router.fleet.table import Column, Flags, least

COMPUTED, INVESTED = 2.0, 2.2
"""Weights of new and of invested tokens in a wait, by measurement (docs/decisions.md)."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The guard's input: numbers of each row, and their least over the rows that can be picked."""

    settings: GuardSettings
    prompt_tokens: int
    requests: Column
    """active_slots, at least 0."""
    tokens: Column
    """The wait of each row, in tokens; see the module."""
    least_requests: float
    least_tokens: float

    @classmethod
    def of(cls, rows: Candidates, can: Flags | None, settings: GuardSettings) -> "Waits":
        """Reads the input from candidates. can: True for each row that can be picked, at least one;
        None: all.
        """
        requests = np.maximum(rows.active_slots, 0.0)
        tokens = settings.request_tokens * requests
        tokens += rows.prefill_tokens_active
        tokens += COMPUTED * rows.new_tokens - INVESTED * rows.invested_tokens
        able = (requests, tokens) if can is None else (requests[can], tokens[can])
        return cls(settings, rows.prompt_tokens, requests, tokens, least(able[0]), least(able[1]))

    @property
    def margin_tokens(self) -> float:
        return self.settings.margin * self.prompt_tokens

    @property
    def passed_over(self) -> Flags:
        """True for each row from which the guard moves a pick away."""
        longer: Flags = self.tokens > self.least_tokens + self.margin_tokens
        return longer & (self.requests > self.least_requests)


def kept(rows: Candidates, can: Flags, settings: GuardSettings) -> Flags:
    """True for each row that can be picked and that the guard does not pass over."""
    return can & ~Waits.of(rows, can, settings).passed_over if can.any() else can


@dataclass(frozen=True, slots=True)
class Guarded:
    """A pick that the guard moved."""

    cheapest: int
    """The row that would have been picked without the guard: by its cost, or drawn by chances."""
    waits: Waits
