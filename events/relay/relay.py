"""The relay: runs beside an engine and turns its KV events into facts on NATS.

    engine ──ZMQ──> Rank (order, decode, count copies, number) ──NATS──> every router
    engine ──HTTP─> Probe ──> heartbeats

Does the I/O (sockets, timers) for events/relay/rank.py, which decides; the streams leave by
events/relay/stream_publisher.py. Nothing here pushes back on the engine: messages that can't be
sent are dropped and counted, and gaps in the stream's numbers show the loss. An engine without KV
events has heartbeats, and an empty stream.

Law: no engine, router or endpoint can end a relay or anything beside it. Each piece of work that
fails is counted, retried with a back-off, and shown as a warning of its worker; beats go on
meanwhile. After `stop`, no socket, session or task of the relay is left.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType

import aiohttp
import zmq.asyncio

from events.engines.access import EngineAccess
from events.engines.endpoints import masked, rank_endpoint
from events.engines.engine import ReadLoadFeed
from events.engines.events import LoadSample
from events.engines.pages.load import LoadUnreadable
from events.engines.sockets import SUBSCRIBED_S, ReplayAnswer, ask_replay
from events.engines.sockets import Subscription as EngineSubscription
from events.engines.table import READINGS
from events.engines.zmq_framing import LiveMessage, parse_live
from events.plane import subjects
from events.plane.broker import Broker, OnMessage
from events.plane.facts import Epoch
from events.plane.listening import Listening
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor
from events.plane.together import together
from events.relay.engine_pages import EnginePages
from events.relay.heartbeats import Heartbeats
from events.relay.ledger_file import LedgerSaver, saved_ledger_path
from events.relay.rank import EngineState, Publish, Rank, RankEffect, Replay
from events.relay.rank_shell import RankShell
from events.relay.saved_ledger import Source
from events.relay.stream_publisher import StreamPublisher
from events.relay.warmer import Warmer
from indexer.identity import WorkerKey

log = logging.getLogger("kvroute.relay")


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
        access: EngineAccess | None = None,
        own_numbers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """clock: Unix time in seconds that never goes back. state_dir: folder of saved ledgers.
        access: to the engine's HTTP server; None: it needs no key. own_numbers: engines.numbers."""
        self.settings = settings
        self._access = access or EngineAccess(settings.http or "")
        self.counts: Counter[str] = Counter()
        """Kind of failure -> failures of the sockets and of saved ledgers."""
        self._broker = broker
        self._fleet = fleet
        self._clock = clock
        self._rng = rng
        self._connected_once = False
        """Whether the engine's publisher has been connected."""
        self._context = zmq.asyncio.Context()
        self._listening = Listening()
        self._supervisor = self._supervised(settings.id)
        self._savers = self._supervised(settings.id)
        self._publisher = StreamPublisher[RankShell](
            broker,
            fleet=fleet,
            heartbeat=lambda shell, now_s: self._heartbeats.encoded(shell, now_s),
            counts=self.counts,
            clock=clock,
            rng=rng,
        )
        self._pages = EnginePages(
            settings,
            clock=clock,
            counts=self.counts,
            on_health=self._publisher.beat_soon,
            on_loads=self._loads_came,
            own_numbers=own_numbers,
        )
        of_all_ranks = self._supervisor, self._savers
        self._heartbeats = Heartbeats(settings, self._pages, of_all_ranks, self.counts)
        epoch = Epoch(int(clock() * 1e9), rng.getrandbits(32))
        self._shells = [self._shell(number, epoch) for number in range(settings.ranks)]
        for shell in self._shells:
            self._publisher.add(shell)
            if state_dir is not None and settings.events is not None:
                source = Source(shell.key, settings.engine, settings.block_size)
                path = saved_ledger_path(state_dir, fleet, shell.key)
                shell.saver = LedgerSaver(path, source, shell.rank, clock, self.counts)

    @property
    def ranks(self) -> list[tuple[WorkerKey, Rank]]:
        return [(shell.key, shell.rank) for shell in self._shells]

    @property
    def heard(self) -> bool:
        """Whether the engine has ever answered, by HTTP or ZMQ; True for an engine with neither."""
        silent = self.settings.http is None and self.settings.events is None
        return silent or self._connected_once or self._pages.heard

    @property
    def failures(self) -> Counter[str]:
        """Name of the work -> failures"""
        shells = (shell.supervisor for shell in self._shells)
        supervisors = (self._supervisor, self._savers, *shells)
        return sum((supervisor.failures for supervisor in supervisors), Counter[str]())

    async def start(self) -> None:
        """Subscribes to the engine and answers routers. The broker must be connected.

        Never raises: work that fails is retried in the background.
        """
        settings = self.settings
        for shell in self._shells:
            keep = shell.supervisor.keep
            answer = partial(self._publisher.answer, shell)
            subject = subjects.snapshot(self._fleet, shell.key)
            await self._listen(subject, answer, "snapshot", shell.supervisor)
            if settings.events is not None:
                _ = keep(partial(self._follow, shell, settings.events), "events")
            read = READINGS[settings.engine].read_load_feed
            if settings.load is not None and read is not None:
                _ = keep(partial(self._follow_load, shell, settings.load, read), "load_feed")
        hello = subjects.hello(self._fleet)
        await self._listen(hello, self._publisher.on_hello, "hello", self._supervisor)
        if settings.http is not None:
            session = self._pages.start(self._access, self._supervisor)
            for shell in self._shells if settings.warm else ():
                await self._let_warm(shell, session)
        self._publisher.start(self._supervisor)
        log.info("relay for %s: %s at %s", settings.id, settings.engine, masked(settings.address))
        if settings.events is None:
            log.info("%s publishes no KV events: routers predict its blocks", settings.id)

    def look_at_models(self) -> None:
        """Reads the engine's list of models soon: see EnginePages.look_at_models."""
        self._pages.look_at_models()

    async def stop(self) -> None:
        """Ends all work: from now on another relay may publish for the engine."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)
            stack.push_async_callback(self._pages.close)
            stack.push_async_callback(self._savers.close)
            for shell in self._shells:
                if shell.saver is not None:
                    stack.push_async_callback(shell.saver.finish)
            for supervisor in (self._supervisor, *(shell.supervisor for shell in self._shells)):
                stack.push_async_callback(supervisor.close)
            stack.push_async_callback(self._listening.close)

    def _shell(self, number: int, epoch: Epoch) -> RankShell:
        settings = self.settings
        key = WorkerKey(settings.id, number)
        rank = Rank(
            settings.engine,
            epoch,
            has_replay=settings.replay is not None,
            wanted_block_size=settings.block_size,
        )
        return RankShell(key, rank, self._supervised(str(key)), settings.first_rank + number)

    def _supervised(self, scope: str) -> Supervisor:
        return Supervisor(scope, self._rng, on_trouble=self._count_failure)

    def _count_failure(self, work: str, _error: Exception) -> None:
        self.counts[f"{work}_failed"] += 1

    async def _let_warm(self, shell: RankShell, session: aiohttp.ClientSession) -> None:
        """Lets routers make a rank of the engine compute a prefix."""
        shell.warmer = Warmer(
            session,
            self._access,
            self.settings,
            shell.key,
            model=lambda: self._model(shell),
            is_busy=lambda: shell.load is not None and shell.load.waiting > 0,
            answer=self._broker.publish,
            counts=self.counts,
            supervisor=shell.supervisor,
        )
        await self._listen(
            subjects.warm(self._fleet, shell.key), shell.warmer.on_message, "warm", shell.supervisor
        )

    def _model(self, shell: RankShell) -> str:
        """The engine's name for its model; empty until its pages or its load name it."""
        return self._pages.identity.model or (shell.load and shell.load.model) or ""

    async def _listen(
        self, subject: str, listener: OnMessage, work: str, supervisor: Supervisor
    ) -> None:
        await self._listening.listen(self._broker, subject, listener, work, supervisor)

    def _perform(self, shell: RankShell, effects: Sequence[RankEffect]) -> None:
        for effect in effects:
            match effect:
                case Publish(messages):
                    self._publisher.queue(shell, messages)
                case Replay(from_seq):
                    if shell.replaying is not None:
                        shell.replaying.cancel()
                    shell.replaying = shell.supervisor.keep(
                        partial(self._fetch_replay, shell, from_seq), "replay"
                    )
        self._publisher.queue(shell)  # the rank may have facts for the next message

    async def _follow(self, shell: RankShell, base: str) -> None:
        """Reads the engine's publisher until the connection to it breaks for good."""
        if shell.saver is not None and not shell.resumed:
            shell.resumed = True
            await shell.saver.resume()
            shell.saver.start(self._savers)
        publisher = EngineSubscription(
            self._context,
            rank_endpoint(base, shell.number),
            topic=self.settings.topic,
            bind=self.settings.events_bind,
        )
        try:
            await together(
                self._read(shell, publisher), publisher.watch(partial(self._connected, shell))
            )
        finally:
            publisher.close()

    async def _read(self, shell: RankShell, publisher: EngineSubscription) -> None:
        await asyncio.sleep(SUBSCRIBED_S)
        rank = shell.rank
        self._perform(shell, rank.on_reconnected() if shell.started else rank.start())
        shell.started = True
        await self._catch_up(shell)  # an earlier attempt may have left messages
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
        self, shell: RankShell, step: Callable[[], list[RankEffect]], now_s: float
    ) -> list[RankEffect]:
        """Effects of a step of the rank. If the step raises, the rank's stream starts with an empty
        ledger, and the error is raised."""
        try:
            return step()
        except Exception:
            self._perform(shell, shell.rank.on_failure(now_s))
            raise

    def _connected(self, shell: RankShell) -> None:
        """Lets the rank request a replay once the engine's publisher is connected again."""
        self._connected_once = True
        if shell.started:  # at the first connection, the rank's start does that
            self._perform(shell, shell.rank.on_reconnected())

    async def _fetch_replay(self, shell: RankShell, from_seq: int) -> None:
        """Requests a replay, and applies the answer, also if only part of it came."""
        answer = ReplayAnswer()
        if shell.rank.state is EngineState.HEALING:
            try:
                endpoint = rank_endpoint(self.settings.replay or "", shell.number)
                await ask_replay(self._context, endpoint, from_seq, answer)
            except Exception as error:  # live messages wait, so they get an empty answer
                shell.supervisor.failed("replay", error)
        self.counts["malformed_frame"] += answer.malformed
        count = len(answer.parts)
        if answer.trouble:
            self.counts[answer.trouble] += 1
            log.warning(
                "%s: the engine's replay was cut off (%s) after %d batches",
                shell.key,
                answer.trouble,
                count,
            )
        effects = shell.rank.on_replay(answer.parts, answer.ended, self._clock())
        answer.parts.clear()  # frees the applied messages
        shell.replaying = None
        self._perform(shell, effects)
        await self._catch_up(shell)
        log.info("%s: %d batches replayed; %s", shell.key, count, shell.rank.summary())

    async def _catch_up(self, shell: RankShell) -> None:
        """Applies waiting messages, CATCH_UP_BYTES in each turn of the event loop. Messages that
        the engine sends meanwhile wait in the socket's queue, or in the rank."""
        while shell.rank.state is EngineState.CATCHING_UP:
            await asyncio.sleep(0)
            now_s = self._clock()
            step = partial(shell.rank.catch_up, now_s)
            self._perform(shell, self._applied(shell, step, now_s))

    async def _follow_load(self, shell: RankShell, base: str, read: ReadLoadFeed) -> None:
        """Reads the engine's feed of loads until the connection to it breaks for good."""
        feed = EngineSubscription(self._context, rank_endpoint(base, shell.key.dp_rank))
        try:
            await together(self._read_load(shell, feed, read), feed.watch(lambda: None))
        finally:
            feed.close()

    async def _read_load(
        self, shell: RankShell, feed: EngineSubscription, read: ReadLoadFeed
    ) -> None:
        while True:
            message = parse_live(await feed.receive())
            if not isinstance(message, LiveMessage):
                self.counts["malformed_frame"] += 1
                continue
            try:
                _, shell.load = read(
                    message.payload, self._heartbeats.engine_block_size(shell) or 1
                )
            except LoadUnreadable:
                self.counts["malformed_load"] += 1
                continue
            shell.sampled_at_s = self._clock()

    def _loads_came(self, loads: Mapping[int, LoadSample]) -> None:
        now_s = self._clock()
        for shell in self._shells:
            load = loads.get(shell.number)
            if load is None and len(loads) == len(self._shells) == 1:
                (load,) = loads.values()  # whatever its number: behind another balancer, say
            if load is None:
                shell.own_numbers = {}
                continue
            if not self.settings.load:
                self._publisher.beat_soon()  # while the sample is new
                shell.load = load
                shell.sampled_at_s = now_s
            shell.own_numbers, shell.own_numbers_at_s = load.own_numbers, now_s
            if load.emptied:
                self._perform(shell, shell.rank.on_asleep(now_s))
            if load.process_start_s is not None:
                effects = shell.rank.on_process_start(load.process_start_s, now_s)
                if effects:
                    log.warning("%s: the engine has restarted", shell.key)
                    self._perform(shell, effects)
