"""Relays and routers of the simulation: the timers and sockets of events/relay/relay.py and
events/feed/feed.py in virtual time, around the real Rank and the real FleetView."""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from events.engines.sockets import REPLAY_QUESTIONS, REPLAY_QUIET_S, SUBSCRIBED_S
from events.feed.feed import _ANSWER_TIMEOUT_S, _JITTER_S, _TICK_S, CHUNKS_MAX, HELLO_S
from events.feed.fleet_view import FleetView, Pull
from events.plane.facts import (
    Beat,
    Epoch,
    FactsMessage,
    Heartbeat,
    Removed,
    SnapshotChunk,
    SnapshotRequest,
    Stored,
    Unreadable,
    decode,
    decode_stream,
    encode,
    unpack_hashes,
)
from events.relay.engine_pages import PROBE_S
from events.relay.rank import EngineState, Publish, Rank, RankEffect, Replay
from events.relay.saved_ledger import Source, UnusableLedger, pack, unpack
from events.relay.stream_publisher import BEAT_S, COALESCE_S, HELLO_JITTER_S
from indexer.identity import Tier, WorkerKey
from indexer.index import mix_digest
from tests.simulation.engine import Engine
from tests.simulation.faults import Options

UNIX_START_S = 1_700_000_000.0
BEAT_TIMEOUT_S = 3.0
_CONNECT_S_MAX = 0.08
_LOAD_S_MAX = 0.7
"""To read a map: a probe may be faster."""
_SLICE_S_MAX = 0.02
"""From one slice of a replay to the next."""
_TIERS = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
_request_decoder = msgspec.msgpack.Decoder(SnapshotRequest)

Work = Callable[[], None]
OnAnswer = Callable[[SnapshotChunk | None], None]


class Network(Protocol):
    """What a process has of the world."""

    now_s: float
    options: Options
    rng: random.Random
    counts: Counter[str]
    disk: dict[WorkerKey, bytes]

    def at(self, when_s: float, work: Work) -> None: ...
    def note(self, *what: object) -> None: ...
    def from_relay(
        self, shell: "RankShell", payload: bytes, facts: tuple[Epoch, int] | None, load: bool
    ) -> None: ...
    def from_router(
        self, router: "Router", key: WorkerKey, request: bytes, then: Callable[[bytes], None]
    ) -> bool: ...
    def hello(self, router: "Router") -> None: ...
    def told(self, shell: "RankShell", epoch: Epoch, seq: int) -> None: ...
    def nobody_could_tell(self, shell: "RankShell", seq: int, payload: bytes) -> bool: ...
    def rank_moved(self, shell: "RankShell") -> None: ...
    def router_moved(self, router: "Router", key: WorkerKey) -> None: ...
    def router_ticked(self, router: "Router") -> None: ...


class Process:
    """It may stall, its clock may stand still, its connection may break, it may end."""

    def __init__(self, world: Network, name: str, clock_behind_s: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.reachable = True
        """Whether its connection to the broker really works."""
        self.connected = True
        """Whether it thinks so."""
        self.woke_at_s = -1.0
        self._stalled = False
        self._waiting: deque[Work] = deque()
        self._clock_behind_s = clock_behind_s
        self._clock_stands_since_s: float | None = None

    def clock_s(self) -> float:
        """Its own Unix time."""
        stands = self._clock_stands_since_s
        return (
            UNIX_START_S + (self.world.now_s if stands is None else stands) - self._clock_behind_s
        )

    def later(self, delay_s: float, work: Work) -> None:
        self.world.at(self.world.now_s + delay_s, partial(self.do, work))

    def do(self, work: Work) -> None:
        """Does it now, or when a stall is over; never when the process has ended."""
        if self._stalled:
            self._waiting.append(work)
        elif self.alive:
            work()

    def stall(self, seconds: float) -> None:
        if not self._stalled:
            self._stalled = True
            self.world.at(self.world.now_s + seconds, self._wake)

    def stop_clock(self, seconds: float) -> None:
        """It never makes up for the time that it stood still."""
        if self._clock_stands_since_s is None:
            self._clock_stands_since_s = self.world.now_s
            self.world.at(self.world.now_s + seconds, self._start_clock)

    def _wake(self) -> None:
        self._stalled = False
        self.woke_at_s = self.world.now_s
        while self._waiting and self.alive:
            self._waiting.popleft()()

    def _start_clock(self) -> None:
        if self._clock_stands_since_s is not None:
            self._clock_behind_s += self.world.now_s - self._clock_stands_since_s
            self._clock_stands_since_s = None

    def end(self) -> None:
        self.alive = False
        self._waiting.clear()


class Mirror:
    """What the messages of a relay say, told one by one: an index of one worker."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    def apply(self, message: FactsMessage) -> None:
        for fact in message.facts:
            if isinstance(fact, Stored):
                self.held[_TIERS[fact.tier]].update(unpack_hashes(fact.hashes).tolist())
            elif isinstance(fact, Removed):
                self.held[_TIERS[fact.tier]].difference_update(unpack_hashes(fact.hashes).tolist())
            else:
                for tier in Tier:
                    if fact.tier is None or _TIERS[fact.tier] is tier:
                        self.held[tier].clear()

    def summary(self) -> tuple[int, int]:
        """Placements and digest."""
        xors = []
        for tier in Tier:
            total = 0
            for prefix in self.held[tier]:
                total ^= prefix
            xors.append(total)
        return sum(map(len, self.held.values())), mix_digest(*xors)


@dataclass(eq=False)
class RankShell:
    """One rank in a relay."""

    relay: "Relay"
    engine: Engine
    rank: Rank
    subscribed: bool = False
    started: bool = False
    early: list[tuple[int, bytes]] = field(default_factory=list)
    """What came before the rank was started."""
    arrives_s: float = 0.0
    """When the last message from the engine arrives: the wire keeps its order."""
    sent: dict["Router", float] = field(default_factory=dict)
    """When the last message to a router arrives there: a stream keeps its order."""
    replays: int = 0
    catching_up: bool = False
    """The next slice is due."""
    flushing: bool = False
    saved: object = None
    """The rank's position when its map was kept last."""
    loaded: Mirror | None = None
    """What the map held that this life began with."""
    mirror: Mirror = field(default_factory=Mirror)
    mirror_epoch: Epoch | None = None

    @property
    def key(self) -> WorkerKey:
        return self.engine.key


class Relay(Process):
    """One life of an engine's relay."""

    def __init__(
        self,
        world: Network,
        name: str,
        engines: Sequence[Engine],
        make_rank: type[Rank],
        started_s: Callable[[], float | None],
        clock_behind_s: float,
    ) -> None:
        """started_s: when the engine's process started, in Unix time; None: it doesn't answer."""
        super().__init__(world, name, clock_behind_s)
        self._started_s = started_s
        options = world.options
        epoch = Epoch(int(self.clock_s() * 1e9), world.rng.getrandbits(32))
        self.shells = []
        for engine in engines:
            rank = make_rank(
                "vllm",
                epoch,
                has_replay=options.has_replay,
                wanted_block_size=options.canonical_tokens,
            )
            rank.outbox._message_bytes = options.message_bytes
            rank.outbox._ring_bytes_max = options.relay_ring_bytes
            self.shells.append(RankShell(self, engine, rank))

    def start(self) -> None:
        for shell in self.shells:
            if self.world.options.keep_s is None:
                self._connect(shell)
            else:
                self.later(self.world.rng.uniform(0.0, _LOAD_S_MAX), partial(self._load, shell))
        if self.world.options.keep_s is not None:
            self.later(self.world.options.keep_s, self._keep)
        self._beat()
        if self.world.options.start_told:
            self.later(self.world.rng.uniform(0, PROBE_S), self._probe)

    def subscribe(self, shell: RankShell, after_s: float = 0.0) -> None:
        delay_s = after_s + self.world.rng.uniform(0, _CONNECT_S_MAX)
        self.later(delay_s, partial(setattr, shell, "subscribed", True))
        self.later(delay_s + SUBSCRIBED_S, partial(self._connected, shell))

    def _connected(self, shell: RankShell) -> None:
        self._perform(shell, shell.rank.on_reconnected())

    def hear(self, shell: RankShell, seq: int, payload: bytes) -> None:
        """The engine's publisher."""
        if not shell.started:
            shell.early.append((seq, payload))
            return
        if self.world.nobody_could_tell(shell, seq, payload):
            return
        self._perform(shell, shell.rank.on_message(seq, payload, self.clock_s()))
        self._catch_up_later(shell)

    def tell(self, shell: RankShell) -> None:
        """Heartbeat and beat."""
        now_s = self.clock_s()
        heartbeat = Heartbeat(
            epoch=shell.rank.outbox.epoch, address="a", engine="vllm", sent_at_s=now_s
        )
        self.world.from_relay(shell, encode(heartbeat), None, True)
        self._perform(shell, [Publish(shell.rank.beat(now_s))])

    def say_hello_back(self) -> None:
        self.later(self.world.rng.uniform(0, HELLO_JITTER_S), self._tell_all)

    def asked(self, shell: RankShell, request: bytes) -> bytes:
        """A router's question."""
        messages, chunk = shell.rank.answer(_request_decoder.decode(request), self.clock_s())
        self._perform(shell, [Publish(messages)])
        return encode(chunk)

    def stop(self) -> None:
        """Ends, not by accident."""
        self._save()
        self.end()

    def _connect(self, shell: RankShell) -> None:
        self.subscribe(shell)
        self.later(SUBSCRIBED_S, partial(self._start, shell))

    def _load(self, shell: RankShell) -> None:
        data = self.world.disk.get(shell.key)
        if data is not None:
            if self.world.rng.random() < self.world.options.map_torn:
                data = data[: self.world.rng.randrange(len(data))]
            try:
                checkpoint, ledger = unpack(self._source(shell), data)
            except UnusableLedger:
                self.world.counts["ledger torn"] += 1
                self.world.note("ledger torn", shell.key)
            else:
                self.world.note("ledger loaded", shell.key, checkpoint.seq)
                shell.loaded = Mirror()
                for tier, hashes in ledger.placements():
                    shell.loaded.held[tier].update(hashes)
                shell.rank.resume(checkpoint, ledger)
        self._connect(shell)

    def _keep(self) -> None:
        self._save()
        self.later(self.world.options.keep_s or 0.0, self._keep)

    def _save(self) -> None:
        if self.world.options.keep_s is None:
            return
        for shell in self.shells:
            position = shell.rank.position
            kept = None if position == shell.saved else shell.rank.kept(self.clock_s())
            if kept is not None:
                self.world.disk[shell.key] = pack(self._source(shell), *kept)
                shell.saved = position

    def _source(self, shell: RankShell) -> Source:
        return Source(shell.key, "vllm", self.world.options.canonical_tokens)

    def _start(self, shell: RankShell) -> None:
        shell.started = True
        self._perform(shell, shell.rank.start())
        early, shell.early = shell.early, []
        for seq, payload in early:
            self.hear(shell, seq, payload)

    def _beat(self) -> None:
        self._tell_all()
        self.later(BEAT_S, self._beat)

    def _tell_all(self) -> None:
        for shell in self.shells:
            self.tell(shell)

    def _probe(self) -> None:
        started_s = self._started_s()
        if started_s is not None:
            for shell in self.shells:
                self._perform(shell, shell.rank.on_process_start(started_s, self.clock_s()))
        self.later(PROBE_S, self._probe)

    def _perform(self, shell: RankShell, effects: Sequence[RankEffect]) -> None:
        for effect in effects:
            match effect:
                case Publish(messages):
                    for message in messages:
                        self._publish(shell, message)
                case Replay(from_seq):
                    self._fetch_replay(shell, from_seq)
        if not shell.flushing:
            shell.flushing = True
            self.later(COALESCE_S, partial(self._flush, shell))
        self.world.rank_moved(shell)

    def _flush(self, shell: RankShell) -> None:
        shell.flushing = False
        for message in shell.rank.flush():
            self._publish(shell, message)

    def _publish(self, shell: RankShell, payload: bytes) -> None:
        message, dropped = decode_stream(payload)
        assert message is not None
        assert not dropped
        if message.epoch != shell.mirror_epoch:
            shell.mirror_epoch, shell.mirror = message.epoch, Mirror()
            if isinstance(message, Beat) and message.seq:  # an epoch that begins with blocks
                assert shell.loaded is not None
                shell.mirror = shell.loaded
            self.world.told(shell, message.epoch, message.seq)
        if isinstance(message, Beat):
            self.world.from_relay(shell, payload, None, False)
            return
        shell.mirror.apply(message)
        self.world.told(shell, message.epoch, message.seq)
        self.world.from_relay(shell, payload, (message.epoch, message.seq), False)

    def _fetch_replay(self, shell: RankShell, from_seq: int) -> None:
        """Asks the replay socket; a question after this one makes its answer void."""
        shell.replays += 1
        delay_s = self.world.rng.uniform(0, self.world.options.replay_delay_s_max / 2)
        asked = partial(self._replay_asked, shell, shell.replays, from_seq, REPLAY_QUESTIONS)
        self.later(delay_s, asked)

    def _replay_asked(self, shell: RankShell, number: int, from_seq: int, questions: int) -> None:
        """questions: how many there still are, this one included."""
        options, rng = self.world.options, self.world.rng
        parts: list[tuple[int, bytes]] = []
        ended = shell.engine.up and rng.random() >= options.replay_unanswered
        if not ended and questions > 1:
            again = partial(self._replay_asked, shell, number, from_seq, questions - 1)
            self.later(REPLAY_QUIET_S, again)
            return
        if ended:
            parts = shell.engine.replay(from_seq)
            if parts and rng.random() < options.replay_hole:
                del parts[rng.randrange(len(parts))]
            if rng.random() < options.replay_cut_off:
                parts, ended = parts[: rng.randint(0, len(parts))], False
        delay_s = rng.uniform(0, options.replay_delay_s_max / 2)
        delay_s += 0.0 if ended else REPLAY_QUIET_S
        self.later(delay_s, partial(self._replay_came, shell, number, parts, ended))

    def _replay_came(
        self, shell: RankShell, number: int, parts: list[tuple[int, bytes]], ended: bool
    ) -> None:
        if number != shell.replays:
            return
        self.world.note("replay", shell.key, len(parts), ended)
        self._perform(shell, shell.rank.on_replay(parts, ended, self.clock_s()))
        self._catch_up_later(shell)

    def _catch_up_later(self, shell: RankShell) -> None:
        if shell.rank.state is EngineState.CATCHING_UP and not shell.catching_up:
            shell.catching_up = True
            self.later(self.world.rng.uniform(0.0, _SLICE_S_MAX), partial(self._catch_up, shell))

    def _catch_up(self, shell: RankShell) -> None:
        shell.catching_up = False
        self._perform(shell, shell.rank.catch_up(self.clock_s()))
        self._catch_up_later(shell)


@dataclass(eq=False)
class _Recovery:
    """One pull under way."""

    pull: Pull
    cancelled: bool = False
    messages: list[bytes] = field(default_factory=list)
    chunks: int = 0
    epoch: Epoch | None = None
    as_of: int | None = None


class Router(Process):
    """One life of a router, as far as it listens."""

    def __init__(self, world: Network, name: str, view: FleetView, clock_behind_s: float) -> None:
        super().__init__(world, name, clock_behind_s)
        self.view = view
        self._hello_at_s = 0.0
        self._recoveries: dict[WorkerKey, _Recovery] = {}

    def start(self) -> None:
        self.world.hello(self)
        self.later(_TICK_S, self._tick)

    def hear(self, key: WorkerKey, payload: bytes) -> None:
        """The facts subject."""
        self._recover(self.view.on_stream(key, payload, self.clock_s()))
        self._work()
        self.world.router_moved(self, key)

    def _work(self) -> None:
        """Applies what waits for its slice: the feed does so before it handles anything more."""
        while self.view.backlogged:
            self.view.work(self.clock_s())

    def hear_load(self, key: WorkerKey, payload: bytes) -> None:
        self.view.on_heartbeat(key, payload, self.clock_s())

    def resync(self, worker_id: str) -> None:
        self._recover(self.view.resync(worker_id, self.clock_s()))

    def notice(self, connected: bool) -> None:
        """Its connection came or went."""
        self.connected = connected
        now_s = self.clock_s()
        self.view.on_connection(connected, now_s)
        if connected and now_s - self._hello_at_s >= HELLO_S:
            self._hello_at_s = now_s
            self.world.hello(self)

    @property
    def recovery_count(self) -> int:
        return len(self._recoveries)

    def _tick(self) -> None:
        for key in self.view.tick(self.clock_s()):
            self.world.note("forgotten", self.name, key)
            if (one := self._recoveries.pop(key, None)) is not None:
                one.cancelled = True
        self.world.router_ticked(self)
        self.later(_TICK_S, self._tick)

    def _recover(self, pulls: list[Pull]) -> None:
        for pull in pulls:
            self.world.note("pull", self.name, *pull)
            if (running := self._recoveries.get(pull.worker)) is not None:
                running.cancelled = True
                self.view.unstage(pull.worker)
            one = self._recoveries[pull.worker] = _Recovery(pull)
            self.later(self.world.rng.uniform(0, _JITTER_S), partial(self._go_on, one))

    def _go_on(self, one: _Recovery) -> None:
        """Asks for the next chunk."""
        if one.cancelled:
            return
        if one.pull.from_seq is not None:
            request = SnapshotRequest(from_seq=one.pull.from_seq + len(one.messages))
        else:
            request = SnapshotRequest(chunk=one.chunks, epoch=one.epoch, as_of=one.as_of)
        self._ask(one.pull.worker, request, partial(self._answered, one))

    def _ask(self, key: WorkerKey, request: SnapshotRequest, then: OnAnswer) -> None:
        done = False

        def once(answer: bytes | None) -> None:
            nonlocal done
            if not done:
                done = True
                chunk = decode(SnapshotChunk, answer) if answer is not None else None
                then(None if isinstance(chunk, Unreadable) else chunk)

        if self.world.from_router(self, key, encode(request), once):
            self.later(_ANSWER_TIMEOUT_S, partial(once, None))
        else:
            self.later(0.001, partial(once, None))  # nobody listens there

    def _answered(self, one: _Recovery, chunk: SnapshotChunk | None) -> None:
        if one.cancelled:
            return
        again = self._next(one, chunk)
        self._work()
        if again is None:
            self._go_on(one)
            return
        key = one.pull.worker
        self.view.unstage(key)
        if self._recoveries.get(key) is one:
            del self._recoveries[key]
        self.world.router_moved(self, key)
        self._recover(again)

    def _next(self, one: _Recovery, chunk: SnapshotChunk | None) -> list[Pull] | None:
        """What the view makes of it; None: there is more to ask for. As in events/feed/feed.py."""
        view, pull, now_s = self.view, one.pull, self.clock_s()
        if chunk is None or chunk.expired or chunk.chunks > CHUNKS_MAX:
            return view.on_pull_failed(pull, "no answer" if chunk is None else "expired", now_s)
        if pull.from_seq is not None:
            one.messages += chunk.messages
            if chunk.chunks < 2 or not chunk.messages:
                return view.on_ring(pull.worker, chunk.epoch, one.messages, now_s)
            return None
        of = (chunk.epoch, chunk.as_of, chunk.chunk)
        if one.chunks and of != (one.epoch, one.as_of, one.chunks):
            return view.on_pull_failed(pull, "chunks of different snapshots", now_s)
        one.epoch, one.as_of = chunk.epoch, chunk.as_of
        one.chunks += 1
        if one.chunks < chunk.chunks:
            view.stage(pull.worker, chunk.facts)
            return None
        return view.on_snapshot(
            pull.worker, chunk.epoch, chunk.as_of, chunk.facts, chunk.complete, now_s
        )
