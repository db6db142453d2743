"""The results of a run, request by request, and their aggregates. Pure.

A world fills a `RunResult`; `aggregate` makes the numbers for reports. Durations are in virtual
seconds, as the request's client sees them. Values that don't exist are NaN (a failed request has no
first token, an answer of one token no time between tokens), and NaN takes part in no mean.

Law: requests = served + failed + shed, in every result and in every part of one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NOTHING_COUNTS = "the warm-up takes all requests: none is left to count"
"""The error for a run that can't be measured."""

NO_WORKER = -1
"""Value in `RunResult.worker`: no worker was ever picked."""


class Outcome(IntEnum):
    """How a request ended."""

    SERVED = 0
    FAILED = 1
    """Refused by router or engine, or lost with its worker."""
    SHED = 2
    """Turned away by the router for lack of capacity."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run."""

    total: int
    done: int
    """Requests served, failed and shed."""
    failed: int
    in_flight: int
    block_hit_rate: float
    """Block hit rate of the requests served so far."""


OnProgress = Callable[[RunProgress], None]


@dataclass(frozen=True, slots=True)
class ShadowResult:
    """A shadow policy's choices for the same decisions."""

    decisions: int
    agreements: int
    """Decisions in which its cheapest workers include the picked worker."""
    predicted_tokens_more: int
    """Tokens of usable overlap of its own choices, less those of the picks, summed; of tied
    choices, the mean."""
    predicted_s_sooner: float
    """Sum of the seconds by which first tokens would have come sooner, by the router's rates."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """Arrays with a value for each request of a run, in the order of the trace; shape
    (requests,)."""

    arrival_s: Floats
    """Seconds from the start of the run until the client sent the request."""
    queue_s: Floats
    """Seconds from arrival to the first step that computed part of it, with the wait in the
    router."""
    ttft_s: Floats
    """Seconds from arrival to the first token."""
    itl_s: Floats
    """Mean time between its tokens: (last token - first token) / (output tokens - 1)."""
    e2e_s: Floats
    """Seconds from arrival to the last token, or to the failure."""
    prompt_tokens: Integers
    cached_tokens: Integers
    """Tokens in the worker's cache, any tier, when first admitted; at most prompt_tokens - 1."""
    output_tokens: Integers
    """Output tokens received."""
    worker: Integers
    """Index of the worker that served it; of a pair, the prefill worker."""
    preemptions: Integers
    """Times that its engine sent it back to the queue."""
    outcome: Integers
    """`Outcome` of each request."""
    predicted_tokens: Integers
    """Cached tokens that the router expected at the last pick; 0: no pick."""
    losses: Integers
    """Times that its worker died."""
    wait_s: Floats
    """Seconds from arrival to the last pick for its prompt."""
    waits: Integers
    """Times that a router's queue took the request in."""
    ttft_slo_s: Floats
    """TTFT that the request itself asks for; NaN: none."""
    tpot_slo_s: Floats
    """Mean time between tokens that the request itself asks for; NaN: none."""
    deadline_s: Floats
    """Seconds from arrival to its deadline; NaN: none."""

    @classmethod
    def unknown(cls, count: int) -> "Columns":
        """The columns of `count` requests of which none has arrived."""
        values: dict[str, Any] = {
            column.name: np.full(count, np.nan)
            if column.type == Floats
            else np.zeros(count, np.int64)
            for column in fields(cls)
        }
        values["worker"][:] = NO_WORKER
        values["outcome"][:] = Outcome.FAILED
        return cls(**values)


@dataclass(frozen=True, eq=False)
class RunResult(Columns):
    """One policy's run of one trace."""

    policy: str
    order: str
    """Order of the router's queue."""
    workers: Sequence[str]
    """Worker ids; `worker` has indexes into them."""
    block_size: int

    sampled_s: Integers
    """The full seconds with requests in flight, in order; shape (samples,)."""
    in_flight: Integers
    """Requests at each worker in each of these seconds; shape (samples, workers)."""
    waiting: Integers
    """Requests in each worker's queue, by its last heartbeat; shape (samples, workers)."""
    used_blocks: Integers
    """Blocks held by requests, by the worker's last heartbeat; shape (samples, workers)."""

    wall_s: float
    """Wall time of the run."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Name -> count: other counters of the fleet, such as `copies` of hot prefixes."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Reason -> failed requests; adds up to all failed requests."""

    shadows: Mapping[str, ShadowResult] = field(default_factory=dict)
    digest: int = 0
    """Digest of all decisions and results, in order: equal for equal seeds."""

    @property
    def request_count(self) -> int:
        return len(self.arrival_s)

    @property
    def seconds(self) -> int:
        """Seconds of the run, up to the last sample."""
        return int(self.sampled_s.max(initial=-1)) + 1

    @property
    def prompt_blocks(self) -> Integers:
        """Full blocks of each prompt."""
        return self.prompt_tokens // self.block_size

    @property
    def cached_blocks(self) -> Integers:
        return self.cached_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles in one unit; all NaN when there was nothing to measure."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Slo:
    """The bounds, in seconds, within which a served request counts as good; None: no bound."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Aggregates:
    """The numbers of a run, over the requests that count (those after the warm-up)."""

    policy: str
    order: str
    requests: int
    """Requests that count: served + failed + shed."""
    served: int
    failed: int
    shed: int
    block_hit_rate: float
    """Cached / full prompt blocks of the requests served; 0 without any."""
    token_hit_rate: float
    """Cached / all prompt tokens of the requests served."""
    ttft_ms: Distribution
    wait_ms: Distribution
    """Milliseconds from arrival to the router's pick."""
    queue_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    load_cv: float
    """Std / mean over workers of the requests in flight, averaged over the times with any; 0 is
    even."""
    goodput_rps: float
    """Requests served within the SLO / seconds from the first arrival to the last end."""
    goodput_share: float
    """Requests served within the SLO / all requests that count."""
    queued: int
    """Requests that a router's queue took in, once or more often."""
    queue_timeouts: int
    """Waits in a router's queue that ended without a worker, in the whole run."""
    queue_full: int
    """Refusals by a full queue in the whole run, displaced requests included."""
    preemptions: int
    copies: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Requests that are run but not counted: those that arrive before `until_s` of the run's time,
    and the first `requests` of the trace."""

    until_s: float = 0.0
    requests: int = 0

    def counted(self, run: RunResult) -> Mask:
        """Which requests count; a request that was never sent doesn't."""
        return (run.arrival_s >= self.until_s) & (np.arange(run.request_count) >= self.requests)


def aggregate(
    run: RunResult, *, warm_up: WarmUp | None = None, slo: Slo | None = None
) -> Aggregates:
    """The numbers of a run. Load is counted from the first counted request on."""
    counted = (warm_up or WarmUp()).counted(run)
    served = counted & (run.outcome == Outcome.SERVED)
    counts = np.bincount(run.outcome[counted], minlength=len(Outcome))
    begin_s = float(run.arrival_s[counted].min()) if counted.any() else np.inf
    good = is_good(run, slo or Slo()) & counted
    return Aggregates(
        policy=run.policy,
        order=run.order,
        requests=int(counted.sum()),
        served=int(counts[Outcome.SERVED]),
        failed=int(counts[Outcome.FAILED]),
        shed=int(counts[Outcome.SHED]),
        block_hit_rate=share(run.cached_blocks[served], run.prompt_blocks[served]),
        token_hit_rate=share(run.cached_tokens[served], run.prompt_tokens[served]),
        ttft_ms=distribution(1e3 * run.ttft_s[served]),
        wait_ms=distribution(1e3 * run.wait_s[served]),
        queue_ms=distribution(1e3 * run.queue_s[served]),
        itl_ms=distribution(1e3 * run.itl_s[served]),
        e2e_ms=distribution(1e3 * run.e2e_s[served]),
        load_cv=load_cv(run.in_flight[run.sampled_s >= begin_s]),
        goodput_rps=_goodput_rps(run, counted, good),
        goodput_share=int(good.sum()) / max(1, int(counted.sum())),
        queued=int((run.waits[counted] > 0).sum()),
        queue_timeouts=run.counters.get("queue_timeouts", 0),
        queue_full=run.counters.get("queue_full", 0),
        preemptions=int(run.preemptions[counted].sum()),
        copies=run.counters.get("copies", 0),
        wall_s=run.wall_s,
    )


def share(part: Integers, whole: Integers) -> float:
    """sum(part) / sum(whole); 0 if the whole is 0."""
    total = int(whole.sum())
    return int(part.sum()) / total if total else 0.0


def distribution(values: Floats) -> Distribution:
    """Mean and percentiles (linear between neighbours) of the values that are not NaN."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Distribution(np.nan, np.nan, np.nan, np.nan)
    p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    return Distribution(float(known.mean()), p50, p90, p99)


def load_cv(in_flight: Integers) -> float:
    """Unevenness of load: std / mean over workers, averaged over the samples with any load.
    in_flight: requests, shape (samples, workers)."""
    if not in_flight.size:
        return 0.0
    means = in_flight.mean(axis=1)
    busy = means > 0
    if not busy.any():
        return 0.0
    return float((in_flight[busy].std(axis=1) / means[busy]).mean())


def is_good(run: RunResult, slo: Slo) -> Mask:
    """Which requests were served within the SLO, and within their own TTFT, time between
    tokens and deadline."""
    good: Mask = run.outcome == Outcome.SERVED
    if slo.ttft_s is not None:
        good &= run.ttft_s <= slo.ttft_s
    if slo.itl_s is not None:
        good &= np.isnan(run.itl_s) | (run.itl_s <= slo.itl_s)
    good &= ~(run.itl_s > run.tpot_slo_s)  # an answer of one token has no time between tokens
    for took_s, own_s in ((run.ttft_s, run.ttft_slo_s), (run.e2e_s, run.deadline_s)):
        good &= np.isnan(own_s) | (took_s <= own_s)
    return good


def _goodput_rps(run: RunResult, counted: Mask, good: Mask) -> float:
    ends = (run.arrival_s + run.e2e_s)[counted]
    ends = ends[~np.isnan(ends)]
    if not len(ends):
        return 0.0
    span_s = float(ends.max() - run.arrival_s[counted].min())
    return int(good.sum()) / span_s if span_s > 0 else 0.0
