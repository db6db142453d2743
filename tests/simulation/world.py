"""The event plane in virtual time: real decisions, simulated engines, sockets, broker and hosts.

    Engine ─ZMQ, replay─> Relay(Rank) ─broker─> Router(FleetView, index) ─requests─> Relay

Laws, of which the first three are checked with every message:
- what a relay's ledger holds is what its engine held when it sent the last message applied; a
  subset of it where the relay says partial;
- a live stream's index is what its relay had told up to that very message;
- no stream is live for more than two beats without a fact that was lost on its way to the router;
- when nothing has gone wrong for a while, every stream is live, agrees with its relay, and holds
  what the engine holds: all of it, or a subset where the stream is partial. A reset of the cache
  that the engine has not told yet is excepted;
- nothing raises, and what waits is bounded.

Two things that nobody can tell are left out. A beat that was under way for a second (kept by a
client without a connection, say) tells what was true a second ago: so much longer may its stream be
live. And a restarted engine's sequence may go on, after a loss, at just the number where its last
life ended: such a message is lost too. (Where the engine exports its start, the relay learns of it
within a probe.)
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import numpy as np
from xxhash import xxh3_64_intdigest

from events.feed import fleet_view as view_module
from events.feed import stream as stream_module
from events.feed.feed import _TICK_S
from events.feed.fleet_view import FleetView, Source
from events.feed.stream import Stream, StreamState
from events.plane.facts import Epoch
from events.relay import rank as rank_module
from events.relay import snapshot as snapshot_module
from events.relay.ledger import Ledger
from events.relay.rank import EngineState, Rank
from events.relay.stream_publisher import BEAT_S
from indexer.identity import Tier, WorkerKey
from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex
from tests.simulation.engine import Engine, Held
from tests.simulation.faults import Options, drawn
from tests.simulation.processes import (
    BEAT_TIMEOUT_S,
    UNIX_START_S,
    Process,
    RankShell,
    Relay,
    Router,
    Work,
)

FALSE_LIVE_S = 2 * BEAT_S
STEPS_MAX = 200_000
"""Ten times what a run takes."""
_SLACK_S = _TICK_S + 0.05
"""A router looks at its clock every tick."""
_TURN_S = (0.02, 0.12)
_LAST_WORD_S = 6.0
"""Into the quiet: every engine speaks once more, so that a lost tail of its own shows."""
_UNTOLD_RESET_S = 9.0


class Broken(AssertionError):
    """A law is broken."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


@dataclass(frozen=True, slots=True)
class Parts:
    """The code under test. A test of the checker plants a bug here."""

    rank: type[Rank] = Rank
    ledger: type[Ledger] = Ledger
    view: type[FleetView] = FleetView
    stream: type[Stream] = Stream


@dataclass(slots=True)
class _Debt:
    """A fact that was lost on its way to a router."""

    epoch: Epoch
    seq: int
    counted_at_s: float
    """By the router's own clock, as is all about it."""
    live: bool
    """Whether the stream was live then."""
    live_s: float = 0.0
    """How long the stream has been live without it."""


@dataclass(eq=False)
class _Worker:
    """An engine and who follows it."""

    name: str
    engines: list[Engine]
    started_s: float
    relays: list[Relay] = field(default_factory=list)
    """The last one is in office, or will be."""

    @property
    def up(self) -> bool:
        return self.engines[0].up


class World:
    """One run. `log` is what happened, in order: the same for the same seed."""

    def __init__(
        self, seed: int, options: Options | None = None, parts: Parts | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.options = options or drawn(self.rng)
        if options is None:
            self.options = replace(self.options, native_index=bool(seed % 2))
        self.parts = parts or Parts()
        self.now_s = 0.0
        self.log: list[tuple[object, ...]] = []
        self.counts: Counter[str] = Counter()
        """What went wrong, and how streams ended."""
        self.routers: list[Router] = []
        self.disk: dict[WorkerKey, bytes] = {}
        """The maps that relays keep."""
        self._timers: list[tuple[float, int, Work]] = []
        self._timer_count = 0
        self._workers: list[_Worker] = []
        self._summaries: dict[tuple[WorkerKey, Epoch, int], tuple[int, int]] = {}
        """What a relay had told up to a message: placements and digest."""
        self._debts: dict[tuple[Router, WorkerKey], list[_Debt]] = {}
        self._epochs: dict[tuple[Router, WorkerKey], Epoch] = {}
        """Of streams that owe something, when we looked last."""
        self._beat_age_s: dict[tuple[Router, WorkerKey], float] = {}
        """How long the last beat heard was under way; the longest while facts are missing."""
        self._dark: dict[tuple[Router, WorkerKey], float] = {}
        """Blackouts: until when."""
        self._flooded: dict[Router, float] = {}
        """Routers that are slow consumers: until when."""
        self._kept: dict[Relay, list[Work]] = {}
        """What a relay's client keeps for a connection that will come back."""

    # --- time ---

    def at(self, when_s: float, work: Work) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (when_s, self._timer_count, work))

    def note(self, *what: object) -> None:
        self.log.append((round(self.now_s, 6), *what))

    def run(self) -> None:
        """From the first engine's start to the end of the quiet. Raises Broken, and what breaks."""
        options = self.options
        with ExitStack() as limits:
            for module, name, value in (
                (stream_module, "BUFFER_MESSAGES_MAX", options.stream_buffer_messages),
                (rank_module, "HELD_MESSAGES_MAX", options.held_messages),
                (rank_module, "CATCH_UP_BYTES", options.replay_part_bytes),
                (snapshot_module, "CHUNK_BYTES", options.snapshot_chunk_bytes),
                (rank_module, "Ledger", self.parts.ledger),
                (view_module, "Stream", self.parts.stream),
            ):
                limits.enter_context(mock.patch.object(module, name, value))
            self._build()
            self._plan()
            self.at(options.active_s, self._calm_down)
            self._run_until(options.active_s + options.quiet_s)
            self._check_quiet()

    def _run_until(self, end_s: float) -> None:
        while self._timers[0][0] < end_s:
            self.now_s, _, work = heapq.heappop(self._timers)
            work()
            if self._timer_count > STEPS_MAX:
                raise Broken("bounds", f"{STEPS_MAX} things happened: a storm")
        self.now_s = end_s

    # --- the fleet ---

    def _build(self) -> None:
        for number in range(self.options.workers):
            engines = [
                Engine(
                    WorkerKey(f"w{number}", rank),
                    self.options,
                    self.rng,
                    partial(self._from_engine, number, rank),
                )
                for rank in range(self.options.ranks)
            ]
            self._workers.append(_Worker(f"w{number}", engines, UNIX_START_S))
            for engine in engines:
                self._run_engine(engine, engine.life)
        for worker in self._workers:
            # A relay may come before the first request, or long after it.
            self.at(self.rng.choice([0.0, 0.0, 2.0]), partial(self._start_relay, worker, 0.0))
        for number in range(self.options.routers):
            self.at(self.rng.choice([0.0, 0.0, 3.0]), partial(self._start_router, number))

    def _run_engine(self, engine: Engine, life: int) -> None:
        if engine.life != life or not engine.up:
            return
        turn_s = self.rng.uniform(*_TURN_S)
        if self.now_s < self.options.active_s and (
            self.rng.random() < self.options.requests_per_s * turn_s
        ):
            engine.ask(self.now_s)
        # Once it is quiet, an engine is done with its queue in no time.
        for i in range(1 if self.now_s < self.options.active_s else 50):
            engine.step(UNIX_START_S + self.now_s + 1e-4 * i)
        self.at(self.now_s + turn_s, partial(self._run_engine, engine, life))

    def _start_relay(self, worker: _Worker, clock_behind_s: float) -> None:
        relay = Relay(
            self,
            f"relay {worker.name}.{len(worker.relays)}",
            worker.engines,
            self.parts.rank,
            lambda: worker.started_s if worker.up else None,
            clock_behind_s,
        )
        worker.relays.append(relay)
        self.note("starts", relay.name, relay.shells[0].rank.outbox.epoch)
        relay.start()

    def _start_router(self, number: int) -> None:
        index = NativeIndex() if self.options.native_index else ReferenceIndex()
        view = self.parts.view(
            index, beat_timeout_s=BEAT_TIMEOUT_S, forget_s=self.options.forget_s, workers_max=64
        )
        router = Router(self, f"router {number}", view, 0.0)
        self.routers = [one for one in self.routers if one.name != router.name]
        self.routers.append(router)
        self.note("starts", router.name)
        router.start()

    def _relays(self) -> list[Relay]:
        return [relay for worker in self._workers for relay in worker.relays if relay.alive]

    # --- from an engine to its relays ---

    def _from_engine(self, number: int, rank: int, seq: int, payload: bytes) -> None:
        options, rng = self.options, self.rng
        for relay in self._workers[number].relays:
            shell = relay.shells[rank]
            if not relay.alive or not shell.subscribed:
                continue
            if rng.random() < options.zmq_loss:
                self.counts["lost between engine and relay"] += 1
                continue
            delay_s = rng.uniform(0.0, options.zmq_delay_s_max)
            shell.arrives_s = max(shell.arrives_s, self.now_s + delay_s)
            self.at(shell.arrives_s, partial(relay.do, partial(relay.hear, shell, seq, payload)))

    def nobody_could_tell(self, shell: RankShell, seq: int, payload: bytes) -> bool:
        """Whether a new life goes on exactly where the last one was heard to end."""
        rank, told = shell.rank, shell.engine.told_by_digest
        if rank._kept is not None and rank.state is EngineState.STARTING:
            last = told[rank._kept[0].digest]
        elif waiting := rank._held or rank._backlog:
            last = told[xxh3_64_intdigest(waiting[-1][1])]
        elif rank._last_digest is not None:
            last = told[rank._last_digest]
        else:
            return False
        return last.life != told[xxh3_64_intdigest(payload)].life and last.seq + 1 == seq

    # --- the broker ---

    def from_relay(
        self, shell: RankShell, payload: bytes, facts: tuple[Epoch, int] | None, load: bool
    ) -> None:
        """facts: what a facts message is called; None for beats and heartbeats."""
        relay = shell.relay
        for router in self.routers:
            carry = partial(self._carry, shell, router, payload, facts, load, self.now_s)
            if relay.connected and not relay.reachable and relay in self._kept:
                self._kept[relay].append(carry)
            else:
                carry()

    def _carry(
        self,
        shell: RankShell,
        router: Router,
        payload: bytes,
        facts: tuple[Epoch, int] | None,
        load: bool,
        sent_s: float,
    ) -> None:
        options, rng, relay = self.options, self.rng, shell.relay
        late_s = rng.uniform(0.0, options.late_s_max) if rng.random() < options.late_share else 0.0
        arrives_s = self.now_s + rng.uniform(0.0, options.delay_s_max) + late_s
        arrives_s = shell.sent[router] = max(shell.sent.get(router, 0.0), arrives_s)
        if not (relay.connected and relay.reachable) or rng.random() < options.loss:
            if facts is not None:
                self.at(arrives_s, partial(self._owe, router, shell.key, facts))
            return
        for _ in range(2 if rng.random() < options.duplication else 1):
            self.at(
                arrives_s, partial(self._arrive, router, shell.key, payload, facts, load, sent_s)
            )

    def _arrive(
        self,
        router: Router,
        key: WorkerKey,
        payload: bytes,
        facts: tuple[Epoch, int] | None,
        load: bool,
        sent_s: float,
    ) -> None:
        dark = self._dark.get((router, key), 0.0) > self.now_s
        flooded = self._flooded.get(router, 0.0) > self.now_s
        if not router.reachable or dark or flooded:
            if facts is not None:
                self._owe(router, key, facts)
            if router.reachable and flooded:
                # The client says so for each message that it drops.
                router.do(partial(router.notice, False))
                router.do(partial(router.notice, True))
        elif load:
            router.do(partial(router.hear_load, key, payload))
        else:
            router.do(partial(self._hear, router, key, payload, facts is None, sent_s))

    def _hear(
        self, router: Router, key: WorkerKey, payload: bytes, beat: bool, sent_s: float
    ) -> None:
        if beat:
            age_s = self.now_s - sent_s
            owed = self._debts.get((router, key))
            before_s = self._beat_age_s.get((router, key), 0.0) if owed else 0.0
            self._beat_age_s[router, key] = max(age_s, before_s)
        router.hear(key, payload)

    def _owe(self, router: Router, key: WorkerKey, facts: tuple[Epoch, int]) -> None:
        self.counts["lost between relay and router"] += 1
        source = router.view.sources.get(key)
        live = source is not None and source.stream.state is StreamState.LIVE
        debts = self._debts.setdefault((router, key), [])
        if source is not None and source.stream.epoch is not None and not debts:
            self._epochs[router, key] = source.stream.epoch
        debts.append(_Debt(*facts, router.clock_s(), live))

    def from_router(
        self, router: Router, key: WorkerKey, request: bytes, then: Callable[[bytes], None]
    ) -> bool:
        """Carries a request and its answers; False when nobody listens."""
        if not router.connected:
            return False
        if not router.reachable:
            return True
        listening = [
            shell
            for relay in self._relays()
            for shell in relay.shells
            if shell.key == key and relay.reachable
        ]
        for shell in listening:
            if (delay_s := self._request_delay_s()) is not None:
                ask = partial(self._ask, router, shell, request, then)
                self.at(self.now_s + delay_s, partial(shell.relay.do, ask))
        return bool(listening)

    def _ask(
        self, router: Router, shell: RankShell, request: bytes, then: Callable[[bytes], None]
    ) -> None:
        answer = shell.relay.asked(shell, request)
        delay_s = self._request_delay_s()
        if delay_s is not None and shell.relay.connected and shell.relay.reachable:
            self.at(self.now_s + delay_s, partial(self._answer, router, answer, then))

    def _answer(self, router: Router, answer: bytes, then: Callable[[bytes], None]) -> None:
        if router.reachable:
            router.do(partial(then, answer))

    def _request_delay_s(self) -> float | None:
        """Of a request or an answer; None when it is lost."""
        options, rng = self.options, self.rng
        if rng.random() < options.requests_lost / 2:
            return None
        late = rng.random() < options.requests_late / 2
        return rng.uniform(0.0, options.requests_late_s_max if late else options.delay_s_max)

    def hello(self, router: Router) -> None:
        for relay in self._relays():
            if router.reachable and relay.reachable and self.rng.random() >= self.options.loss:
                delay_s = self.rng.uniform(0.0, self.options.delay_s_max)
                self.at(self.now_s + delay_s, partial(relay.do, relay.say_hello_back))

    # --- what goes wrong ---

    def _plan(self) -> None:
        options = self.options
        for happens_per_s, trouble in (
            (options.resets_per_s, self._reset),
            (options.engine_restarts_per_s, self._restart_engine),
            (options.blackouts_per_s, self._black_out),
            (options.cuts_per_s, self._cut_one),
            (options.broker_restarts_per_s, self._restart_broker),
            (options.slow_consumers_per_s, self._flood),
            (options.relay_restarts_per_s, self._restart_relay),
            (options.router_restarts_per_s, self._restart_router),
            (options.stalls_per_s, self._stall),
            (options.clock_stalls_per_s, self._stop_clock),
            (options.resyncs_per_s, self._resync),
        ):
            when_s = 0.0
            while happens_per_s:
                when_s += self.rng.expovariate(happens_per_s)
                if when_s >= options.active_s:
                    break
                self.at(when_s, trouble)

    def _happens(self, what: str, whom: object = "") -> None:
        self.counts[what] += 1
        self.note(what, whom)

    def _reset(self) -> None:
        worker = self.rng.choice(self._workers)
        engine = self.rng.choice(worker.engines)
        if engine.up and engine.reset():
            self._happens("reset", engine.key)

    def _restart_engine(self) -> None:
        worker = self.rng.choice(self._workers)
        if not worker.up:
            return
        self._happens("engine restart", worker.name)
        for engine in worker.engines:
            engine.die()
        for relay in worker.relays:
            for shell in relay.shells:
                shell.subscribed = False
        down_s = self.rng.uniform(0.5, max(0.5, self.options.engine_down_s_max))
        self.at(self.now_s + down_s, partial(self._boot_engine, worker, self.now_s + 0.4))

    def _boot_engine(self, worker: _Worker, started_s: float) -> None:
        self.note("engine is back", worker.name)
        worker.started_s = UNIX_START_S + started_s
        for engine in worker.engines:
            engine.boot()
            self._run_engine(engine, engine.life)
        for relay in worker.relays:
            for shell in relay.shells:
                away_s = self.options.zmq_reconnect_s_max
                relay.subscribe(shell, self.rng.uniform(0.0, away_s))

    def _restart_relay(self) -> None:
        worker = self.rng.choice(self._workers)
        if not worker.relays or not worker.relays[-1].alive:
            return
        relay = worker.relays[-1]
        self._happens("relay restart", relay.name)
        down_s = self.rng.uniform(0.0, self.options.relay_down_s_max)
        if self.rng.random() < self.options.lingering_share:
            self.counts["two relays"] += 1
            linger_s = down_s + self.rng.uniform(0.0, self.options.linger_s_max)
            self.at(self.now_s + linger_s, relay.end)
        elif self.rng.random() < 0.5:
            relay.do(relay.stop)
        else:
            relay.end()
        behind_s = 0.0
        if self.options.clock_back_s_max:
            behind_s = UNIX_START_S + self.now_s - relay.clock_s()
            behind_s += self.rng.uniform(0.0, self.options.clock_back_s_max)
        self.at(self.now_s + down_s, partial(self._succeed, worker, len(worker.relays), behind_s))

    def _succeed(self, worker: _Worker, number: int, clock_behind_s: float) -> None:
        if len(worker.relays) == number:  # nobody else did meanwhile
            self._start_relay(worker, clock_behind_s)

    def _restart_router(self) -> None:
        if self.routers:
            router = self.rng.choice(self.routers)
            self._happens("router restart", router.name)
            router.end()
            self._start_router(int(router.name.split()[1]))

    def _process(self) -> Process | None:
        processes = [*self._relays(), *self.routers]
        return self.rng.choice(processes) if processes else None

    def _stall(self) -> None:
        if (process := self._process()) is not None:
            self._happens("stall", process.name)
            process.stall(self.rng.uniform(0.0, self.options.stall_s_max))

    def _stop_clock(self) -> None:
        if (process := self._process()) is not None:
            self._happens("clock stall", process.name)
            process.stop_clock(self.rng.uniform(0.0, self.options.stall_s_max))

    def _black_out(self) -> None:
        if self.routers:
            router = self.rng.choice(self.routers)
            worker = self.rng.choice(self._workers)
            key = self.rng.choice(worker.engines).key
            self._happens("blackout", (router.name, key))
            until_s = self.now_s + self.rng.uniform(0.0, self.options.blackout_s_max)
            self._dark[router, key] = until_s

    def _flood(self) -> None:
        if self.routers:
            router = self.rng.choice(self.routers)
            self._happens("slow consumer", router.name)
            self._flooded[router] = self.now_s + self.rng.uniform(0.0, 0.3)

    def _cut_one(self) -> None:
        if (process := self._process()) is not None and process.reachable:
            self._happens("cut", process.name)
            unnoticed_s = self.rng.uniform(0.0, self.options.unnoticed_s_max)
            if isinstance(process, Relay) and self.rng.random() < 0.5:
                self._kept[process] = []
            self._cut(process, unnoticed_s)

    def _restart_broker(self) -> None:
        self._happens("broker restart")
        for process in (*self._relays(), *self.routers):
            if process.reachable:
                self._cut(process, 0.0)

    def _cut(self, process: Process, unnoticed_s: float) -> None:
        process.reachable = False
        self.at(
            self.now_s + unnoticed_s, partial(process.do, partial(self._notice, process, False))
        )
        away_s = unnoticed_s + self.rng.uniform(0.01, self.options.cut_s_max)
        self.at(self.now_s + away_s, partial(self._reconnect, process))

    def _reconnect(self, process: Process) -> None:
        process.reachable = True
        self.note("connected again", process.name)
        process.do(partial(self._notice, process, True))

    def _notice(self, process: Process, connected: bool) -> None:
        if isinstance(process, Router):
            process.notice(connected)
            return
        process.connected = connected
        if connected and isinstance(process, Relay):
            for carry in self._kept.pop(process, []):
                carry()

    def _resync(self) -> None:
        if self.routers:
            router = self.rng.choice(self.routers)
            worker = self.rng.choice(self._workers)
            self._happens("resync", (router.name, worker.name))
            router.do(partial(router.resync, worker.name))

    def _calm_down(self) -> None:
        """Nothing new goes wrong from now on."""
        self.note("quiet")
        self.options = replace(
            self.options,
            zmq_loss=0.0,
            zmq_reconnect_s_max=0.0,
            replay_unanswered=0.0,
            replay_cut_off=0.0,
            replay_hole=0.0,
            loss=0.0,
            duplication=0.0,
            late_share=0.0,
            requests_lost=0.0,
            requests_late=0.0,
        )
        self._dark.clear()
        self._flooded.clear()
        for worker in self._workers:
            for relay in worker.relays[:-1]:
                relay.end()
        self.at(self.now_s + _LAST_WORD_S, self._last_word)

    def _last_word(self) -> None:
        for worker in self._workers:
            for engine in worker.engines:
                engine.ask(self.now_s, unheard_of=True)
                if self.rng.random() < 0.3:
                    reset_s = self.now_s + _UNTOLD_RESET_S - _LAST_WORD_S
                    self.at(reset_s, partial(self._reset_untold, engine))

    def _reset_untold(self, engine: Engine) -> None:
        if engine.reset():
            self._happens("reset that is never told", engine.key)

    # --- laws ---

    def told(self, shell: RankShell, epoch: Epoch, seq: int) -> None:
        self._summaries[shell.key, epoch, seq] = shell.mirror.summary()

    def rank_moved(self, shell: RankShell) -> None:
        """The ledger is what the engine held when it sent the last message applied."""
        rank = shell.rank
        if len(rank._held) > self.options.held_messages:
            raise Broken("bounds", f"{shell.key} holds {len(rank._held)} messages")
        if len(rank._server._frozen) > snapshot_module._FROZEN_MAX:
            raise Broken("bounds", f"{shell.key} keeps {len(rank._server._frozen)} snapshots")
        ring = rank.outbox
        if ring._ring_bytes > ring._ring_bytes_max and len(ring._ring) > 1:
            raise Broken("bounds", f"{shell.key}'s ring has {ring._ring_bytes} bytes")
        if rank._last_digest is None:
            return  # nothing was heard yet
        told = shell.engine.told_by_digest[rank._last_digest]
        if (fault := _difference(_placed(rank.ledger), told.held, rank.complete)) is not None:
            after = f"message {told.seq} of life {told.life}"
            counts = dict(rank.counts)
            raise Broken("ledger", f"{shell.key} after {after}: {fault}; counted {counts}")

    def router_moved(self, router: Router, key: WorkerKey) -> None:
        """The index of a stream that is live or in step is what its relay told; it is not live for
        long after a loss."""
        source = router.view.sources.get(key)
        if source is None:
            self._debts.pop((router, key), None)
            return
        stream, index = source.stream, router.view.index
        if len(stream._buffer) > self.options.stream_buffer_messages:
            raise Broken("bounds", f"{router.name} buffers {len(stream._buffer)} of {key}")
        if stream.state is StreamState.LIVE or stream._in_step:
            self._check_live(router, source, (index.count(source.slot), index.digest(source.slot)))
        self._check_debts(router, source)

    def router_ticked(self, router: Router) -> None:
        self._debts = {at: debts for at, debts in self._debts.items() if at[0].alive}
        for key in [key for one, key in self._debts if one is router]:
            self.router_moved(router, key)

    def _check_live(self, router: Router, source: Source, held: tuple[int, int]) -> None:
        stream = source.stream
        if stream.epoch is None:
            raise Broken("live", f"{source.key} at {router.name} without an epoch")
        told = self._summaries.get((source.key, stream.epoch, stream.seq))
        if held != told:
            detail = f"{source.key} at {router.name}, message {stream.seq} of {stream.epoch}"
            raise Broken("live", f"{detail}: holds {held}, told {told}")

    def _check_debts(self, router: Router, source: Source) -> None:
        debts = self._debts.get((router, source.key))
        if not debts:
            return
        stream, now_s = source.stream, router.clock_s()
        at = (stream.epoch, stream.seq)
        if stream.epoch is not None:
            # What nobody will ever tell is no debt: a lower epoch has taken over from a silent one.
            if stream.epoch < self._epochs.get((router, source.key), stream.epoch):
                debts.clear()
            self._epochs[router, source.key] = stream.epoch
            debts[:] = [one for one in debts if (one.epoch, one.seq) > at]
        awake = self.now_s - router.woke_at_s > _SLACK_S
        live_s_max = FALSE_LIVE_S + _SLACK_S + self._beat_age_s.get((router, source.key), 0.0)
        for debt in debts:
            if debt.live and awake:
                debt.live_s += now_s - debt.counted_at_s
            debt.counted_at_s, debt.live = now_s, stream.state is StreamState.LIVE
            if debt.live_s > live_s_max:
                raise Broken("false live", f"{source.key} at {router.name}: {debt}")

    def _check_quiet(self) -> None:
        """The end: everything agrees."""
        for relay in (relay for worker in self._workers for relay in worker.relays):
            for shell in relay.shells:
                self.counts["ledger believed"] += shell.rank.counts["saved_ledger_resumed"]
                self.counts["ledger dropped"] += shell.rank.counts["saved_ledger_dropped"]
        for router in self.routers:
            if router.recovery_count:
                raise Broken("quiet", f"{router.name} still recovers: {router.view!r}")
            for worker in self._workers:
                for shell in worker.relays[-1].shells:
                    self._check_stream(router, shell)

    def _check_stream(self, router: Router, shell: RankShell) -> None:
        where = f"{shell.key} at {router.name}"
        source = router.view.sources.get(shell.key)
        if source is None:
            raise Broken("quiet", f"{where} is unknown")
        stream, rank, index = source.stream, shell.rank, router.view.index
        if stream.state is not StreamState.LIVE:
            raise Broken("quiet", f"{where} is {stream.state}: {stream.reason}")
        ours = (stream.epoch, stream.seq, stream.complete, index.digest(source.slot))
        theirs = (rank.outbox.epoch, rank.outbox.seq, rank.complete, rank.ledger.digest())
        if ours != theirs:
            raise Broken("quiet", f"{where} is at {ours}, its relay at {theirs}")
        self.counts["complete" if stream.complete else "partial"] += 1
        held = shell.engine.told.held
        for tier in Tier:
            true = np.array([prefix for one, prefix in sorted(held) if one is tier], np.uint64)
            count = index.count(source.slot, tier)
            # Removing the truth leaves nothing: no other question tells what an index holds.
            right = index.remove(source.slot, tier, true)
            if count != right or (stream.complete and right != len(true)):
                kind = "complete" if stream.complete else "partial"
                detail = f"{count} on {tier.name}, {right} of them right; {len(true)} are true"
                raise Broken("quiet", f"{where} is {kind} and holds {detail}")


def _placed(ledger: Ledger) -> Held:
    return frozenset((tier, prefix) for tier, hashes in ledger.placements() for prefix in hashes)


def _difference(ours: Held, true: Held, complete: bool) -> str | None:
    """How what we hold is wrong; None when it is not."""
    if ours == true or (not complete and ours < true):
        return None
    kind = "complete" if complete else "partial"
    return f"{kind}, with {len(ours - true)} blocks too many and {len(true - ours)} missing"


def command(seed: int) -> str:
    """What runs one seed again."""
    return f"make soak SEED={seed} RUNS=1"


def explain(seed: int, error: Exception, log: Sequence[tuple[object, ...]], lines: int = 30) -> str:
    """A failure, and how to see it again."""
    told = "\n".join("    " + " ".join(map(str, line)) for line in log[-lines:])
    return f"seed {seed}: {type(error).__name__}: {error}\n{told}\n    again: {command(seed)}"
