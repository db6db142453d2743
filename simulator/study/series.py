"""The data of a comparison's pictures, as arrays of bounded size. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.traffic.results import Floats, Integers, Outcome, RunResult, distribution
from simulator.traffic.trace import Trace

SPANS = 40
"""Parts of a run's time: enough to show changes, few enough for steady values."""
QUANTILES = 200
"""Points of a distribution's curve."""
CELLS_MAX = 400
"""Most columns of a heat map, a column a second; in a longer run a column has the highest value of
several seconds."""
GROUPS_MAX = 12
"""Groups of requests that are shown apart: the largest ones. The others are one group."""
OTHERS = "all others"


def time_edges(arrival_s: Floats) -> Floats:
    """The SPANS + 1 edges of equal parts of the time in which requests arrive, in s."""
    last_s = float(np.nanmax(arrival_s, initial=0.0))
    return np.linspace(0.0, max(last_s, 1e-9), SPANS + 1)


def hit_rates_over_time(run: RunResult, cached_blocks: Integers, edges_s: Floats) -> Floats:
    """Block hit rate of the requests served that arrived between an edge and the next, for each
    such span; NaN for a span without requests. cached_blocks: of each request."""
    served = run.outcome == Outcome.SERVED
    arrival_s = run.arrival_s[served]
    cached, _ = np.histogram(arrival_s, edges_s, weights=cached_blocks[served])
    blocks, _ = np.histogram(arrival_s, edges_s, weights=run.prompt_blocks[served])
    rates = np.full(len(blocks), np.nan)
    np.divide(cached, blocks, out=rates, where=blocks > 0)
    return rates


def quantiles(values: Floats) -> Floats:
    """QUANTILES evenly spaced quantiles of the values, from the least to the greatest; NaN is left
    out. Empty without values."""
    known = values[~np.isnan(values)]
    return np.quantile(known, np.linspace(0.0, 1.0, QUANTILES)) if len(known) else known


def load_by_worker(run: RunResult) -> Integers:
    """Requests at each worker, shape (workers, spans): CELLS_MAX spans at most, each with the most
    requests of its seconds."""
    spans = min(run.seconds, CELLS_MAX)
    most = np.zeros((spans, len(run.workers)), np.int64)
    np.maximum.at(most, run.sampled_s * spans // max(run.seconds, 1), run.in_flight)
    return most.T


def groups_of(trace: Trace) -> tuple[str, Sequence[str]]:
    """What groups a trace's requests, and the group of each request: "tenant" if tenants differ,
    else "priority" if priorities differ, else "" with all requests in one group."""
    tenants = [request.tenant or "(no tenant)" for request in trace.requests]
    if len(set(tenants)) > 1:
        return "tenant", tenants
    priorities = [f"priority {request.priority or 0}" for request in trace.requests]
    if len(set(priorities)) > 1:
        return "priority", priorities
    return "", ["all requests"] * len(trace.requests)


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a group's requests waited for a first token, in seconds."""

    group: str
    requests: int
    p50_s: float
    p90_s: float
    in_router_s: float
    """Mean wait in the router before a pick."""
    unserved: int
    """Requests that failed or were shed."""


def waits_by_group(run: RunResult, groups: Sequence[str]) -> list[Waits]:
    """The waits of the largest groups, by name, and of all other groups as one. NaN: no request of
    the group was served."""
    names, numbers, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) > GROUPS_MAX:
        largest = np.sort(np.argsort(-counts, kind="stable")[: GROUPS_MAX - 1])
        place = np.full(len(names), len(largest))
        place[largest] = np.arange(len(largest))
        names, numbers = np.append(names[largest], OTHERS), place[numbers]
    served = run.outcome == Outcome.SERVED
    rows = []
    for number, name in enumerate(names):
        mine = numbers == number
        first_s = distribution(run.ttft_s[mine & served])
        in_router_s = distribution(run.wait_s[mine & served])
        unserved = int((mine & ~served).sum())
        rows.append(
            Waits(str(name), int(mine.sum()), first_s.p50, first_s.p90, in_router_s.mean, unserved)
        )
    return rows
