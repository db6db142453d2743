"""A fleet in virtual time: the router's real core, real facts, simulated engines, a trace.

    trace -> VirtualRouter (RouterCore, FleetView, index) -> VirtualEngine (a scheduler)
                 ^ facts, beats, heartbeats, late as over a network |
                 +------------------- VirtualRelay <----------------+

Nothing awaits and nobody looks at a clock: a heap of timed calls, and time jumps from one to the
next. What has happened on an engine by a decision is brought up to date just before it, so that the
router sees what it would see, and not less.

Laws:
- requests: arrived = served + failed + shed + in flight;
- one seed, one log: `RunResult.digest`;
- a decision sees no event before it could have come.
"""

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from events.stream import StreamState
from events.view import Pull
from indexer.identity import WorkerKey
from router.decision import Pick, Progress, ProgressState, Request
from router.prompt import Prompt
from router.refusals import Reason, Refusal
from router.reservations import Ending
from simulator.content import ChainContent
from simulator.laws import Laws
from simulator.options import Failure, RelayRestart, RunOptions
from simulator.results import OnProgress, RunResult
from simulator.run_record import Happened, RunRecord
from simulator.scheduler import Load, RequestRefused, Sequence, StepResult, Submission
from simulator.schedulers import SCHEDULERS
from simulator.trace import Trace, TraceRequest
from simulator.virtual_engine import VirtualEngine
from simulator.virtual_relay import VirtualRelay
from simulator.virtual_router import Plane, VirtualRouter

BEAT_S = 1.0
TICK_S = 1.0
QUIET_S = 300.0
"""So long an idle fleet is lived through second by second: predictions run out, leases end. What is
left of a longer quiet is skipped."""
RETRY_S = 0.5
"""After a refusal that doesn't say when to try again."""
SETTLE_S = 45.0
"""After the last request and the last trouble: what is forgotten after 30 s is heard again."""
_WAKE_S = 2.0
"""Relays beat again so long before the routers' clocks go on."""
_PULL_JITTER_S = 0.2
_PULL_TIMEOUT_S = 2.0

_UNAVAILABLE = (Reason.NO_WORKER, Reason.NO_ELIGIBLE_WORKER)

Work = Callable[[], None]


@dataclass(slots=True, eq=False)
class Worker:
    """One schedulable target: a rank of an engine, and its relay."""

    index: int
    engine: VirtualEngine
    rank: int
    relay: VirtualRelay
    load: Load
    """As it was told last."""
    answered_at_s: float = 0.0
    """When the engine last answered its relay."""
    relay_up: bool = True
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """One request, from its client's view."""

    index: int
    request: TraceRequest
    arrived_s: float
    prompt: Prompt
    names: list[int]
    """Of its full blocks."""
    attempts: int = 0
    worker: Worker | None = None
    router: VirtualRouter | None = None
    """Who picked; None: nobody was asked."""
    reservation_id: str = ""
    sequence: Sequence | None = None
    failed_workers: set[str] = field(default_factory=set)

    @property
    def request_id(self) -> str:
        return f"r{self.index}"


def run(options: RunOptions, trace: Trace, on_progress: OnProgress | None = None) -> RunResult:
    """Plays a trace to its end. on_progress: called every few virtual seconds."""
    return World(options, trace, on_progress).run()


class World:
    """One run."""

    def __init__(
        self, options: RunOptions, trace: Trace, on_progress: OnProgress | None = None
    ) -> None:
        self.options = options
        self.now_s = 0.0
        self.engines: list[VirtualEngine] = []
        self.workers: list[Worker] = []
        self.lives: dict[str, Life] = {}
        """Request id -> those that are in an engine, or wait for another try."""
        self._trace = trace
        self._on_progress = on_progress
        self._timers: list[tuple[float, int, Work]] = []
        self._clockwork: list[tuple[float, int, Work, float]] = []
        """Beats and ticks: (when, order, call, period)."""
        self.clockwork_turns = 0
        self._order = 0
        self._idle_since_s: float | None = 0.0
        self._network = random.Random(f"{options.seed}/network")
        self._clients = random.Random(f"{options.seed}/clients")
        self._pulls: dict[tuple[int, WorkerKey], int] = {}
        """Router and worker -> the number of the recovery that is going on."""
        self._targets: dict[WorkerKey, Worker] = {}
        self._build()
        self.record = RunRecord(len(trace.requests), len(self.workers))
        self.routers = [
            VirtualRouter(number, options, self._ask_relays) for number in range(options.replicas)
        ]
        self._next_turn = _next_turns(trace)
        self._choice = 0
        self._loss = options.event_loss
        self.laws = Laws(self) if options.check else None

    # --- time ---

    def at(self, when_s: float, work: Work) -> None:
        """Calls `work` then."""
        self._order += 1
        heapq.heappush(self._timers, (when_s, self._order, work))

    def run(self) -> RunResult:
        """Plays all of it."""
        started = time.perf_counter()  # the run's own cost, which decides nothing
        self._begin()
        while self.record.ended < len(self._trace.requests):
            self._step()
        self._count()
        if self._on_progress is not None:
            self._on_progress(self.record.progress())
        wall_s = time.perf_counter() - started
        if self.laws is not None:
            self._settle(self.laws)
        names = [str(worker.relay.key) for worker in self.workers]
        return self.record.result(self.options, names, {}, wall_s)

    def _step(self) -> None:
        """The next thing that happens."""
        if not self._timers or self._clockwork[0][0] <= self._timers[0][0]:
            self._tick_clockwork()
        else:
            self.now_s, _, work = heapq.heappop(self._timers)
            work()

    def _settle(self, laws: Laws) -> None:
        """All is done: nothing is lost any more, and every stream has time to recover."""
        self._loss = 0.0
        self._idle_since_s = None
        troubles: tuple[Failure | RelayRestart, ...] = (
            *self.options.failures,
            *self.options.relay_restarts,
        )
        last_s = max((trouble.at_s + trouble.down_s for trouble in troubles), default=0.0)
        end_s = max(self.now_s, last_s) + SETTLE_S
        while self.now_s < end_s:
            self._step()
        laws.at_the_end()

    def _tick_clockwork(self) -> None:
        """The next beat or tick, unless nothing is going on for long."""
        when_s, order, work, period_s = self._clockwork[0]
        idle_s = 0.0 if self._idle_since_s is None else when_s - self._idle_since_s
        if idle_s > QUIET_S and self._timers:
            skipped_s = float(int(self._timers[0][0] - when_s - _WAKE_S - 1))
            if skipped_s > 0:
                self._clockwork = [
                    (at_s + skipped_s - (_WAKE_S if every is not self._tick else 0.0), n, every, p)
                    for at_s, n, every, p in self._clockwork
                ]
                heapq.heapify(self._clockwork)
                self._idle_since_s = when_s + skipped_s
                return
        self.now_s = when_s
        self.clockwork_turns += 1
        heapq.heapreplace(self._clockwork, (when_s + period_s, order, work, period_s))
        work()

    def _begin(self) -> None:
        rng = random.Random(f"{self.options.seed}/phases")
        for worker in self.workers:
            self._beat(worker, delay_s=0.0)
            self._every(BEAT_S, rng.random() * BEAT_S, partial(self._beat, worker))
        self._every(TICK_S, 0.0, self._tick)
        for failure in self.options.failures:
            engine = self.engines[failure.worker]
            self.at(failure.at_s, partial(self._fail_engine, engine, failure.down_s))
        for restart in self.options.relay_restarts:
            self.at(restart.at_s, partial(self._end_relay, restart))
        for index, request in enumerate(self._trace.requests):
            if request.think_s is None:
                self.at(request.arrival_s, partial(self._arrive, index))

    def _every(self, period_s: float, first_s: float, work: Work) -> None:
        self._order += 1
        heapq.heappush(self._clockwork, (first_s, self._order, work, period_s))

    # --- the fleet ---

    def _build(self) -> None:
        options = self.options
        for number in range(options.workers):
            make = partial(SCHEDULERS[options.engine], options.scheduler)
            engine = VirtualEngine(f"worker-{number}", options.ranks, make)
            self.engines.append(engine)
            tells = options.events != "none" and number >= options.approximate_workers
            for rank in range(options.ranks):
                key = WorkerKey(engine.engine_id, rank)
                relay = VirtualRelay(
                    key,
                    options.scheduler,
                    0.0,
                    engine=options.engine,
                    multi_rank=options.ranks > 1,
                    tells_events=tells,
                    tells_capacity=options.tells_capacity,
                )
                worker = Worker(len(self.workers), engine, rank, relay, engine.load(rank))
                self.workers.append(worker)
                self._targets[key] = worker

    def _ranks(self, engine: VirtualEngine) -> list[Worker]:
        first = self.engines.index(engine) * self.options.ranks
        return self.workers[first : first + self.options.ranks]

    def _await_step(self, engine: VirtualEngine) -> None:
        """Calls back when the engine's step ends, as far as can be said now."""
        if engine.due_s is not None:
            self.at(engine.due_s, partial(self._end_step, engine, engine.life, engine.due_s))
        elif engine.ready_s is not None:
            self.at(engine.ready_s, partial(self._wake, engine, engine.life, engine.ready_s))

    def _wake(self, engine: VirtualEngine, life: int, ready_s: float) -> None:
        if engine.life == life and engine.ready_s == ready_s:
            engine.begin_step(self.now_s)
            self._await_step(engine)

    def _end_step(self, engine: VirtualEngine, life: int, due_s: float) -> None:
        if engine.life != life or engine.due_s != due_s:
            return  # it was cut shorter, or has died
        self._take(engine, engine.end_step(self.now_s), self._delay_s())
        if self.laws is not None:
            self.laws.on_settled(engine)
        engine.begin_step(self.now_s)
        self._await_step(engine)

    def _advance(self, engine: VirtualEngine, until_s: float, delay_s: float) -> None:
        if engine.due_s is not None:
            self._take(engine, engine.advance(until_s), delay_s)

    def _take(self, engine: VirtualEngine, result: StepResult, delay_s: float) -> None:
        """Effects of steps: news for the routers, tokens for the clients."""
        if result.events:
            for worker in self._ranks(engine):
                events = result.events
                if self.options.ranks > 1:
                    events = [event for event in events if event.dp_rank == worker.rank]
                if self.laws is not None:
                    self.laws.on_events(worker.relay.key, events)
                messages = worker.relay.tell(events, self.now_s)
                if worker.relay_up:
                    self._send(worker, Plane.FACTS, messages, delay_s)
        for output in result.outputs:
            sequence = output.sequence
            if output.first > sequence.prompt_tokens and not output.finished:
                continue
            life = self.lives.get(sequence.request_id)
            if life is None or life.sequence is not sequence:
                continue
            if output.first == sequence.prompt_tokens:
                self._first_token(life)
            if output.finished:
                self._finish(life)

    def _beat(self, worker: Worker, delay_s: float | None = None) -> None:
        """What a relay says every second."""
        engine, relay = worker.engine, worker.relay
        delay_s = self._delay_s() if delay_s is None else delay_s
        if engine.up:
            self._advance(engine, self.now_s, delay_s)
            worker.load = engine.load(worker.rank)
            worker.answered_at_s = self.now_s
        if worker.relay_up:
            told = relay.heartbeat(worker.load, self.now_s, sampled_at_s=worker.answered_at_s)
            self._send(worker, Plane.LOAD, [told], delay_s)
            self._send(worker, Plane.FACTS, [relay.beat(self.now_s)], delay_s)

    def _send(self, worker: Worker, plane: Plane, messages: list[bytes], delay_s: float) -> None:
        loss = self._loss
        for router in self.routers:
            arrived = messages
            if loss:
                arrived = [one for one in messages if self._network.random() >= loss]
                self.record.counters["messages_lost"] += len(messages) - len(arrived)
            if arrived:
                router.send(plane, worker.relay.key, arrived, self.now_s + delay_s)

    def _delay_s(self) -> float:
        options = self.options
        if not options.event_jitter_s:
            return options.event_delay_s
        turn_s = self._network.uniform(-options.event_jitter_s, options.event_jitter_s)
        return options.event_delay_s + turn_s

    # --- requests ---

    def _arrive(self, index: int) -> None:
        request = self._trace.requests[index]
        size = self.options.scheduler.block_size
        prompt = Prompt.from_hashes(request.block_hashes(size), size, request.prompt_tokens)
        life = Life(index, request, self.now_s, prompt, prompt.prefixes(size).tolist())
        self.lives[life.request_id] = life
        record = self.record
        record.arrived += 1
        record.arrival_s[index] = self.now_s
        record.prompt_tokens[index] = request.prompt_tokens
        record.note(Happened.ARRIVED, self.now_s, index)
        self._idle_since_s = None
        self._place(life)

    def _place(self, life: Life) -> None:
        """Asks a router for a worker, and sends the request there."""
        options = self.options
        if options.past_router_share and self._clients.random() < options.past_router_share:
            self.record.counters["past_router"] += 1
            life.router = None
            self._submit(life, self._clients.choice(self.workers))
            return
        router = self._router()
        self._bring_up_to_date(router)
        hint = life.request.output_tokens if options.output_hint else None
        request = Request(
            life.request_id,
            life.prompt,
            expected_output_tokens=hint,
            excluded_workers=frozenset(life.failed_workers),
        )
        try:
            pick = router.core.route(request, self.now_s)
        except Refusal as refusal:
            self._on_refusal(life, refusal)
            return
        if not isinstance(pick, Pick):
            raise AssertionError(f"{life.request_id} is in flight already")
        reservation = pick.reservation
        life.router, life.reservation_id = router, reservation.id
        self.record.predicted_tokens[life.index] = reservation.predicted_tokens
        worker = self._targets[reservation.worker]
        self.record.note(Happened.PICKED, self.now_s, life.index, worker.index)
        self._renew_later(life)
        self._submit(life, worker)

    def _router(self) -> VirtualRouter:
        if self.options.spread == "random":
            return self._clients.choice(self.routers)
        self._choice += 1
        return self.routers[self._choice % len(self.routers)]

    def _bring_up_to_date(self, router: VirtualRouter) -> None:
        """What engines did in steps that are still going on, as far as it can be known by now."""
        heard_s = self.now_s - self.options.event_delay_s
        for engine in self.engines:
            self._advance(engine, heard_s, 0.0)
        router.hear(self.now_s)

    def _on_refusal(self, life: Life, refusal: Refusal) -> None:
        counters = self.record.counters
        counters["refusals"] += 1
        self.record.note(Happened.REFUSED, self.now_s, life.index)
        wait_s = refusal.retry_after_s
        retry_s = (RETRY_S if wait_s is None else wait_s) * self._clients.uniform(1.0, 1.5)
        if not _worth_a_retry(refusal):
            self._fail(life, f"router: {refusal.reason}")
        elif self.now_s + retry_s - life.arrived_s <= self.options.patience_s:
            counters["retries"] += 1
            self.at(self.now_s + retry_s, partial(self._place, life))
        elif wait_s is None:
            self._fail(life, f"router: {refusal.reason}")
        else:
            self.record.turn_away(life.index)
            self._end(life)

    def _submit(self, life: Life, worker: Worker) -> None:
        engine = worker.engine
        life.attempts += 1
        life.worker = worker
        worker.in_flight += 1
        if not engine.up:
            self._lose(life)
            return
        request = life.request
        submission = Submission(
            request_id=life.request_id,
            content=ChainContent(life.names, life.request_id),
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            session_id=request.session_id,
            dp_rank=worker.rank if self.options.ranks > 1 else None,
        )
        before = engine.due_s, engine.ready_s
        try:
            life.sequence = engine.add(submission, self.now_s)
            if self.laws is not None:
                self.laws.on_added(engine)
        except RequestRefused as refusal:
            self._report(life, ProgressState.FAILED, failure=Ending.FAILED_CLIENT)
            self._leave(life)
            self._fail(life, f"engine: {refusal}")
            return
        if (engine.due_s, engine.ready_s) != before:
            self._await_step(engine)

    def _first_token(self, life: Life) -> None:
        self.record.ttft_s[life.index] = self.now_s - life.arrived_s
        self.record.note(Happened.FIRST_TOKEN, self.now_s, life.index)
        self._report(life, ProgressState.PREFILL_DONE)

    def _finish(self, life: Life) -> None:
        record, index, sequence = self.record, life.index, life.sequence
        if sequence is None or life.worker is None:
            raise AssertionError(f"{life.request_id} ends, but was nowhere")
        if self.laws is not None:
            self.laws.on_finished(sequence)
        cached, output = sequence.cached_tokens or 0, sequence.output_tokens
        scheduled_s = self.now_s if sequence.scheduled_s is None else sequence.scheduled_s
        record.queue_s[index] = scheduled_s - life.arrived_s
        record.e2e_s[index] = self.now_s - life.arrived_s
        if output > 1:
            spent_s = record.e2e_s[index] - record.ttft_s[index]
            record.itl_s[index] = spent_s / (output - 1)
        record.output_tokens[index] = output
        record.preemptions[index] = sequence.preemptions
        record.worker[index] = life.worker.index
        record.serve(index, cached)
        self._report(life, ProgressState.FINISHED, output, cached)
        self._leave(life)
        self._end(life)

    def _lose(self, life: Life) -> None:
        """Its worker is gone: the client hears it, and sends it again."""
        worker = life.worker
        if worker is None:
            raise AssertionError(f"{life.request_id} is lost, but was nowhere")
        self._report(life, ProgressState.FAILED, failure=Ending.FAILED_WORKER)
        self._leave(life)
        life.failed_workers.add(worker.engine.engine_id)
        if life.attempts > self.options.resends_max:
            self._fail(life, "worker lost")
            return
        self.record.counters["resent"] += 1
        self.at(self.now_s + RETRY_S, partial(self._place, life))

    def _leave(self, life: Life) -> None:
        """It is at no worker any more."""
        if life.worker is not None:
            life.worker.in_flight -= 1
        life.worker = life.sequence = None

    def _fail(self, life: Life, reason: str) -> None:
        self.record.e2e_s[life.index] = self.now_s - life.arrived_s
        self.record.fail(life.index, reason)
        self._end(life)

    def _end(self, life: Life) -> None:
        """However it ended: its client goes on."""
        record = self.record
        record.attempts[life.index] = life.attempts
        record.note(Happened.ENDED, self.now_s, life.index, int(record.outcome[life.index]))
        del self.lives[life.request_id]
        if not self.lives:
            self._idle_since_s = self.now_s
        following = self._next_turn.get(life.index)
        if following is not None:
            think_s = self._trace.requests[following].think_s or 0.0
            self.at(self.now_s + think_s, partial(self._arrive, following))

    def _report(
        self,
        life: Life,
        state: ProgressState,
        output_tokens: int = 0,
        cached_tokens: int | None = None,
        failure: Ending = Ending.FAILED_UNKNOWN,
    ) -> None:
        if life.router is None:
            return
        life.router.hear(self.now_s)
        progress = Progress(life.reservation_id, state, output_tokens, cached_tokens, failure)
        life.router.core.report(progress, self.now_s)

    def _renew(self, life: Life, reservation_id: str) -> None:
        """A client whose request takes long says so, before the lease ends."""
        sequence = life.sequence
        if sequence is None or life.reservation_id != reservation_id:
            return
        self._report(life, ProgressState.RUNNING, sequence.output_tokens)
        self._renew_later(life)

    def _renew_later(self, life: Life) -> None:
        when_s = self.now_s + self.options.routing.lease_s / 3
        self.at(when_s, partial(self._renew, life, life.reservation_id))

    # --- clocks ---

    def _tick(self) -> None:
        for router in self.routers:
            router.tick(self.now_s)
        if self.laws is not None:
            self.laws.on_tick()
        if self.lives:
            workers = self.workers
            self.record.sample(
                ceil(self.now_s),
                [worker.in_flight for worker in workers],
                [worker.load.waiting for worker in workers],
                [worker.load.used_blocks for worker in workers],
            )
        if self._on_progress is not None:
            self._on_progress(self.record.progress())

    # --- trouble ---

    def _fail_engine(self, engine: VirtualEngine, down_s: float) -> None:
        if not engine.up:
            return
        self.record.counters["engine_failures"] += 1
        self.record.note(Happened.TROUBLE, self.now_s, self.engines.index(engine))
        engine.die()
        here = [
            life
            for life in self.lives.values()
            if life.worker is not None and life.worker.engine is engine
        ]
        for life in here:
            self._lose(life)
        self.at(self.now_s + down_s, partial(self._boot_engine, engine))

    def _boot_engine(self, engine: VirtualEngine) -> None:
        engine.boot()
        if self.laws is not None:
            self.laws.on_restart(engine)
        for worker in self._ranks(engine):
            worker.relay.on_engine_restart(self.now_s)
            self._beat(worker)

    def _end_relay(self, restart: RelayRestart) -> None:
        self.record.counters["relay_restarts"] += 1
        for worker in self._ranks(self.engines[restart.worker]):
            worker.relay_up = False
        self.at(self.now_s + restart.down_s, partial(self._start_relay, restart))

    def _start_relay(self, restart: RelayRestart) -> None:
        for worker in self._ranks(self.engines[restart.worker]):
            worker.relay_up = True
            worker.relay.on_restart(self.now_s, keeps_map=restart.keeps_map)
            self._beat(worker)

    # --- recoveries ---

    def _ask_relays(self, router: VirtualRouter, pulls: list[Pull]) -> None:
        """A router missed something: its questions go out, one a worker at a time."""
        for pull in pulls:
            self._order += 1
            number = self._pulls[router.number, pull.worker] = self._order
            wait_s = self._network.random() * _PULL_JITTER_S
            self.record.counters["pulls"] += 1
            self.at(
                max(self.now_s, 0.0) + wait_s,
                partial(self._answer, router, pull, number),
            )

    def _answer(self, router: VirtualRouter, pull: Pull, number: int) -> None:
        worker = self._targets[pull.worker]
        lost = self._network.random() < self._loss
        if lost or not worker.relay_up:
            when_s = self.now_s + _PULL_TIMEOUT_S
            self.at(when_s, partial(self._recovered, router, pull, number, None))
            return
        relay, now_s = worker.relay, self.now_s
        then: Callable[[float], list[Pull]]
        if pull.from_seq is None:
            then = partial(router.view.on_snapshot, pull.worker, *relay.snapshot())
        elif (messages := relay.ring(pull.from_seq)) is not None:
            then = partial(router.view.on_ring, pull.worker, relay.outbox.epoch, messages)
        else:
            then = partial(router.view.on_pull_failed, pull, "ring too short")
        self.at(now_s + self._delay_s(), partial(self._recovered, router, pull, number, then))

    def _recovered(
        self,
        router: VirtualRouter,
        pull: Pull,
        number: int,
        then: Callable[[float], list[Pull]] | None,
    ) -> None:
        if self._pulls.get((router.number, pull.worker)) != number:
            return
        router.hear(self.now_s)
        if self._pulls.get((router.number, pull.worker)) != number:
            return  # what was just heard asked anew
        del self._pulls[router.number, pull.worker]
        if then is None:
            again = router.view.on_pull_failed(pull, "no answer", self.now_s)
        else:
            again = then(self.now_s)
        self._ask_relays(router, again)

    # --- the end ---

    def _count(self) -> None:
        counters = self.record.counters
        for router in self.routers:
            view = router.view
            counters["gaps"] += view.gaps
            counters["drifts"] += view.drifts
            counters["resyncs"] += router.core.self_check.resyncs
            for (how, outcome), count in view.recoveries.items():
                counters[f"recoveries_{how}_{outcome}"] += count
            for source in view.sources.values():
                counters["streams_live"] += source.stream.state is StreamState.LIVE


def _worth_a_retry(refusal: Refusal) -> bool:
    """As kvroute's client sees it: with RetryInfo, or UNAVAILABLE."""
    return refusal.retry_after_s is not None or refusal.reason in _UNAVAILABLE


def _next_turns(trace: Trace) -> dict[int, int]:
    """Request -> the one of its session that is sent when it has ended."""
    following: dict[int, int] = {}
    last: dict[str, int] = {}
    for index, request in enumerate(trace.requests):
        if request.session_id is None:
            continue
        if request.think_s is not None:
            following[last[request.session_id]] = index
        last[request.session_id] = index
    return following
