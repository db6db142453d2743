"""The core of `kvroute demo`: replays a trace on stand-in engines and measures the results.

Requests arrive at the trace's times, whether or not earlier requests are done (open loop). Workers
are picked through the `Routing` protocol. Times are engine time, so the clock's speed cancels out;
only decisions are measured in wall time, since they come from a real router.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from rich.table import Table

from kvroute.v1 import FailureReason, Progress, ProgressState
from simulator.engines.profile import load_profile
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import Clock, sleep_until
from simulator.live.engine import Completion, Engine, EngineConfig
from simulator.traffic.results import Distribution, OnProgress, RunProgress, distribution
from simulator.traffic.reuse import reuse_ceiling
from simulator.traffic.trace import TraceRequest
from simulator.traffic.trace_file import load_trace

ENGINE_COUNT = 8
BLOCK_SIZE = 64
BLOCK_COUNT = 2048
SPEED = 2.5
"""Engine seconds to a wall second."""
COMPRESSION = 10.0
"""Factor of the arrival rate: the slice, which has only a part of the requests, gets the token rate
of the whole trace, 41,000 tokens/s."""


class Pick(NamedTuple):
    """The router's answer for one request."""

    worker_id: str
    reservation_id: str
    decision_s: float
    """Wall time from request to answer."""


class Routing(Protocol):
    """The router, as the demo's client sees it. Any exception counts as a failed request."""

    async def pick(self, request: TraceRequest) -> Pick: ...

    async def report(self, progress: Progress) -> None: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """One policy's results on the trace."""

    policy: str
    requests: int
    """All requests sent, also failed requests."""
    failed: int
    block_hit_rate: float
    """Cached blocks by the engines' own count / full prompt blocks, over requests served."""
    ceiling: float
    """Block hit rate of a single infinite cache that all workers share."""
    ttft_ms: Distribution
    load_cv: float
    """Std / mean over workers of the requests in flight, averaged over the run; 0 is even."""
    decision_us: Distribution
    failures: Mapping[str, int]
    """Reason -> requests."""


def demo_trace() -> Sequence[TraceRequest]:
    """The slice that ships with the project, at the arrival rate of the whole trace."""
    return load_trace("conversation").spread().at_rate(COMPRESSION).requests


def demo_engines() -> list[EngineConfig]:
    """Eight engines, a 70B model on four H100 each, with a cache far too small for the traffic."""
    scheduler = SchedulerConfig(
        block_count=BLOCK_COUNT,
        block_size=BLOCK_SIZE,
        joined_steps_max=32,
        cost=load_profile("llama-70b-4xh100").cost_model(),
    )
    # A seed for each engine: engines of a fleet have different hashes of the same block.
    return [
        EngineConfig(f"worker-{i}", replace(scheduler, hash_seed=i + 1))
        for i in range(ENGINE_COUNT)
    ]


class _Tally:
    """Counts the requests, cached blocks and latencies of a run."""

    def __init__(self, workers: Sequence[str], block_size: int) -> None:
        self._block_size = block_size
        self.sent = self.served = self.hit_blocks = self.prompt_blocks = 0
        self.ttft_s: list[float] = []
        self.decision_s: list[float] = []
        self.in_flight_s = dict.fromkeys(workers, 0.0)
        """Worker -> seconds that requests spent there; divided by the run's length, it is their
        mean number in flight (Little's law)."""
        self.failures: Counter[str] = Counter()

    def serve(self, worker_id: str, completion: Completion) -> None:
        self.served += 1
        self.hit_blocks += completion.cached_tokens // self._block_size
        self.prompt_blocks += completion.prompt_tokens // self._block_size
        self.ttft_s.append(completion.ttft_s)
        self.in_flight_s[worker_id] += completion.e2e_s

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    def progress(self, total: int) -> RunProgress:
        done = self.served + self.failed
        return RunProgress(total, done, self.failed, self.sent - done, self.block_hit_rate)


async def replay(
    policy: str,
    trace: Sequence[TraceRequest],
    engines: Mapping[str, Engine],
    routing: Routing,
    *,
    clock: Clock,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """Sends a trace's requests through `routing` to the engines, until all have ended.

    clock: the engines' own; arrivals follow it. engines: by worker id, all of one block size.
    A request that router or engine refuses counts as failed, and the run goes on.
    Raises ValueError when there are no engines or their block sizes differ.
    """
    sizes = {engine.config.scheduler.block_size for engine in engines.values()}
    if len(sizes) != 1:
        raise ValueError(f"engines must have one block size, got {sorted(sizes)}")
    block_size = sizes.pop()
    tally = _Tally(list(engines), block_size)

    async def serve(request: TraceRequest) -> None:
        try:
            await _serve(request, engines, routing, tally)
        except Exception as error:  # any error of the router's client
            tally.failures[f"{type(error).__name__}: {error}"] += 1
        if on_progress is not None:
            on_progress(tally.progress(len(trace)))

    start_s = clock.now_s()
    async with asyncio.TaskGroup() as tasks:
        for request in trace:
            await sleep_until(clock, start_s + request.arrival_s)
            tally.sent += 1
            tasks.create_task(serve(request))
    loads = np.array(list(tally.in_flight_s.values()))
    return RunResult(
        policy=policy,
        requests=len(trace),
        failed=tally.failed,
        block_hit_rate=tally.block_hit_rate,
        ceiling=reuse_ceiling(trace, block_size).blocks,
        ttft_ms=distribution(1e3 * np.array(tally.ttft_s or [0.0])),
        load_cv=float(loads.std() / loads.mean()) if loads.any() else 0.0,
        decision_us=distribution(1e6 * np.array(tally.decision_s or [0.0])),
        failures=dict(tally.failures),
    )


async def _serve(
    request: TraceRequest, engines: Mapping[str, Engine], routing: Routing, tally: _Tally
) -> None:
    """Serves one request as a client would: picks a worker, sends the request to its engine,
    reports its first token and its end. Raises the errors of router and engine."""
    pick = await routing.pick(request)
    tally.decision_s.append(pick.decision_s)
    report = partial(Progress, reservation_id=pick.reservation_id)
    first_token = asyncio.Event()

    async def report_first_token() -> None:
        await first_token.wait()
        await routing.report(report(state=ProgressState.PROGRESS_STATE_PREFILL_DONE))

    reporting = asyncio.create_task(report_first_token())
    try:
        completion = await engines[pick.worker_id].complete(
            request.token_ids(), request.output_tokens, on_first_token=first_token.set
        )
        await reporting
    except Exception:
        reason = FailureReason.FAILURE_REASON_WORKER
        await routing.report(
            report(state=ProgressState.PROGRESS_STATE_FAILED, failure_reason=reason)
        )
        raise
    finally:
        reporting.cancel()
    await routing.report(
        report(
            state=ProgressState.PROGRESS_STATE_FINISHED,
            output_tokens=len(completion.token_ids),
            cached_tokens=completion.cached_tokens,
        )
    )
    tally.serve(pick.worker_id, completion)


def table(runs: Sequence[RunResult]) -> Table:
    """A table with a column for each run and one for the ceiling, and the verdict below. Two runs
    fit into 80 columns."""
    result = Table(title="The same traffic, each policy from a cold start", caption=verdict(runs))
    result.add_column("")
    for run in runs:
        result.add_column(run.policy, justify="right")
    result.add_column("best possible", justify="right")
    ceiling = runs[0].ceiling if runs else 0.0
    rows: list[tuple[str, Callable[[RunResult], str], str]] = [
        ("prefix hit rate", lambda run: f"{run.block_hit_rate:.1%}", f"{ceiling:.1%}"),
        ("  of the best possible", lambda run: f"{_of_ceiling(run):.0%}", "100%"),
        ("time to first token, mean", lambda run: f"{run.ttft_ms.mean:,.0f} ms", ""),
        ("  p50", lambda run: f"{run.ttft_ms.p50:,.0f} ms", ""),
        ("  p99", lambda run: f"{run.ttft_ms.p99:,.0f} ms", ""),
        ("spread of load (std / mean)", lambda run: f"{run.load_cv:.2f}", "0.00"),
        ("decision, p50", lambda run: f"{run.decision_us.p50:,.0f} us", ""),
        ("  p99", lambda run: f"{run.decision_us.p99:,.0f} us", ""),
        ("requests", lambda run: f"{run.requests}", ""),
        ("  failed", lambda run: f"{run.failed}", "0"),
    ]
    for name, cell, best in rows:
        result.add_row(name, *map(cell, runs), best)
    return result


def verdict(runs: Sequence[RunResult]) -> str:
    """A sentence on the gain of the last run over the first; empty for a single run."""
    if len(runs) < 2:
        return ""
    first, last = runs[0], runs[-1]
    sooner = 1 - last.ttft_ms.mean / first.ttft_ms.mean if first.ttft_ms.mean else 0.0
    when = f"{abs(sooner):.0%} {'sooner' if sooner >= 0 else 'later'}"
    return (
        f"{last.policy} reused {last.block_hit_rate:.1%} of all prompt blocks, {first.policy} "
        f"{first.block_hit_rate:.1%}, of {last.ceiling:.1%} that can be reused at most; the first "
        f"token came {when} on average."
    )


def to_json(runs: Sequence[RunResult]) -> str:
    """The results of the runs as JSON."""
    return msgspec.json.format(msgspec.json.encode({"runs": runs})).decode()


def _of_ceiling(run: RunResult) -> float:
    return run.block_hit_rate / run.ceiling if run.ceiling else 1.0
