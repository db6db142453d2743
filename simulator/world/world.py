"""A fleet in virtual time: the router's real core, real facts, simulated engines, a trace.

    trace -> Clients -> VirtualRouter (RouterCore, FleetView, index) -> VirtualEngine (a scheduler)
                            ^ facts, beats, heartbeats, late as over a network |
                            +-- VirtualNetwork <-------- VirtualRelay <--------+

Nothing awaits, and no part reads a clock: time jumps from one timed call to the next. Engines are
brought up to date just before each decision, so that the router sees all events that would have
arrived by then.

Laws:
- requests: arrived = served + failed + shed + in flight;
- equal seeds give equal logs: `RunResult.digest`;
- a decision sees no event before it could have arrived.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from events.feed.stream import StreamState
from router.decide.copies.copies import Cancel, Copy, CopyFate
from router.decide.copies.hot_prefixes import HotPrefixes
from simulator.engines.content import ChainContent
from simulator.engines.cost_model import Distance
from simulator.engines.scheduler import Output, RequestRefused, Submission
from simulator.traffic.results import OnProgress, RunResult
from simulator.traffic.trace import Trace
from simulator.world.clients import Clients
from simulator.world.laws import Laws
from simulator.world.options import Failure, RelayRestart, RunOptions
from simulator.world.run_record import Happened, RunRecord
from simulator.world.timeline import Timeline
from simulator.world.virtual_engine import VirtualEngine
from simulator.world.virtual_fleet import VirtualFleet, Worker

TICK_S = 1.0
SETTLE_S = 45.0
"""Seconds played after the last request and the last fault: workers forgotten after 30 s have
returned by then."""


def run(options: RunOptions, trace: Trace, on_progress: OnProgress | None = None) -> RunResult:
    """Plays a trace to its end. on_progress: called every virtual second, and at the end."""
    return World(options, trace, on_progress).run()


def _serving(options: RunOptions, trace: Trace) -> RunOptions:
    """The options with engines that serve all models and LoRAs of the trace."""
    models = {request.model for request in trace.requests if request.model is not None}
    loras = {request.lora_name for request in trace.requests if request.lora_name is not None}
    scheduler = options.scheduler
    if loras:
        names = tuple(sorted(loras.union(scheduler.lora_names)))
        scheduler = replace(scheduler, lora_names=names)
    return replace(options, scheduler=scheduler, models=tuple(sorted(models.union(options.models))))


class World:
    """One run of a trace on a fleet."""

    def __init__(
        self, options: RunOptions, trace: Trace, on_progress: OnProgress | None = None
    ) -> None:
        self.options = options = _serving(options, trace)
        self.timeline = Timeline()
        self.record = RunRecord(
            len(trace.requests), options.workers * options.ranks, options.scheduler.block_size
        )
        self.clients = Clients(self.timeline, options, trace, self.record)
        self.fleet = VirtualFleet(
            self.timeline,
            options,
            self.record,
            on_output=self._on_output,
            on_engine_died=self._on_engine_died,
        )
        self.laws = Laws(self.fleet, self.clients, self.record) if options.check else None
        self.fleet.witness = self.laws or self.fleet.witness
        self._on_progress = on_progress
        self._copies: dict[str, Callable[[bool], None]] = {}
        """Request id of a copy under way -> callback with its success"""
        self._copy_count = 0

    def run(self) -> RunResult:
        """Plays the whole trace."""
        started = time.perf_counter()  # the run's own cost, for the report only
        self.fleet.start()
        self.timeline.every(TICK_S, 0.0, self._tick)
        self.clients.start(self.fleet)
        while self.record.ended < self.record.request_count:
            self.timeline.step()
        self._count()
        if self._on_progress is not None:
            self._on_progress(self.record.progress())
        wall_s = time.perf_counter() - started
        if self.laws is not None:
            self._settle(self.laws)
        names = [str(worker.key) for worker in self.fleet.workers]
        return self.record.result(self.options, names, self.clients.shadows, wall_s)

    def copy_prefix(
        self,
        names: Sequence[int],
        worker: Worker,
        distance: Distance,
        on_done: Callable[[bool], None],
    ) -> None:
        """Puts a prefix into a worker's cache, as if from an engine at this distance, which sets
        the time of the transfer.

        names: PrefixHashes of full blocks, from the root on. The worker's engine gets a prompt of
        these blocks, fetches the blocks that it lacks, and generates one token. on_done: called
        with True, or with False if the engine refused the request or died.
        """
        self._copy_count += 1
        request_id = f"copy-{self._copy_count}"
        if not worker.engine.up:
            on_done(False)
            return
        tokens = len(names) * self.options.scheduler.block_size
        submission = Submission(
            request_id=request_id,
            content=ChainContent(list(names), request_id),
            prompt_tokens=tokens + 1,
            output_tokens=1,
            dp_rank=worker.rank if worker.engine.ranks > 1 else None,
            remote_tokens=tokens,
            remote_distance=distance,
        )
        try:
            self.fleet.submit(worker, submission)
        except RequestRefused:
            on_done(False)
            return
        self._copies[request_id] = on_done
        self.record.note(Happened.COPIED, self.timeline.now_s, worker.index, tokens)

    def _on_output(self, output: Output) -> None:
        done = self._copies.pop(output.sequence.request_id, None)
        if done is None:
            self.clients.on_output(output)
            return
        self.record.counters["copies"] += 1
        done(True)

    def _on_engine_died(self, engine: VirtualEngine) -> None:
        self.clients.on_engine_died(engine)
        sequences = (*engine.scheduler.running(), *engine.scheduler.waiting())
        there = {sequence.request_id for sequence in sequences}
        for request_id in [request_id for request_id in self._copies if request_id in there]:
            self._copies.pop(request_id)(False)

    def _tick(self) -> None:
        now_s, workers = self.timeline.now_s, self.fleet.workers
        for router in self.fleet.routers:
            router.tick(now_s)
            self.fleet.network.reserved(router)
            if router.hot.enabled:
                self._copy_hot_prefixes(router.hot)
        if self.laws is not None:
            self.laws.on_tick(now_s)
        if self.clients.lives:
            self.record.sample(
                ceil(now_s),
                [worker.in_flight for worker in workers],
                [worker.load.waiting for worker in workers],
                [worker.load.used_blocks for worker in workers],
            )
        if self._on_progress is not None:
            self._on_progress(self.record.progress())

    def _copy_hot_prefixes(self, hot: HotPrefixes) -> None:
        """Performs a router's decisions about copies. A cancelled transfer goes on; only the router
        no longer counts it."""
        for effect in hot.decide(self.timeline.now_s):
            if isinstance(effect, Cancel):
                self.record.counters["copies_cancelled"] += 1
                continue
            source, target = map(self.fleet.worker, (effect.source, effect.target))
            names, distance = effect.prefix.chain.tolist(), self.fleet.distance(source, target)
            self.copy_prefix(names, target, distance, partial(self._copied, hot, effect))

    def _copied(self, hot: HotPrefixes, copy: Copy, done: bool) -> None:
        if not done:
            self.record.counters["copies_failed"] += 1
        hot.ended(copy, done, self.timeline.now_s)

    def _settle(self, laws: Laws) -> None:
        """Plays on without losses once all requests have ended, so that every stream recovers; then
        checks the laws a last time."""
        self.fleet.network.loss = 0.0
        self.timeline.quiet_since_s = None
        troubles: tuple[Failure | RelayRestart, ...] = (
            *self.options.failures,
            *self.options.relay_restarts,
        )
        last_s = max((trouble.at_s + trouble.down_s for trouble in troubles), default=0.0)
        end_s = max(self.timeline.now_s, last_s) + SETTLE_S
        while self.timeline.now_s < end_s:
            self.timeline.step()
        laws.at_the_end()

    def _count(self) -> None:
        counters = self.record.counters
        for router in self.fleet.routers:
            view, fates = router.view, router.hot.copies.fates
            for fate in (CopyFate.USED, CopyFate.USELESS):
                if fates[fate]:
                    counters[f"copies_{fate}"] += fates[fate]
            counters["gaps"] += view.gaps
            counters["drifts"] += view.drifts
            counters["resyncs"] += router.core.fleet.self_check.resyncs
            for (how, outcome), count in view.recoveries.items():
                counters[f"recoveries_{how}_{outcome}"] += count
            for source in view.sources.values():
                counters["streams_live"] += source.stream.state is StreamState.LIVE
