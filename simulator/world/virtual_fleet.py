"""The engines of a run, each with a relay for every rank, and their faults.

    step ends -> events to the relays, tokens to the clients (`on_output`)
    every second: a heartbeat and a beat of every relay

Law: a router gets a step's events one delay after the step, and the events of a worker in order.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from indexer.identity import WorkerKey
from simulator.engines.block_pool import PoolEvent
from simulator.engines.cost_model import Distance
from simulator.engines.scheduler import Load, Output, Sequence, StepResult, Submission
from simulator.schedulers import SCHEDULERS
from simulator.world.options import RelayRestart, RunOptions
from simulator.world.run_record import Happened, RunRecord
from simulator.world.timeline import Timeline
from simulator.world.virtual_engine import VirtualEngine
from simulator.world.virtual_network import VirtualNetwork
from simulator.world.virtual_relay import EngineBytesRelay, VirtualRelay
from simulator.world.virtual_router import Plane, VirtualRouter

BEAT_S = 1.0
_BEATS_LEAD_S = 2.0
"""Seconds by which relays beat before the routers' clocks, after a skipped quiet."""


class Witness:
    """Observer of a fleet: called as engines work and routers pick; does nothing itself. Laws
    derives from it."""

    def on_added(self, engine: VirtualEngine) -> None: ...
    def on_events(self, key: WorkerKey, events: Iterable[PoolEvent]) -> None: ...
    def on_settled(self, engine: VirtualEngine) -> None: ...
    def on_restart(self, engine: VirtualEngine) -> None: ...
    def on_finished(self, sequence: Sequence) -> None: ...
    def on_picked(self, router: VirtualRouter, key: WorkerKey) -> None: ...
    def on_turns(self, router: VirtualRouter, now_s: float) -> None: ...


@dataclass(slots=True, eq=False)
class Worker:
    """A schedulable target: a rank of an engine, and its relay."""

    index: int
    engine: VirtualEngine
    rank: int
    relay: VirtualRelay
    load: Load
    """Load in the engine's last answer."""
    answered_at_s: float = 0.0
    """When the engine last answered its relay."""
    relay_up: bool = True
    in_flight: int = 0

    @property
    def key(self) -> WorkerKey:
        return self.relay.key


class VirtualFleet:
    """All engines and relays of a run."""

    def __init__(
        self,
        timeline: Timeline,
        options: RunOptions,
        record: RunRecord,
        *,
        on_output: Callable[[Output], None],
        on_engine_died: Callable[[VirtualEngine], None],
    ) -> None:
        self.workers: list[Worker] = []
        self.witness = Witness()
        self.network = VirtualNetwork(timeline, options, record.counters, self._answering)
        self._timeline = timeline
        self._options = options
        self._record = record
        self._on_output = on_output
        self._on_engine_died = on_engine_died
        self._by_key: dict[WorkerKey, Worker] = {}
        self.engines = [self._build(number) for number in range(options.workers)]

    @property
    def routers(self) -> list[VirtualRouter]:
        return self.network.routers

    def start(self) -> None:
        """Sends the first heartbeats, and plans all faults."""
        rng = random.Random(f"{self._options.seed}/phases")
        for worker in self.workers:
            self._beat(worker, delay_s=0.0)
            beat = partial(self._beat, worker)
            self._timeline.every(BEAT_S, rng.random() * BEAT_S, beat, _BEATS_LEAD_S)
        for failure in self._options.failures:
            engine = self.engines[failure.worker]
            self._timeline.at(failure.at_s, partial(self._fail, engine, failure.down_s))
        for restart in self._options.relay_restarts:
            self._timeline.at(restart.at_s, partial(self._end_relay, restart))
        for router_restart in self._options.router_restarts:
            work = partial(self._restart_router, router_restart.router)
            self._timeline.at(router_restart.at_s, work)

    def worker(self, key: WorkerKey) -> Worker:
        """The worker with this key."""
        return self._by_key[key]

    def ranks(self, engine: VirtualEngine) -> list[Worker]:
        """The workers of an engine."""
        first = engine.number * self._options.ranks
        return self.workers[first : first + self._options.ranks]

    def submit(self, worker: Worker, submission: Submission) -> Sequence:
        """Sends a request to a running engine. Raises RequestRefused."""
        engine = worker.engine
        before = engine.due_s, engine.ready_s
        sequence = engine.add(submission, self._timeline.now_s)
        self.witness.on_added(engine)
        self._tell_at_once(engine)
        if (engine.due_s, engine.ready_s) != before:
            self._await(engine)
        return sequence

    def distance(self, source: Worker, target: Worker) -> Distance:
        """The smallest place (host, rack, cluster) that two workers share."""
        per_host = self._options.engines_per_host
        hosts = [worker.engine.number // per_host for worker in (source, target)]
        if hosts[0] == hosts[1]:
            return Distance.HOST
        racks = [host // self._options.hosts_per_rack for host in hosts]
        return Distance.RACK if racks[0] == racks[1] else Distance.CLUSTER

    def bring_up_to_date(self, router: VirtualRouter) -> None:
        """Delivers to a router the events of current steps that would have arrived by now."""
        sent_s = self._timeline.now_s - self._options.event_delay_s
        for engine in self.engines:
            if engine.due_s is not None:
                self._take(engine, engine.advance(sent_s), 0.0)
        router.hear(self._timeline.now_s)

    def _build(self, number: int) -> VirtualEngine:
        options = self._options
        make = partial(SCHEDULERS[options.engine].scheduler, options.scheduler_of(number))
        engine = VirtualEngine(number, options.ranks, make)
        tells = options.events != "none" and number >= options.approximate_workers
        build = EngineBytesRelay if options.events == "engine" and tells else VirtualRelay
        for rank in range(options.ranks):
            relay = build(
                WorkerKey(engine.engine_id, rank),
                options.scheduler,
                self._timeline.now_s,
                engine=options.engine,
                multi_rank=options.ranks > 1,
                role=options.role_of(number),
                labels=self._labels(number),
                model_aliases=options.models_of(number),
                tells_events=tells,
                tells_capacity=options.tells_capacity,
                tells_slots=options.tells_slots,
            )
            worker = Worker(len(self.workers), engine, rank, relay, engine.load(rank))
            self.workers.append(worker)
            self._by_key[worker.key] = worker
        return engine

    def _labels(self, number: int) -> dict[str, str]:
        host = number // self._options.engines_per_host
        rack = host // self._options.hosts_per_rack
        return {"host": f"host-{host}", "rack": f"rack-{rack}", "cluster": "cluster-0"}

    def _answering(self, key: WorkerKey) -> VirtualRelay | None:
        worker = self._by_key[key]
        return worker.relay if worker.relay_up else None

    # --- steps ---

    def _await(self, engine: VirtualEngine) -> None:
        """Plans a call at the end of the engine's step, or when it has work again."""
        if engine.due_s is not None:
            work = partial(self._end_step, engine, engine.life, engine.due_s)
            self._timeline.at(engine.due_s, work)
        elif engine.ready_s is not None:
            work = partial(self._wake, engine, engine.life, engine.ready_s)
            self._timeline.at(engine.ready_s, work)

    def _wake(self, engine: VirtualEngine, life: int, ready_s: float) -> None:
        if engine.life == life and engine.ready_s == ready_s:
            engine.begin_step(self._timeline.now_s)
            self._tell_at_once(engine)
            self._await(engine)

    def _end_step(self, engine: VirtualEngine, life: int, due_s: float) -> None:
        if engine.life != life or engine.due_s != due_s:
            return  # the step was cut, or the engine has died
        self._take(engine, engine.end_step(due_s), self.network.delay_s())
        self.witness.on_settled(engine)
        engine.begin_step(due_s)
        self._tell_at_once(engine)
        self._await(engine)

    def _tell_at_once(self, engine: VirtualEngine) -> None:
        """Sends an idle engine's events at once: no step follows with which they would be sent."""
        if engine.due_s is not None:
            return
        result = engine.advance(self._timeline.now_s)
        if result.events:
            self._take(engine, result, self.network.delay_s())
        self.witness.on_settled(engine)

    def _take(self, engine: VirtualEngine, result: StepResult, delay_s: float) -> None:
        """Passes on the effects of steps: events to the routers, tokens to the clients."""
        if result.events:
            for worker in self.ranks(engine):
                events = result.events
                if engine.ranks > 1:
                    events = [event for event in events if event.dp_rank == worker.rank]
                self.witness.on_events(worker.key, events)
                messages = worker.relay.tell(events, self._timeline.now_s)
                if worker.relay_up and messages:
                    self.network.send(worker.key, Plane.FACTS, messages, delay_s)
        for output in result.outputs:
            if output.finished or output.first == output.sequence.prompt_tokens:
                self._on_output(output)

    # --- relays ---

    def _beat(self, worker: Worker, delay_s: float | None = None) -> None:
        """Sends a relay's heartbeat and beat, every second."""
        engine, relay, now_s = worker.engine, worker.relay, self._timeline.now_s
        delay_s = self.network.delay_s() if delay_s is None else delay_s
        if engine.up:
            if engine.due_s is not None:
                self._take(engine, engine.advance(now_s), delay_s)
            worker.load = engine.load(worker.rank)
            worker.answered_at_s = now_s
        if worker.relay_up:
            heartbeat = relay.heartbeat(worker.load, now_s, sampled_at_s=worker.answered_at_s)
            self.network.send(worker.key, Plane.LOAD, [heartbeat], delay_s)
            self.network.send(worker.key, Plane.FACTS, relay.beat(now_s), delay_s)

    def _restart_router(self, number: int) -> None:
        """Restarts a router; relays answer its hello at once."""
        self._record.note(Happened.TROUBLE, self._timeline.now_s, number, -1)
        self.network.restart(number)
        for worker in self.workers:
            if worker.relay_up:
                self._beat(worker, self.network.delay_s())

    def _end_relay(self, restart: RelayRestart) -> None:
        self._record.counters["relay_restarts"] += 1
        for worker in self.ranks(self.engines[restart.worker]):
            worker.relay_up = False
        when_s = self._timeline.now_s + restart.down_s
        self._timeline.at(when_s, partial(self._start_relay, restart))

    def _start_relay(self, restart: RelayRestart) -> None:
        for worker in self.ranks(self.engines[restart.worker]):
            worker.relay_up = True
            worker.relay.on_restart(self._timeline.now_s, keeps_map=restart.keeps_map)
            self._beat(worker)

    # --- engines that die ---

    def _fail(self, engine: VirtualEngine, down_s: float) -> None:
        if not engine.up:
            return
        self._record.counters["engine_failures"] += 1
        self._record.note(Happened.TROUBLE, self._timeline.now_s, engine.number)
        engine.die()
        self._on_engine_died(engine)
        self._timeline.at(self._timeline.now_s + down_s, partial(self._boot, engine))

    def _boot(self, engine: VirtualEngine) -> None:
        engine.boot()
        self.witness.on_restart(engine)
        for worker in self.ranks(engine):
            worker.relay.on_engine_restart(self._timeline.now_s)
            self._beat(worker)
