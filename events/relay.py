"""The relay: beside an engine, turns what it publishes into facts on NATS.

    engine ──ZMQ──> Rank (order, decode, count copies, number) ──NATS──> every router
    engine ──HTTP─> Probe ──> heartbeats

The shell around events/rank.py: sockets, timers, and nothing decided. It never pushes back on the
engine: what can't be sent is dropped and counted, and the stream's numbers show it. Of an engine
that publishes no events only heartbeats tell; its stream is empty.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import aiohttp
import zmq
import zmq.asyncio
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events import subjects
from events.broker import Broker, OnMessage
from events.endpoints import rank_endpoint
from events.engine_events import LoadSample
from events.engine_load import EngineIdentity, LoadUnreadable, sglang_load_stat
from events.facts import Epoch, Heartbeat, Unreadable, decode_snapshot_request, encode
from events.kept_map import Source
from events.ledger import canonical_block_size
from events.map_keeper import MapKeeper, map_path
from events.probe import Probe
from events.rank import EngineState, Publish, Rank, RankEffect, Replay
from events.settings import EngineSettings
from events.tasks import OnFailure, Tasks
from events.warmer import Warmer
from events.zmq_framing import (
    LiveMessage,
    ReplayEnd,
    ReplayPart,
    parse_live,
    parse_replay,
    replay_request,
)
from indexer.identity import WorkerKey

COALESCE_S = 0.002
BEAT_S = 1.0
PROBE_S = 0.5
IDENTITY_S = 30.0
HEALTH_S = 3.0
RECEIVE_QUEUE_MESSAGES = 100_000
OUT_MESSAGES_MAX = 1024
"""Waiting for the broker, each of 64 KiB at most: far more than the ring, so older ones are lost to
every router anyway."""
_HELLO_JITTER_S = 0.2
_REPLAY_QUIET_S = 2.0
_PING_MS = 1000
_PONG_MS = 3000
"""Between us and the engine's publisher, which has nothing to say while it is idle."""
_REPLAY_MESSAGES_MAX = 100_000
_REPLAY_BYTES_MAX = 512 * 1024 * 1024
_SUBSCRIBED_S = 0.1
"""Until a subscription stands at the engine; what slips through shows as a gap, and heals."""

log = logging.getLogger("kvroute.relay")


class _RankShell:
    """One rank's sockets and queues."""

    def __init__(self, key: WorkerKey, rank: Rank, events: str | None, replay: str | None) -> None:
        self.key = key
        self.rank = rank
        self.events = events
        """None: the engine publishes none."""
        self.replay = replay
        self.keeper: MapKeeper | None = None
        """None: the rank's map is kept nowhere."""
        self.out: deque[bytes] = deque()
        self.wake = asyncio.Event()
        self.warmer: Warmer | None = None
        """None: routers may have nothing computed ahead."""
        self.load: LoadSample | None = None
        self.sampled_at_s: float | None = None
        self.replaying: asyncio.Task[None] | None = None
        self.started = False


class Relay:
    """The relay of one engine, all its ranks."""

    def __init__(
        self,
        settings: EngineSettings,
        broker: Broker,
        *,
        fleet: str,
        clock: Callable[[], float],
        on_failure: OnFailure,
        rng: random.Random,
        state_dir: Path | None = None,
    ) -> None:
        """clock: Unix time in seconds that never goes back. state_dir: for maps to be kept in."""
        self.settings = settings
        self.counts: Counter[str] = Counter()
        """What went wrong at the sockets, and with the maps that are kept."""
        self._broker = broker
        self._fleet = fleet
        self._clock = clock
        self._rng = rng
        self._answered_at_s = -HEALTH_S
        self._probe: Probe | None = None
        self._session: aiohttp.ClientSession | None = None
        self._context = zmq.asyncio.Context()
        self._subscriptions: list[Subscription] = []
        self._tasks = Tasks(on_failure)
        self._keepers = Tasks(on_failure)
        epoch = Epoch(int(clock() * 1e9), rng.getrandbits(32))
        self._shells = [
            _RankShell(
                WorkerKey(settings.id, number),
                Rank(
                    settings.engine,
                    epoch,
                    has_replay=settings.replay is not None,
                    wanted_block_size=settings.block_size,
                ),
                rank_endpoint(settings.events, number) if settings.events else None,
                rank_endpoint(settings.replay, number) if settings.replay else None,
            )
            for number in range(settings.ranks)
        ]
        if state_dir is not None and settings.events is not None:
            for shell in self._shells:
                shell.keeper = MapKeeper(
                    map_path(state_dir, fleet, shell.key),
                    Source(shell.key, settings.engine, settings.block_size),
                    shell.rank,
                    clock,
                    self.counts,
                )

    @property
    def ranks(self) -> list[tuple[WorkerKey, Rank]]:
        return [(shell.key, shell.rank) for shell in self._shells]

    async def start(self) -> None:
        """Subscribes to the engine and answers routers. The broker must be connected."""
        for shell in self._shells:
            await self._listen(
                subjects.snapshot(self._fleet, shell.key), partial(self._snapshot_asked, shell)
            )
            if shell.events is not None:
                self._tasks.spawn(self._follow(shell, shell.events), f"events of {shell.key}")
            self._tasks.spawn(self._send(shell), f"facts of {shell.key}")
            if self.settings.load:
                self._tasks.spawn(self._follow_load(shell), f"load of {shell.key}")
        await self._listen(subjects.hello(self._fleet), self._hello_came)
        if (base := self.settings.http) is not None:
            self._session = aiohttp.ClientSession()
            self._probe = Probe(self._session, self.settings.engine, base, self.settings.mooncake)
            self._tasks.spawn(self._ask_engine(self._probe), f"probe of {self.settings.id}")
            if self.settings.warm:
                for shell in self._shells:
                    await self._let_warm(shell, self._session)
        self._tasks.spawn(self._beat(), f"beats of {self.settings.id}")
        log.info(
            "relay for %s: %s at %s", self.settings.id, self.settings.engine, self.settings.address
        )
        if self.settings.events is None:
            log.info("%s publishes no events: routers guess what it holds", self.settings.id)

    async def stop(self) -> None:
        """Ends all it started: another relay may speak for the engine from now on."""
        for subscription in self._subscriptions:
            await self._broker.unsubscribe(subscription)
        await self._tasks.close()
        for shell in self._shells:
            if shell.keeper is not None:
                await shell.keeper.finish()
        if self._session is not None:
            await self._session.close()
        self._context.destroy(linger=0)

    async def _let_warm(self, shell: _RankShell, session: aiohttp.ClientSession) -> None:
        """Routers may have a rank compute a prefix."""
        shell.warmer = Warmer(
            session,
            self.settings,
            shell.key,
            model=lambda: self._model(shell),
            is_busy=lambda: shell.load is not None and shell.load.waiting > 0,
            answer=self._broker.publish,
            counts=self.counts,
            tasks=self._tasks,
        )
        await self._listen(subjects.warm(self._fleet, shell.key), shell.warmer.asked)

    def _model(self, shell: _RankShell) -> str:
        """The engine's name for its model; empty as long as it has not told."""
        who = self._probe.identity if self._probe is not None else None
        return (who and who.model) or (shell.load and shell.load.model) or ""

    async def _listen(self, subject: str, listener: OnMessage) -> None:
        self._subscriptions.append(await self._broker.subscribe(subject, listener))

    def _perform(self, shell: _RankShell, effects: Sequence[RankEffect]) -> None:
        for effect in effects:
            match effect:
                case Publish(messages):
                    self._queue(shell, messages)
                case Replay(from_seq):
                    if shell.replaying is not None:
                        shell.replaying.cancel()
                    shell.replaying = self._tasks.spawn_task(
                        self._fetch_replay(shell, from_seq), f"replay of {shell.key}"
                    )
        shell.wake.set()

    def _queue(self, shell: _RankShell, messages: Sequence[bytes]) -> None:
        shell.out.extend(messages)
        while len(shell.out) > OUT_MESSAGES_MAX:
            shell.out.popleft()
            self.counts["unsent"] += 1

    async def _send(self, shell: _RankShell) -> None:
        """Publishes what the rank has, a moment after it came, so that small events share one."""
        subject = subjects.facts(self._fleet, shell.key)
        while True:
            await shell.wake.wait()
            await asyncio.sleep(COALESCE_S)
            shell.wake.clear()
            for effect in shell.rank.flush():
                if isinstance(effect, Publish):
                    self._queue(shell, effect.messages)
            while shell.out:
                await self._broker.publish(subject, shell.out.popleft())

    async def _follow(self, shell: _RankShell, endpoint: str) -> None:
        """Reads the engine's publisher for ever."""
        if shell.keeper is not None:
            await shell.keeper.resume()
            shell.keeper.start(self._keepers)
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        socket.setsockopt_string(zmq.SUBSCRIBE, self.settings.topic)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._tasks.spawn(self._watch(shell, monitor), f"connection of {shell.key}")
        if self.settings.events_bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        await asyncio.sleep(_SUBSCRIBED_S)
        self._perform(shell, shell.rank.start())
        shell.started = True
        while True:
            await asyncio.sleep(0)  # a message that waits is received without a turn of the loop
            message = parse_live(await socket.recv_multipart())
            if not isinstance(message, LiveMessage):
                self.counts["malformed_frame"] += 1
                log.warning("%s: %s", shell.key, message.reason)
                continue
            effects = shell.rank.on_message(message.sequence, message.payload, self._clock())
            self._perform(shell, effects)

    async def _watch(self, shell: _RankShell, monitor: zmq.asyncio.Socket) -> None:
        """Heals what was lost with a connection to the publisher, once there is another."""
        while True:
            await monitor.recv_multipart()
            if not shell.started:
                continue  # the first connection, which the rank's start makes good for
            await asyncio.sleep(_SUBSCRIBED_S)
            self._perform(shell, shell.rank.on_reconnected())

    async def _fetch_replay(self, shell: _RankShell, from_seq: int) -> None:
        """Asks the replay socket. It drops for slow readers, so the bound is on what we keep."""
        if shell.replay is None:
            return
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        parts: list[tuple[int, bytes]] = []
        ended = False
        size = 0
        try:
            socket.connect(shell.replay)
            await socket.send_multipart(replay_request(from_seq))
            for _ in range(_REPLAY_MESSAGES_MAX):
                await asyncio.sleep(0)  # as in _follow
                async with asyncio.timeout(_REPLAY_QUIET_S):
                    part = parse_replay(await socket.recv_multipart())
                match part:
                    case ReplayPart(sequence, payload):
                        parts.append((sequence, payload))
                        size += len(payload)
                        if size > _REPLAY_BYTES_MAX:
                            self.counts["replay_too_large"] += 1
                            log.warning("%s: replay cut off after %d bytes", shell.key, size)
                            break
                    case ReplayEnd():
                        ended = True
                        break
                    case _:
                        self.counts["malformed_frame"] += 1
        except TimeoutError:
            self.counts["replay_timeout"] += 1
            log.warning("%s: the replay socket %s fell silent", shell.key, shell.replay)
        finally:
            socket.close()
        shell.replaying = None
        count = len(parts)
        self._perform(shell, shell.rank.on_replay(parts, ended, self._clock()))
        parts.clear()  # what is applied is let go
        while shell.rank.state is EngineState.CATCHING_UP:
            await asyncio.sleep(0)
            self._perform(shell, shell.rank.catch_up(self._clock()))
        log.info("%s: %d batches replayed; %s", shell.key, count, shell.rank.summary())

    async def _follow_load(self, shell: _RankShell) -> None:
        """Reads SGLang's LoadStat feed for ever."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 100)
        socket.setsockopt_string(zmq.SUBSCRIBE, "")
        socket.connect(rank_endpoint(self.settings.load or "", shell.key.dp_rank))
        while True:
            message = parse_live(await socket.recv_multipart())
            if not isinstance(message, LiveMessage):
                self.counts["malformed_frame"] += 1
                continue
            try:
                _, shell.load = sglang_load_stat(
                    message.payload, self._engine_block_size(shell) or 1
                )
            except LoadUnreadable:
                self.counts["malformed_load"] += 1
                continue
            shell.sampled_at_s = self._clock()

    async def _ask_engine(self, probe: Probe) -> None:
        """Asks for load, and now and then for identity, for ever."""
        identity_at_s = 0.0
        while True:
            now_s = self._clock()
            due = probe.identity is None or now_s - identity_at_s >= IDENTITY_S
            if due and await probe.ask_identity():
                identity_at_s = now_s
            if probe.identity is not None and await probe.ask_load():
                self._loads_came(probe)
            elif probe.trouble:
                self.counts["engine_silent"] += 1
                identity_at_s = 0.0  # it may come back as another one
            await asyncio.sleep(PROBE_S)

    def _loads_came(self, probe: Probe) -> None:
        now_s = self._clock()
        if now_s - self._answered_at_s >= HEALTH_S:
            log.info("%s answers", self.settings.id)
        self._answered_at_s = now_s
        for shell in self._shells:
            load = probe.loads.get(shell.key.dp_rank)
            if load is None:
                continue
            if not self.settings.load:
                shell.load = load
                shell.sampled_at_s = now_s
            if load.process_start_s is not None:
                effects = shell.rank.on_process_start(load.process_start_s, now_s)
                if effects:
                    log.warning("%s: the engine has restarted", shell.key)
                    self._perform(shell, effects)

    async def _beat(self) -> None:
        while True:
            for shell in self._shells:
                await self._tell(shell)
            await asyncio.sleep(BEAT_S)

    async def _tell(self, shell: _RankShell) -> None:
        """A heartbeat, and a beat after all that is gathered."""
        now_s = self._clock()
        heartbeat = encode(self._heartbeat(shell, now_s))
        await self._broker.publish(subjects.load(self._fleet, shell.key), heartbeat)
        self._perform(shell, shell.rank.beat(now_s))

    async def _hello_came(self, _message: Msg) -> None:
        await asyncio.sleep(self._rng.uniform(0, _HELLO_JITTER_S))
        for shell in self._shells:
            await self._tell(shell)

    async def _snapshot_asked(self, shell: _RankShell, message: Msg) -> None:
        request = decode_snapshot_request(message.data)
        if isinstance(request, Unreadable):
            self.counts["malformed_request"] += 1
            return
        effects, chunk = shell.rank.answer(request, self._clock())
        self._perform(shell, effects)
        if message.reply:
            await self._broker.publish(message.reply, encode(chunk))

    def _engine_block_size(self, shell: _RankShell) -> int | None:
        """Tokens a block of the engine; None as long as nothing has told."""
        told = shell.rank.ledger.engine_block_size
        if told is None and shell.load is not None:
            told = shell.load.block_size
        if told is None and self._probe is not None and self._probe.identity is not None:
            told = self._probe.identity.block_size
        return told

    def _heartbeat(self, shell: _RankShell, now_s: float) -> Heartbeat:
        settings = self.settings
        who = (self._probe.identity if self._probe else None) or EngineIdentity()
        load = shell.load or LoadSample()
        engine_size = self._engine_block_size(shell)
        size = canonical_block_size(engine_size, settings.block_size) if engine_size else None
        scale = engine_size / size if engine_size and size else 0.0
        total = load.total_blocks or who.total_blocks
        priority = settings.priority_scheduling or bool(who.priority_scheduling)
        lower_first = settings.engine == "vllm" or bool(who.low_priority_first)
        healthy = self._probe is None or now_s - self._answered_at_s < HEALTH_S
        return Heartbeat(
            epoch=shell.rank.outbox.epoch,
            address=settings.address,
            engine=settings.engine,
            engine_version=who.version or "",
            model=settings.model or load.model or who.model or "",
            model_aliases=tuple(dict.fromkeys((*settings.model_aliases, *who.aliases))),
            lora_names=who.lora_names,
            max_model_len=who.max_model_len or 0,
            block_size=size or 0,
            engine_block_size=engine_size or 0,
            role=settings.role or who.role or "both",
            kv_connector=settings.kv_connector,
            kv_engine_id=self._kv_engine_id(shell.key.dp_rank),
            bootstrap_host=settings.bootstrap_host,
            bootstrap_port=settings.bootstrap_port or who.bootstrap_port or 0,
            labels=settings.labels,
            multi_rank=settings.ranks > 1,
            priority_scheduling=("lower" if lower_first else "higher") if priority else "",
            healthy=healthy,
            events=settings.events is not None,
            warms=shell.warmer is not None,
            running=load.running,
            waiting=load.waiting,
            used_blocks=None if load.used_blocks is None else load.used_blocks * scale,
            total_blocks=int(total * scale) if total and scale else None,
            total_slots=settings.slots or load.total_slots or who.total_slots,
            preemptions=load.preemptions,
            sampled_at_s=shell.sampled_at_s,
            sent_at_s=now_s,
            warnings=tuple(self._warnings(shell, engine_size)),
        )

    def _kv_engine_id(self, rank: int) -> str:
        """As vLLM names a rank to others; empty: unknown."""
        settings = self.settings
        who = (self._probe.identity if self._probe else None) or EngineIdentity()
        configured = settings.kv_engine_id
        if configured and settings.ranks > 1:
            configured += f"_dp{rank}"
        return who.kv_engine_ids.get(rank) or configured

    def _warnings(self, shell: _RankShell, engine_size: int | None) -> list[str]:
        """What an operator should mend, a sentence each."""
        told = []
        dropped = shell.rank.counts
        if dropped["block_size_unsuitable"]:
            told.append(
                f"blocks of {engine_size} tokens can be neither split nor merged to"
                f" {self.settings.block_size}: nothing of this worker is indexed"
            )
        if dropped["unnamed_lora"]:
            told.append("the engine names LoRAs by number only: their blocks are not indexed")
        if dropped["unknown_medium"]:
            told.append("the engine names a medium that kvroute doesn't know")
        if dropped["malformed"]:
            told.append("the engine sends events that kvroute can't read")
        if (
            self.settings.mooncake is not None
            and self.settings.role != "decode"
            and not self._kv_engine_id(shell.key.dp_rank)
        ):
            told.append(
                f"{self.settings.mooncake} doesn't tell Mooncake's engine_id, and none is"
                " configured: this worker hands nothing over"
            )
        if self._probe is not None and self._probe.trouble:
            told.append(f"the engine's HTTP: {self._probe.trouble}")
        return told
