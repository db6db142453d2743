"""The relay: beside an engine, turns what it publishes into facts on NATS.

    engine ──ZMQ──> Rank (order, decode, count copies, number) ──NATS──> every router
    engine ──HTTP─> Probe ──> heartbeats

The shell around events/relay/rank.py: sockets, timers, and nothing decided. It never pushes back
on the engine: what can't be sent is dropped and counted, and the stream's numbers show it. Of an
engine that publishes no events only heartbeats tell; its stream is empty.

Law: nothing that an engine, a router or an endpoint does ends a relay or anything beside it. Each
piece of work that fails is counted, retried with a back-off, and shown as a warning of its worker;
beats go on meanwhile. After `stop`, no socket, session or task of it is left.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path

import aiohttp
import zmq.asyncio
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.engines.endpoints import masked, rank_endpoint
from events.engines.events import LoadSample
from events.engines.load import EngineIdentity, LoadUnreadable, sglang_load_stat
from events.engines.probe import Probe, http_session
from events.engines.salts import tells_salts
from events.engines.sockets import SUBSCRIBED_S, ReplayAnswer, ask_replay
from events.engines.sockets import Subscription as EngineSubscription
from events.engines.zmq_framing import LiveMessage, parse_live
from events.plane import subjects
from events.plane.broker import Broker, OnMessage
from events.plane.facts import (
    Epoch,
    Heartbeat,
    SnapshotRequest,
    Unreadable,
    decode,
    encode,
    encode_heartbeat,
)
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor
from events.relay.ledger import canonical_block_size
from events.relay.ledger_file import MapKeeper, map_path
from events.relay.rank import EngineState, Publish, Rank, RankEffect, Replay
from events.relay.saved_ledger import Source
from events.relay.together import together
from events.relay.warmer import Warmer
from indexer.identity import WorkerKey

COALESCE_S = 0.002
BEAT_S = 1.0
PROBE_S = 0.5
IDENTITY_S = 30.0
HEALTH_S = 3.0
RELAY_FAILING = "relay_failing"
"""Code of the warning for work of ours that fails."""
RANKS = "ranks"
"""Code of the warning for data-parallel ranks that are not as configured."""
WARNINGS_MAX = 64
WARNING_CHARS_MAX = 300
"""Of one sentence, as routers show it."""
BLOCKS_MAX = 1e9
"""Canonical blocks of a rank, as heartbeats take them (events/plane/facts.py)."""
OUT_MESSAGES_MAX = 1024
"""Waiting for the broker, each of 64 KiB at most: far more than the ring, so older ones are lost to
every router anyway."""
_HELLO_JITTER_S = 0.2

log = logging.getLogger("kvroute.relay")


class _RankShell:
    """One rank's sockets and queues."""

    def __init__(self, key: WorkerKey, rank: Rank, supervisor: Supervisor) -> None:
        self.key = key
        self.rank = rank
        self.supervisor = supervisor
        self.keeper: MapKeeper | None = None
        """None: the rank's map is kept nowhere."""
        self.out: deque[bytes] = deque()
        self.wake = asyncio.Event()
        """There is something to send."""
        self.beat_now = asyncio.Event()
        """The next heartbeat doesn't wait for its time."""
        self.warmer: Warmer | None = None
        """None: routers may have nothing computed ahead."""
        self.load: LoadSample | None = None
        self.sampled_at_s: float | None = None
        self.replaying: asyncio.Task[None] | None = None
        self.resumed = False
        """A map that was kept has been read."""
        self.started = False
        """A subscription has stood at the engine."""


class Relay:
    """The relay of one engine, all its ranks."""

    def __init__(
        self,
        settings: EngineSettings,
        broker: Broker,
        *,
        fleet: str,
        clock: Callable[[], float],
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
        self.heard = settings.http is None and settings.events is None
        """Whether the engine has ever answered, over HTTP or ZMQ; one without either can't."""
        self._answered_at_s = -HEALTH_S
        self._refused = False
        self._probed = settings.http is None
        """Whether a probe has ended; until then nothing is known of the engine."""
        """The engine's HTTP port refused a connection, and nothing has answered since."""
        self._identified = asyncio.Event()
        self._identity_due = asyncio.Event()
        self._mooncake_due = asyncio.Event()
        """The engine may be another one than before."""
        self._probe: Probe | None = None
        self._session: aiohttp.ClientSession | None = None
        self._context = zmq.asyncio.Context()
        self._subscriptions: list[Subscription] = []
        self._supervisor = self._supervised(settings.id)
        self._keepers = self._supervised(settings.id)
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
                self._supervised(str(WorkerKey(settings.id, number))),
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

    @property
    def failures(self) -> Counter[str]:
        """Piece of work -> how often it failed."""
        supervisors = (self._supervisor, self._keepers, *(one.supervisor for one in self._shells))
        return sum((one.failures for one in supervisors), Counter[str]())

    async def start(self) -> None:
        """Subscribes to the engine and answers routers. The broker must be connected.

        Never raises: what fails is tried again in the background.
        """
        settings = self.settings
        for shell in self._shells:
            keep = shell.supervisor.keep
            await self._listen(
                subjects.snapshot(self._fleet, shell.key),
                partial(self._snapshot_asked, shell),
                "snapshot",
                shell.supervisor,
            )
            if settings.events is not None:
                _ = keep(partial(self._follow, shell, settings.events), "events")
            if settings.load is not None:
                _ = keep(partial(self._follow_load, shell, settings.load), "load_feed")
            _ = keep(partial(self._send, shell), "facts")
        await self._listen(subjects.hello(self._fleet), self._hello_came, "hello", self._supervisor)
        if settings.http is not None:
            await self._probe_engine(settings.http)
        for shell in self._shells:
            _ = shell.supervisor.keep(partial(self._beat, shell), "beats")
        log.info("relay for %s: %s at %s", settings.id, settings.engine, masked(settings.address))
        if settings.events is None:
            log.info("%s publishes no events: routers guess what it holds", settings.id)

    async def stop(self) -> None:
        """Ends all it started: another relay may speak for the engine from now on."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)
            if self._session is not None:
                stack.push_async_callback(self._session.close)
            stack.push_async_callback(self._keepers.close)
            for shell in self._shells:
                if shell.keeper is not None:
                    stack.push_async_callback(shell.keeper.finish)
            for supervisor in (self._supervisor, *(one.supervisor for one in self._shells)):
                stack.push_async_callback(supervisor.close)
            for subscription in self._subscriptions:
                stack.push_async_callback(self._broker.unsubscribe, subscription)

    def _supervised(self, scope: str) -> Supervisor:
        return Supervisor(scope, self._rng, on_trouble=self._count_failure)

    def _count_failure(self, work: str, _error: Exception) -> None:
        self.counts[f"{work}_failed"] += 1

    async def _probe_engine(self, base: str) -> None:
        """Asks the engine's HTTP pages from now on."""
        self._session = http_session()
        probe = Probe(
            self._session, self.settings.engine, base, self.settings.mooncake, self.counts
        )
        self._probe = probe
        keep = self._supervisor.keep
        _ = keep(partial(self._ask_identity, probe), "identity")
        _ = keep(partial(self._ask_load, probe), "load")
        if self.settings.mooncake is not None:
            _ = keep(partial(self._ask_mooncake, probe), "mooncake")
        if self.settings.warm:
            for shell in self._shells:
                await self._let_warm(shell, self._session)

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
            supervisor=shell.supervisor,
        )
        await self._listen(
            subjects.warm(self._fleet, shell.key), shell.warmer.asked, "warm", shell.supervisor
        )

    def _model(self, shell: _RankShell) -> str:
        """The engine's name for its model; empty as long as it has not told."""
        who = self._probe.identity if self._probe is not None else None
        return (who and who.model) or (shell.load and shell.load.model) or ""

    async def _listen(
        self, subject: str, listener: OnMessage, work: str, supervisor: Supervisor
    ) -> None:
        """Has messages on a subject call the listener, whose failures cost that message."""

        async def guarded(message: Msg) -> None:
            try:
                await listener(message)
            except Exception as error:  # the worker's trouble, and not the connection's
                supervisor.failed(work, error)

        async def subscribe() -> None:
            self._subscriptions.append(await self._broker.subscribe(subject, guarded))

        try:
            await subscribe()
        except Exception as error:  # as the law says: tried again, and nobody else's trouble
            supervisor.failed(work, error)
            _ = supervisor.keep(subscribe, work)

    def _perform(self, shell: _RankShell, effects: Sequence[RankEffect]) -> None:
        for effect in effects:
            match effect:
                case Publish(messages):
                    self._queue(shell, messages)
                case Replay(from_seq):
                    if shell.replaying is not None:
                        shell.replaying.cancel()
                    shell.replaying = shell.supervisor.keep(
                        partial(self._fetch_replay, shell, from_seq), "replay"
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

    async def _follow(self, shell: _RankShell, base: str) -> None:
        """Reads the engine's publisher until the connection to it breaks for good."""
        if shell.keeper is not None and not shell.resumed:
            shell.resumed = True
            await shell.keeper.resume()
            shell.keeper.start(self._keepers)
        publisher = EngineSubscription(
            self._context,
            rank_endpoint(base, shell.key.dp_rank),
            topic=self.settings.topic,
            bind=self.settings.events_bind,
        )
        try:
            await together(
                self._read(shell, publisher), publisher.watch(partial(self._connected, shell))
            )
        finally:
            publisher.close()

    async def _read(self, shell: _RankShell, publisher: EngineSubscription) -> None:
        await asyncio.sleep(SUBSCRIBED_S)
        rank = shell.rank
        self._perform(shell, rank.on_reconnected() if shell.started else rank.start())
        shell.started = True
        await self._catch_up(shell)  # with what an attempt before this one has left
        while True:
            message = parse_live(await publisher.receive())
            if not isinstance(message, LiveMessage):
                self.counts["malformed_frame"] += 1
                log.warning("%s: %s", shell.key, message.reason)
                continue
            now_s = self._clock()
            step = partial(shell.rank.on_message, message.sequence, message.payload, now_s)
            self._perform(shell, self._applied(shell, step, now_s))
            await self._catch_up(shell)

    def _applied(
        self, shell: _RankShell, step: Callable[[], list[RankEffect]], now_s: float
    ) -> list[RankEffect]:
        """Raises what the rank raises: then it has lost track, which it tells routers."""
        try:
            return step()
        except Exception:
            self._perform(shell, shell.rank.on_failure(now_s))
            raise

    def _connected(self, shell: _RankShell) -> None:
        """Heals what was lost with a connection to the publisher, once there is another."""
        self.heard = True
        if shell.started:  # the rank's start makes good for the first connection
            self._perform(shell, shell.rank.on_reconnected())

    async def _fetch_replay(self, shell: _RankShell, from_seq: int) -> None:
        """Asks the replay socket, and goes on with what it has answered, be it nothing."""
        answer = ReplayAnswer()
        if shell.rank.state is EngineState.HEALING:
            try:
                endpoint = rank_endpoint(self.settings.replay or "", shell.key.dp_rank)
                await ask_replay(self._context, endpoint, from_seq, answer)
            except Exception as error:  # live messages wait for the answer, so there must be one
                shell.supervisor.failed("replay", error)
        self.counts["malformed_frame"] += answer.malformed
        count = len(answer.parts)
        if answer.trouble:
            self.counts[answer.trouble] += 1
            log.warning("%s: %s after %d batches", shell.key, answer.trouble, count)
        effects = shell.rank.on_replay(answer.parts, answer.ended, self._clock())
        answer.parts.clear()  # what is applied is let go
        shell.replaying = None
        self._perform(shell, effects)
        await self._catch_up(shell)
        log.info("%s: %d batches replayed; %s", shell.key, count, shell.rank.summary())

    async def _catch_up(self, shell: _RankShell) -> None:
        """Applies what is too long for one turn of the loop, a slice a turn. Messages that the
        engine sends meanwhile wait in the socket's queue, or in the rank."""
        while shell.rank.state is EngineState.CATCHING_UP:
            await asyncio.sleep(0)
            now_s = self._clock()
            step = partial(shell.rank.catch_up, now_s)
            self._perform(shell, self._applied(shell, step, now_s))
        while shell.rank.sweep():  # noqa: ASYNC110  # the loop turns between two slices of work
            await asyncio.sleep(0)

    async def _follow_load(self, shell: _RankShell, base: str) -> None:
        """Reads SGLang's LoadStat feed until the connection to it breaks for good."""
        feed = EngineSubscription(self._context, rank_endpoint(base, shell.key.dp_rank))
        try:
            await together(self._read_load(shell, feed), feed.watch(lambda: None))
        finally:
            feed.close()

    async def _read_load(self, shell: _RankShell, feed: EngineSubscription) -> None:
        while True:
            message = parse_live(await feed.receive())
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

    async def _ask_identity(self, probe: Probe) -> None:
        """Asks the engine for its identity, for ever: beside the load, so that neither delays the
        other."""
        while True:
            self._identity_due.clear()
            answered = await probe.ask_identity()
            self._heard(probe, answered=answered)
            if answered:
                self._identified.set()
            elif not self._identified.is_set():
                self.counts["engine_silent"] += 1
            await _within(self._identity_due, IDENTITY_S if answered else PROBE_S)

    async def _ask_load(self, probe: Probe) -> None:
        """Asks the engine for its load, for ever."""
        await self._identified.wait()  # SGLang's load is in tokens, and its identity has the size
        while True:
            answered = await probe.ask_load()
            self._heard(probe, answered=answered)
            if answered:
                self._loads_came(probe)
            else:
                self.counts["engine_silent"] += 1
                self._identity_due.set()  # it may come back as another one
                self._mooncake_due.set()
            await asyncio.sleep(PROBE_S)

    async def _ask_mooncake(self, probe: Probe) -> None:
        """Asks Mooncake's bootstrap server for the engine's name there, for ever."""
        while True:
            self._mooncake_due.clear()
            answered = await probe.ask_mooncake()
            await _within(self._mooncake_due, IDENTITY_S if answered else PROBE_S)

    def _heard(self, probe: Probe, *, answered: bool) -> None:
        """Any usable answer shows that the engine works; a refused connection, that it is gone.
        A change of health is told at once, and so is how the first probe ended."""
        now_s = self._clock()
        before = self._probed, self._is_healthy(now_s)
        self._refused, self._probed = probe.refused, True
        if answered:
            if now_s - self._answered_at_s >= HEALTH_S:
                log.info("%s answers", self.settings.id)
            self._answered_at_s = now_s
            self.heard = True
        if (True, self._is_healthy(now_s)) != before:
            for shell in self._shells:
                shell.beat_now.set()

    def _is_healthy(self, now_s: float) -> bool:
        if self._probe is None:
            return True
        return not self._refused and now_s - self._answered_at_s < HEALTH_S

    def _loads_came(self, probe: Probe) -> None:
        now_s = self._clock()
        for shell in self._shells:
            load = probe.loads.get(shell.key.dp_rank)
            if load is None:
                continue
            if not self.settings.load:
                if shell.sampled_at_s is None:
                    shell.beat_now.set()  # until then it looks idle
                shell.load = load
                shell.sampled_at_s = now_s
            if load.process_start_s is not None:
                effects = shell.rank.on_process_start(load.process_start_s, now_s)
                if effects:
                    log.warning("%s: the engine has restarted", shell.key)
                    self._perform(shell, effects)

    async def _beat(self, shell: _RankShell) -> None:
        while True:
            shell.beat_now.clear()
            await self._tell(shell)
            await _within(shell.beat_now, BEAT_S)

    async def _tell(self, shell: _RankShell) -> None:
        """A heartbeat, and a beat after all that is gathered."""
        now_s = self._clock()
        if heartbeat := self._readable_heartbeat(shell, now_s):
            await self._broker.publish(subjects.load(self._fleet, shell.key), heartbeat)
        self._perform(shell, shell.rank.beat(now_s))

    def _readable_heartbeat(self, shell: _RankShell, now_s: float) -> bytes:
        """A heartbeat; a bare one where routers couldn't read the whole; or empty."""
        try:
            return encode_heartbeat(self._heartbeat(shell, now_s))
        except Exception as error:  # beats go on, whatever the engine has said
            shell.supervisor.failed("heartbeat", error)
        try:
            return encode_heartbeat(self._bare_heartbeat(shell, now_s))
        except Exception as error:
            shell.supervisor.failed("heartbeat", error)
        return b""

    async def _hello_came(self, _message: Msg) -> None:
        await asyncio.sleep(self._rng.uniform(0, _HELLO_JITTER_S))
        for shell in self._shells:
            shell.beat_now.set()

    async def _snapshot_asked(self, shell: _RankShell, message: Msg) -> None:
        request = decode(SnapshotRequest, message.data)
        if isinstance(request, Unreadable):
            self.counts["malformed_request"] += 1
            return
        while True:
            effects, answer = shell.rank.answer(request, self._clock())
            self._perform(shell, effects)
            if not isinstance(answer, SnapshotRequest):
                break
            request = answer
            await asyncio.sleep(0)
        if message.reply:
            await self._broker.publish(message.reply, encode(answer))

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
        used = None if load.used_blocks is None else self._canonical(load.used_blocks, scale)
        total = self._canonical(load.total_blocks or who.total_blocks or 0, scale)
        priority = settings.priority_scheduling or bool(who.priority_scheduling)
        lower_first = settings.engine == "vllm" or bool(who.low_priority_first)
        coded, plain = self._coded_warnings(shell), self._warnings(shell, engine_size)
        return Heartbeat(
            epoch=shell.rank.outbox.epoch,
            address=settings.address,
            engine=settings.engine,
            engine_version=who.version or "",
            model=settings.model or load.model or who.model or "",
            model_aliases=tuple(dict.fromkeys((*settings.model_aliases, *who.aliases))),
            lora_names=who.lora_names,
            loads_loras=settings.loads_loras,
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
            healthy=self._is_healthy(now_s),
            probed=self._probed,
            events=settings.events is not None,
            tells_salts=tells_salts(settings.engine, who.version or ""),
            warms=shell.warmer is not None,
            running=load.running,
            waiting=load.waiting,
            used_blocks=used,
            total_blocks=int(total) if total else None,
            total_slots=settings.slots or load.total_slots or who.total_slots,
            token_budget=who.token_budget,
            preemptions=load.preemptions,
            sampled_at_s=shell.sampled_at_s,
            sent_at_s=now_s,
            warnings=_bounded((*(sentence for _, sentence in coded), *plain)),
            warning_codes=_bounded(code for code, _ in coded),
        )

    def _bare_heartbeat(self, shell: _RankShell, now_s: float) -> Heartbeat:
        """Nothing of what the engine says, and little of what the operator does: the worker is
        shown with its warnings, and gets no requests."""
        coded = self._coded_warnings(shell)
        return Heartbeat(
            epoch=shell.rank.outbox.epoch,
            address=self.settings.address,
            engine=self.settings.engine,
            multi_rank=self.settings.ranks > 1,
            healthy=False,
            events=self.settings.events is not None,
            sent_at_s=now_s,
            warnings=_bounded(sentence for _, sentence in coded),
            warning_codes=_bounded(code for code, _ in coded),
        )

    def _canonical(self, blocks: float, scale: float) -> float | None:
        """Canonical blocks; None for more than any engine has, so that a heartbeat takes it."""
        if blocks * scale <= BLOCKS_MAX:
            return blocks * scale
        self.counts["implausible_load"] += 1
        return None

    def _kv_engine_id(self, rank: int) -> str:
        """As vLLM names a rank to others; empty: unknown."""
        settings = self.settings
        who = (self._probe.identity if self._probe else None) or EngineIdentity()
        configured = settings.kv_engine_id
        if configured and settings.ranks > 1:
            configured += f"_dp{rank}"
        return who.kv_engine_ids.get(rank) or configured

    def _coded_warnings(self, shell: _RankShell) -> list[tuple[str, str]]:
        """(code, sentence) of what has a code of its own in router/health/warnings.py."""
        troubles = {**self._supervisor.troubles(), **shell.supervisor.troubles()}
        told = [
            (RELAY_FAILING, f"its relay fails at its {work}, and retries: {error}")
            for work, error in sorted(troubles.items())
        ]
        if ranks := self._ranks_mismatch(shell):
            told.append((RANKS, ranks))
        return told

    def _ranks_mismatch(self, shell: _RankShell) -> str:
        """Why the configured ranks can't be the engine's; empty when they can."""
        configured = self.settings.ranks
        probe = self._probe
        engine_ranks = None
        if probe is not None and probe.identity is not None:
            engine_ranks = probe.identity.dp_ranks or len(probe.loads) or None
        if engine_ranks is not None and engine_ranks != configured:
            return (
                f"its engine has {engine_ranks} data-parallel ranks, but its relay is configured"
                f" with ranks: {configured}; set ranks to the engine's number"
            )
        told = shell.rank.engine_rank
        # One rank may be an engine of its own behind another balancer; SGLang without DP attention
        # calls each rank 0.
        unsaid = configured == 1 or (told == 0 and self.settings.engine == "sglang")
        if told is not None and told != shell.key.dp_rank and not unsaid:
            return (
                f"the KV events at the endpoint of rank {shell.key.dp_rank} are those of the"
                f" engine's rank {told}: let events and replay name the endpoints of rank 0"
            )
        return ""

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


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Waits for an event, at most so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _bounded(texts: Iterable[str]) -> tuple[str, ...]:
    """As many warnings, of such a length, as a heartbeat may have; without lone surrogates."""
    return tuple(
        text[:WARNING_CHARS_MAX].encode("utf-8", "replace").decode()
        for text in islice(texts, WARNINGS_MAX)
    )
