"""The relay of a Dynamo fleet: follows the KV events of its workers on NATS, tells them as facts.

    workers ──NATS (kv-events, kv_metrics)──> DynamoRank, one a (worker, rank) ──NATS──> routers

The shell around events/relay/dynamo_rank.py: subscriptions, timers, and nothing decided. One
subject carries many workers: each becomes a stream of its own when it first speaks, and ends when
it has been silent for too long or a fleet command removes it.

Law: what a worker, a router or a message does costs that worker or that message. Each failure is
counted and shown as a warning of the workers concerned; a loop that fails runs again after a
back-off.
"""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.engines.dynamo import WorkerLoad, decode_dynamo
from events.plane import subjects
from events.plane.broker import Broker, OnMessage
from events.plane.facts import (
    Control,
    Epoch,
    Heartbeat,
    SnapshotRequest,
    Unreadable,
    decode,
    encode,
    encode_heartbeat,
)
from events.plane.settings import DynamoSettings
from events.plane.supervisor import Supervisor
from events.relay.dynamo_rank import DynamoRank
from events.relay.relay import BEAT_S, COALESCE_S, OUT_MESSAGES_MAX, RELAY_FAILING
from indexer.identity import WorkerKey

QUIET_S = 60.0
"""Silence that a worker's heartbeat tells of."""
_TURN_MESSAGES = 64
"""Messages taken before others get a turn of the event loop."""
_HELLO_JITTER_S = 0.2
_COMPLAINT_S = 10.0
_BLOCKS_PLAUSIBLE = 1_000_000_000

log = logging.getLogger("kvroute.dynamo")


class _Worker:
    """One (worker, rank) of the fleet."""

    def __init__(
        self,
        key: WorkerKey,
        dynamo_id: int,
        rank: DynamoRank,
        supervisor: Supervisor,
        now_s: float,
    ) -> None:
        self.key = key
        self.supervisor = supervisor
        self.dynamo_id = dynamo_id
        self.rank = rank
        self.heard_at_s = now_s
        self.out: deque[bytes] = deque()
        self.used_blocks: int | None = None
        self.decode_blocks: int | None = None
        self.sampled_at_s: float | None = None


class DynamoRelay:
    """The relay of all workers that speak on one subject."""

    def __init__(
        self,
        settings: DynamoSettings,
        broker: Broker,
        *,
        source: Broker | None = None,
        fleet: str,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """source: the connection to Dynamo's NATS server, if that is not the routers'.

        clock: Unix time in seconds that never goes back.
        """
        self.settings = settings
        self.counts: Counter[str] = Counter()
        """What was dropped before it got to a worker."""
        self._broker = broker
        self._source = source or broker
        self._fleet = fleet
        self._clock = clock
        self._rng = rng
        self._workers: dict[WorkerKey, _Worker] = {}
        self._by_number: dict[tuple[int, int], _Worker] = {}
        """Dynamo's worker id and rank -> the worker"""
        self._talkative: dict[WorkerKey, _Worker] = {}
        """Those that have something to send."""
        self._wake = asyncio.Event()
        self._unswept: dict[DynamoRank, None] = {}
        """Those whose ledgers have something to let go."""
        self._sweep_due = asyncio.Event()
        self._taken = 0
        self._before_loss = 0
        """Messages still to be read that came before our connection was lost."""
        self._complained_at_s = 0.0
        self._events: Subscription | None = None
        self._subscriptions: list[tuple[Broker, Subscription]] = []
        self._supervisor = self._supervised(settings.id)
        self._stopped = False

    @property
    def ranks(self) -> list[tuple[WorkerKey, DynamoRank]]:
        return [(worker.key, worker.rank) for worker in self._workers.values()]

    @property
    def failures(self) -> Counter[str]:
        """Piece of work -> how often it failed, with the workers that are known now."""
        supervisors = (self._supervisor, *(one.supervisor for one in self._workers.values()))
        return sum((one.failures for one in supervisors), Counter[str]())

    async def start(self) -> None:
        """Subscribes, and answers routers. Both brokers must be connected.

        Never raises: what fails is tried again in the background.
        """
        fleet = self._fleet
        self._source.on_connection(self._connection_changed)
        _ = self._supervisor.keep(self._send, "facts")
        _ = self._supervisor.keep(self._beat, "beats")
        _ = self._supervisor.keep(self._sweep, "sweep")
        routers = self._broker
        snapshots = subjects.all_of(fleet, "snapshot")
        await self._listen(routers, snapshots, self._snapshot_asked, "snapshot")
        await self._listen(routers, subjects.hello(fleet), self._hello_came, "hello")
        await self._listen(routers, subjects.control(fleet), self._control_came, "control")
        if (load := self._load_subject()) is not None:
            await self._listen(self._source, load, self._load_came, "load")
        await self._listen(self._source, self.settings.subject, self._events_came, "events")
        log.info("relay for the Dynamo workers on %s", self.settings.subject)

    async def stop(self) -> None:
        """Ends all it started: another relay may speak for these workers from now on."""
        self._stopped = True
        for broker, subscription in self._subscriptions:
            await broker.unsubscribe(subscription)
        await self._supervisor.close()

    def _supervised(self, scope: str) -> Supervisor:
        return Supervisor(scope, self._rng, on_trouble=self._count_failure)

    def _count_failure(self, work: str, _error: Exception) -> None:
        self.counts[f"{work}_failed"] += 1

    async def _listen(self, broker: Broker, subject: str, listener: OnMessage, work: str) -> None:
        """Has messages on a subject call the listener, whose failures cost that message."""

        async def guarded(message: Msg) -> None:
            try:
                await listener(message)
            except Exception as error:  # as the law says
                self._supervisor.failed(work, error)

        async def subscribe() -> None:
            subscription = await broker.subscribe(subject, guarded)
            self._subscriptions.append((broker, subscription))
            if work == "events":
                self._events = subscription

        try:
            await subscribe()
        except Exception as error:  # as the law says: tried again
            self._supervisor.failed(work, error)
            _ = self._supervisor.keep(subscribe, work)

    def _load_subject(self) -> str | None:
        """Where the workers tell their load; None when the events' subject takes that in too."""
        if self.settings.load_subject is not None:
            return self.settings.load_subject
        base, separator, topic = self.settings.subject.rpartition(".")
        return f"{base}.kv_metrics" if separator and topic == "kv-events" else None

    async def _events_came(self, message: Msg) -> None:
        self._take(message)
        if self._before_loss:
            self._before_loss -= 1
            if not self._before_loss:
                self._doubt()
        self._taken += 1
        if self._taken % _TURN_MESSAGES == 0:
            await asyncio.sleep(0)

    async def _load_came(self, message: Msg) -> None:
        self._take(message)

    def _take(self, message: Msg) -> None:
        """Workers spoke: what they hold, or what they do, as the envelope says."""
        settings = self.settings
        now_s = self._clock()
        told = decode_dynamo(
            message.data, bytes_max=settings.message_bytes_max, hashes_max=settings.hashes_max
        )
        for reason in told.dropped:
            self.counts[reason] += 1
        if told.detail and now_s - self._complained_at_s >= _COMPLAINT_S:
            self._complained_at_s = now_s
            log.warning("%s: %s", message.subject, told.detail)
        if told.load is not None:
            self._apply_load(told.load, now_s)
        for event in told.events:
            worker = self._worker(event.worker_id, event.dp_rank, now_s)
            if worker is not None:
                step = partial(worker.rank.on_event, event, told.origin, now_s)
                self._advance(worker, step, now_s)

    def _advance(self, worker: _Worker, step: Callable[[], Iterable[bytes]], now_s: float) -> None:
        """Queues what a step of a worker's rank gives. If the step fails, that rank has lost track,
        which it tells routers."""
        try:
            self._queue(worker, step())
        except Exception as error:  # of that worker alone
            worker.supervisor.failed("events", error)
            self._queue(worker, worker.rank.on_failure(now_s))
        self._sweep_later(worker.rank)

    def _apply_load(self, load: WorkerLoad, now_s: float) -> None:
        worker = self._worker(load.worker_id, load.dp_rank, now_s)
        if worker is None:
            return
        # Dynamo's routers publish here too, and each sender tells only what it knows.
        if load.used_blocks is not None:
            worker.used_blocks = load.used_blocks
        if load.decode_blocks is not None:
            worker.decode_blocks = load.decode_blocks
        worker.sampled_at_s = now_s

    def _worker(self, dynamo_id: int, dp_rank: int, now_s: float) -> _Worker | None:
        """Who speaks; a new one becomes a stream, if there is room for it."""
        worker = self._by_number.get((dynamo_id, dp_rank))
        if worker is None:
            if len(self._workers) >= self.settings.workers_max:
                self.counts["too_many_workers"] += 1
                return None
            name = self.settings.worker_id.replace("{worker_id}", str(dynamo_id))
            epoch = Epoch(int(now_s * 1e9), self._rng.getrandbits(32))
            rank = DynamoRank(epoch, blocks_max=self.settings.blocks_max)
            key = WorkerKey(name, dp_rank)
            worker = _Worker(key, dynamo_id, rank, self._supervised(str(key)), now_s)
            self._workers[worker.key] = worker
            self._by_number[dynamo_id, dp_rank] = worker
            log.info("%s speaks", worker.key)
        worker.heard_at_s = now_s
        return worker

    def _end(self, worker: _Worker) -> None:
        """From now on nobody speaks for it; when it is heard again it is a new stream."""
        del self._workers[worker.key]
        del self._by_number[worker.dynamo_id, worker.key.dp_rank]
        self._talkative.pop(worker.key, None)
        worker.rank.end()
        self._sweep_later(worker.rank)

    def _sweep_later(self, rank: DynamoRank) -> None:
        """Lets go of a slice of what was wiped at once, and of the rest slice by slice."""
        if rank.sweep():
            self._unswept[rank] = None
            self._sweep_due.set()

    async def _sweep(self) -> None:
        while True:
            await self._sweep_due.wait()
            for rank in list(self._unswept):
                if not rank.sweep():
                    del self._unswept[rank]
                await asyncio.sleep(0)
            if not self._unswept:
                self._sweep_due.clear()

    def _queue(self, worker: _Worker, messages: Iterable[bytes]) -> None:
        worker.out.extend(messages)
        while len(worker.out) > OUT_MESSAGES_MAX:
            worker.out.popleft()
            self.counts["unsent"] += 1
        self._talkative[worker.key] = worker
        self._wake.set()

    async def _send(self) -> None:
        """Publishes what there is, a moment after it came, so that small events share a message."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(COALESCE_S)
            self._wake.clear()
            talkative, self._talkative = self._talkative, {}
            for worker in talkative.values():
                self._advance(worker, worker.rank.flush, self._clock())
                subject = subjects.facts(self._fleet, worker.key)
                while worker.out:
                    await self._broker.publish(subject, worker.out.popleft())

    async def _beat(self) -> None:
        while True:
            now_s = self._clock()
            for worker in list(self._workers.values()):
                silent_s = now_s - worker.heard_at_s
                if self._source.connected and silent_s >= self.settings.worker_timeout_s:
                    log.warning("%s has said nothing for %.0f s: gone", worker.key, silent_s)
                    self.counts["worker_timeout"] += 1
                    self._end(worker)
            await self._tell()
            await asyncio.sleep(BEAT_S)

    async def _tell(self) -> None:
        """Heartbeats, and beats after all that is gathered."""
        several = {key.worker_id for key in self._workers if key.dp_rank}
        for worker in list(self._workers.values()):
            now_s = self._clock()
            try:
                several_ranks = worker.key.worker_id in several
                heartbeat = encode_heartbeat(self._heartbeat(worker, several_ranks, now_s))
                await self._broker.publish(subjects.load(self._fleet, worker.key), heartbeat)
            except Exception as error:  # of that worker alone; its beats go on
                worker.supervisor.failed("heartbeat", error)
            self._advance(worker, partial(worker.rank.beat, now_s), now_s)

    async def _hello_came(self, _message: Msg) -> None:
        await asyncio.sleep(self._rng.uniform(0, _HELLO_JITTER_S))
        await self._tell()

    async def _snapshot_asked(self, message: Msg) -> None:
        key = subjects.worker_of(message.subject)
        worker = self._workers.get(key) if key is not None else None
        if worker is None:  # another relay's
            return
        request = decode(SnapshotRequest, message.data)
        if isinstance(request, Unreadable):
            self.counts["malformed_request"] += 1
            return
        while True:
            messages, answer = worker.rank.answer(request, self._clock())
            self._queue(worker, messages)
            if not isinstance(answer, SnapshotRequest):
                break
            request = answer
            await asyncio.sleep(0)
            if self._workers.get(worker.key) is not worker:
                return  # it has ended meanwhile
        if message.reply:
            await self._broker.publish(message.reply, encode(answer))

    async def _control_came(self, message: Msg) -> None:
        """A removed worker is dropped here too: the one who removes it knows more than NATS."""
        control = decode(Control, message.data)
        if isinstance(control, Unreadable):
            self.counts["malformed_request"] += 1
            return
        if control.action != "remove":
            return
        for worker in list(self._workers.values()):
            if worker.key.worker_id == control.worker_id:
                log.info("%s removed by command", worker.key)
                self._end(worker)

    def _connection_changed(self, connected: bool) -> None:
        """What is lost with a connection can't be known, and nobody can be asked."""
        if self._stopped:
            return
        if connected:
            now_s = self._clock()
            for worker in self._workers.values():
                worker.heard_at_s = now_s
            return
        # What still waits to be read was sent before the loss, and proves nothing about it.
        self._before_loss = self._events.pending_msgs if self._events is not None else 0
        self._doubt()

    def _doubt(self) -> None:
        now_s = self._clock()
        for worker in self._workers.values():
            self._advance(worker, partial(worker.rank.doubt, now_s), now_s)

    def _heartbeat(self, worker: _Worker, multi_rank: bool, now_s: float) -> Heartbeat:
        settings = self.settings
        troubles = {**self._supervisor.troubles(), **worker.supervisor.troubles()}
        failing = [
            f"its relay fails at its {work}, and goes on: {error}"
            for work, error in sorted(troubles.items())
        ]
        used = worker.used_blocks if worker.used_blocks is not None else worker.decode_blocks
        return Heartbeat(
            epoch=worker.rank.outbox.epoch,
            address=settings.address.replace("{worker_id}", str(worker.dynamo_id)),
            engine="dynamo",
            model=settings.model,
            model_aliases=settings.model_aliases,
            lora_names=settings.lora_names,
            max_model_len=settings.max_model_len or 0,
            block_size=settings.block_size,
            engine_block_size=settings.block_size,
            role=settings.role,
            labels=settings.labels,
            multi_rank=multi_rank,
            used_blocks=None if used is None else float(min(used, _BLOCKS_PLAUSIBLE)),
            total_blocks=settings.total_blocks,
            total_slots=settings.slots,
            sampled_at_s=worker.sampled_at_s,
            sent_at_s=now_s,
            warnings=(*failing, *self._warnings(worker, now_s)),
            warning_codes=(RELAY_FAILING,) * len(failing),
        )

    def _warnings(self, worker: _Worker, now_s: float) -> list[str]:
        """What an operator should mend, a sentence each."""
        told = []
        counts = worker.rank.counts
        if counts["two_publishers"]:
            told.append("two publishers speak for this worker in turns: its blocks can't be told")
        if counts["malformed"]:
            told.append("the worker sends events that kvroute can't read")
        if counts["unknown_medium"]:
            told.append("the worker names a storage tier that kvroute doesn't know")
        if not self._source.connected:
            told.append("the NATS server of the Dynamo fleet is away")
        elif now_s - worker.heard_at_s >= QUIET_S:
            told.append("the worker is quiet: idle, or gone")
        return told
