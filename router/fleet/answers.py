"""Counts the times, lengths and objectives of answers, by the model and role of workers. Pure.

The first token of a pair counts for its prefill worker, all else for its decode worker. A number is
counted when the caller reports it: the time to the first token with PREFILL_DONE, the length with
FINISHED, and with it the time between tokens, if that is measured (router/fleet/token_times.py).

Law: POOLS_MAX combinations of model and role are counted apart, those that have an answer first;
all others are counted together.
"""

from dataclasses import dataclass, field

from events.plane.facts import Heartbeat
from router.fleet.histogram import Histogram
from router.fleet.reservations.reservations import Reservation

POOLS_MAX = 64
OTHER_POOL = ("other", "other")
"""Model and role, in metrics, of all combinations past POOLS_MAX together."""
LENGTHS = tuple(1 << power for power in range(4, 20))
"""Upper bounds of the buckets of answers' lengths, in tokens: 16 to 524,288."""
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TPOT_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


@dataclass(slots=True)
class PoolAnswers:
    """Counts of the answers of the workers of one model and role."""

    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_S))
    """Seconds from arrivals to first tokens, waits in the queue included."""
    tpot_s: Histogram = field(default_factory=lambda: Histogram(TPOT_S))
    """Mean seconds between the tokens of answers."""
    tokens: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    ttft_objectives: list[int] = field(default_factory=lambda: [0, 0])
    """Requests that missed, and that kept, their objective for the time to the first token."""
    tpot_objectives: list[int] = field(default_factory=lambda: [0, 0])
    """Requests that missed, and that kept, their objective for the time between tokens."""


class Answers:
    """Counts of the answers of all models and roles since the router's start."""

    def __init__(self) -> None:
        self.by_pool = {OTHER_POOL: PoolAnswers()}

    def on_first(self, worker: Heartbeat, reservation: Reservation, now_s: float) -> None:
        """Counts a first token. worker: heartbeat of the worker that computed the prompt."""
        pool, objective = self._of(worker), reservation.objective
        pool.ttft_s.add(now_s - reservation.opened_at_s + reservation.waited_s)
        if objective is not None and objective.ttft_s is not None:
            pool.ttft_objectives[now_s <= objective.due_s] += 1

    def on_finished(
        self, worker: Heartbeat, reservation: Reservation, tpot_s: float | None
    ) -> None:
        """Counts a finished answer. worker: heartbeat of its worker. tpot_s: mean seconds between
        its tokens; None: not measured."""
        pool, objective = self._of(worker), reservation.objective
        if reservation.output_tokens:
            pool.tokens.add(reservation.output_tokens)
        if tpot_s is not None:
            pool.tpot_s.add(tpot_s)
            if objective is not None and objective.tpot_s is not None:
                pool.tpot_objectives[tpot_s <= objective.tpot_s] += 1

    def _of(self, worker: Heartbeat) -> PoolAnswers:
        name = worker.model, worker.role
        pool = self.by_pool.get(name)
        if pool is None:
            if len(self.by_pool) > POOLS_MAX:
                return self.by_pool[OTHER_POOL]
            pool = self.by_pool[name] = PoolAnswers()
        return pool
