"""The relay of a Dynamo fleet: turns the KV events of its workers on NATS into facts.

    workers ──NATS (kv-events, kv_metrics, forward-pass-metrics)──> DynamoRank, one a (worker, rank)
                                                                    ──NATS──> routers

Does the I/O (subscriptions, timers) for events/relay/dynamo/rank.py, which decides; the streams
leave by events/relay/stream_publisher.py. One subject carries many workers: each becomes a stream
of its own with its first message, and ends after a silence of `worker_timeout_s` or by a fleet
command.

Laws:
- a message of any of the three subjects makes its worker known, and keeps it: a worker that sends
  forward-pass metrics is there before its first request, and while it is idle;
- a failure costs the worker or the message that caused it. Each failure is counted and shown as a
  warning of the workers concerned; a loop that fails runs again after a back-off.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial

from nats.aio.msg import Msg

from events.engines.dynamo import WorkerLoad, decode_dynamo
from events.plane import subjects
from events.plane.broker import Broker, OnMessage
from events.plane.facts import (
    Control,
    Epoch,
    Heartbeat,
    Unreadable,
    decode,
    encode_heartbeat,
)
from events.plane.listening import Listening
from events.plane.settings import DynamoSettings
from events.plane.supervisor import Supervisor
from events.relay.dynamo.rank import DynamoRank
from events.relay.heartbeats import RELAY_FAILING
from events.relay.stream_publisher import BEAT_S, OutgoingStream, StreamPublisher
from indexer.identity import WorkerKey

QUIET_S = 60.0
"""Seconds of silence after which a worker's heartbeat has a warning."""
_TURN_MESSAGES = 64
"""Messages handled in a turn of the event loop."""
_LOG_S = 10.0
"""Least seconds between two log lines about unreadable messages."""
_BLOCKS_PLAUSIBLE = 1_000_000_000

INSTANCE_LABEL = "kvroute.io/dynamo-instance"
"""Label of which the client library makes the header by which Dynamo's frontend finds the
worker."""

log = logging.getLogger("kvroute.dynamo")


class _Worker(OutgoingStream[DynamoRank]):
    """One (worker, rank) of the fleet."""

    def __init__(
        self,
        key: WorkerKey,
        dynamo_id: int,
        rank: DynamoRank,
        supervisor: Supervisor,
        now_s: float,
    ) -> None:
        super().__init__(key, rank, supervisor)
        self.dynamo_id = dynamo_id
        self.known_since_s = now_s
        self.heard_at_s = now_s
        self.sends_passes = False
        """Whether forward-pass metrics came from it."""
        self.running = 0
        self.waiting = 0
        self.used_blocks: int | None = None
        self.decode_blocks: int | None = None
        self.sampled_at_s: float | None = None


class DynamoRelay:
    """The relay of all workers that publish on one subject."""

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
        """Kind -> failures, and messages dropped before they reached a worker."""
        self._broker = broker
        self._source = source or broker
        self._fleet = fleet
        self._clock = clock
        self._rng = rng
        self._publisher = StreamPublisher[_Worker](
            broker,
            fleet=fleet,
            heartbeat=self._encoded_heartbeat,
            counts=self.counts,
            clock=clock,
            rng=rng,
        )
        self._workers = self._publisher.streams
        self._by_number: dict[tuple[int, int], _Worker] = {}
        """Dynamo's worker id and rank -> the worker"""
        self._higher_ranks: Counter[str] = Counter()
        """Worker id -> its ranks above 0."""
        self._taken = 0
        self._before_loss = 0
        """Unread messages received before the connection was lost."""
        self._logged_at_s = 0.0
        self._listening = Listening()
        self._supervisor = self._supervised(settings.id)
        self._stopped = False

    @property
    def ranks(self) -> list[tuple[WorkerKey, DynamoRank]]:
        return [(worker.key, worker.rank) for worker in self._workers.values()]

    @property
    def failures(self) -> Counter[str]:
        """Name of the work -> failures, with those of the present workers"""
        workers = (worker.supervisor for worker in self._workers.values())
        supervisors = (self._supervisor, *workers)
        return sum((supervisor.failures for supervisor in supervisors), Counter[str]())

    async def start(self) -> None:
        """Subscribes, and answers routers. Both brokers must be connected.

        Never raises: work that fails is retried in the background.
        """
        fleet = self._fleet
        self._source.on_connection(self._connection_changed)
        self._publisher.start(self._supervisor)
        _ = self._supervisor.keep(self._end_silent, "silence")
        routers = self._broker
        snapshots = subjects.all_of(fleet, "snapshot")
        await self._listen(routers, snapshots, self._snapshot_requested, "snapshot")
        await self._listen(routers, subjects.hello(fleet), self._publisher.on_hello, "hello")
        await self._listen(routers, subjects.control(fleet), self._control_came, "control")
        for work, subject in _load_subjects(self.settings).items():
            await self._listen(self._source, subject, self._load_came, work)
        await self._listen(self._source, self.settings.subject, self._events_came, "events")
        log.info("relay for the Dynamo workers on %s", self.settings.subject)

    async def stop(self) -> None:
        """Ends all work: from now on another relay may publish for these workers."""
        self._stopped = True
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._supervisor.close)
            stack.push_async_callback(self._listening.close)

    def _supervised(self, scope: str) -> Supervisor:
        return Supervisor(scope, self._rng, on_trouble=self._count_failure)

    def _count_failure(self, work: str, _error: Exception) -> None:
        self.counts[f"{work}_failed"] += 1

    async def _listen(self, broker: Broker, subject: str, listener: OnMessage, work: str) -> None:
        await self._listening.listen(broker, subject, listener, work, self._supervisor)

    async def _events_came(self, message: Msg) -> None:
        self._take(message)
        if self._before_loss:
            self._before_loss -= 1
            if not self._before_loss:
                self._doubt()
        await self._turn()

    async def _load_came(self, message: Msg) -> None:
        self._take(message)
        await self._turn()

    async def _turn(self) -> None:
        """Lets other tasks of the event loop run after each _TURN_MESSAGES messages."""
        self._taken += 1
        if self._taken % _TURN_MESSAGES == 0:
            await asyncio.sleep(0)

    def _take(self, message: Msg) -> None:
        """Applies a message of the workers: KV events, load, or both, by its envelope."""
        settings = self.settings
        now_s = self._clock()
        read = decode_dynamo(
            message.data, bytes_max=settings.message_bytes_max, hashes_max=settings.hashes_max
        )
        for reason in read.dropped:
            self.counts[reason] += 1
        if read.detail and now_s - self._logged_at_s >= _LOG_S:
            self._logged_at_s = now_s
            log.warning("unreadable message on %s: %s", message.subject, read.detail)
        if read.load is not None:
            self._apply_load(read.load, now_s)
        for event in read.events:
            worker = self._worker(event.worker_id, event.dp_rank, now_s)
            if worker is not None:
                step = partial(worker.rank.on_event, event, read.origin, now_s)
                self._advance(worker, step, now_s)

    def _advance(self, worker: _Worker, step: Callable[[], Iterable[bytes]], now_s: float) -> None:
        """Queues the messages of a step of a worker's rank. If the step fails, its stream starts
        with an empty ledger."""
        try:
            self._publisher.queue(worker, step())
        except Exception as error:  # of that worker alone
            worker.supervisor.failed("events", error)
            self._publisher.queue(worker, worker.rank.on_failure(now_s))

    def _apply_load(self, load: WorkerLoad, now_s: float) -> None:
        worker = self._worker(load.worker_id, load.dp_rank, now_s)
        if worker is None:
            return
        worker.sends_passes = worker.sends_passes or load.from_pass
        # Dynamo's routers publish here, too; each sender sets only the values that it has.
        if load.running is not None and load.waiting is not None:
            worker.running, worker.waiting = load.running, load.waiting
        if load.used_blocks is not None:
            worker.used_blocks = load.used_blocks
        if load.decode_blocks is not None:
            worker.decode_blocks = load.decode_blocks
        worker.sampled_at_s = now_s

    def _worker(self, dynamo_id: int, dp_rank: int, now_s: float) -> _Worker | None:
        """The worker of a message; a new one becomes a stream, up to `workers_max` of them."""
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
            self._publisher.add(worker)
            if dp_rank > 0:
                self._higher_ranks[name] += 1
            self._by_number[dynamo_id, dp_rank] = worker
            log.info("%s: first message; its stream begins", worker.key)
        worker.heard_at_s = now_s
        return worker

    def _end(self, worker: _Worker) -> None:
        """Ends a worker's stream; with its next message the worker is a new stream."""
        self._publisher.remove(worker)
        del self._by_number[worker.dynamo_id, worker.key.dp_rank]
        if worker.key.dp_rank > 0:
            self._higher_ranks[worker.key.worker_id] -= 1
            if not self._higher_ranks[worker.key.worker_id]:
                del self._higher_ranks[worker.key.worker_id]

    async def _end_silent(self) -> None:
        while True:
            now_s = self._clock()
            for worker in list(self._workers.values()):
                silent_s = now_s - worker.heard_at_s
                if self._source.connected and silent_s >= self.settings.worker_timeout_s:
                    log.warning("%s sent nothing for %.0f s: its stream ends", worker.key, silent_s)
                    self.counts["worker_timeout"] += 1
                    self._end(worker)
            await asyncio.sleep(BEAT_S)

    async def _snapshot_requested(self, message: Msg) -> None:
        key = subjects.worker_of(message.subject)
        worker = self._workers.get(key) if key is not None else None
        if worker is not None:  # else another relay answers
            await self._publisher.answer(worker, message)

    async def _control_came(self, message: Msg) -> None:
        """Handles a fleet command: a removed worker's stream ends here, too."""
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
        """Sets all ledgers aside at a loss of the connection to Dynamo's NATS server: messages may
        be lost, and Dynamo has no replay for other programs."""
        if self._stopped:
            return
        if connected:
            now_s = self._clock()
            for worker in self._workers.values():
                worker.heard_at_s = now_s
            return
        # Unread messages were sent before the loss, and prove nothing about it.
        self._before_loss = self._listening.unread("events")
        self._doubt()

    def _doubt(self) -> None:
        now_s = self._clock()
        for worker in self._workers.values():
            self._advance(worker, partial(worker.rank.doubt, now_s), now_s)

    def _encoded_heartbeat(self, worker: _Worker, now_s: float) -> bytes:
        return encode_heartbeat(self._heartbeat(worker, now_s))

    def _heartbeat(self, worker: _Worker, now_s: float) -> Heartbeat:
        settings = self.settings
        troubles = {**self._supervisor.troubles(), **worker.supervisor.troubles()}
        failing = [
            f"its relay fails at {work}, and goes on: {error}"
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
            labels={**settings.labels, INSTANCE_LABEL: str(worker.dynamo_id)},
            multi_rank=worker.key.worker_id in self._higher_ranks,
            running=worker.running,
            waiting=worker.waiting,
            used_blocks=None if used is None else float(min(used, _BLOCKS_PLAUSIBLE)),
            total_blocks=settings.total_blocks,
            total_slots=settings.slots,
            sampled_at_s=worker.sampled_at_s,
            sent_at_s=now_s,
            warnings=(*failing, *_warnings(worker, now_s, connected=self._source.connected)),
            warning_codes=(RELAY_FAILING,) * len(failing),
        )


def _load_subjects(settings: DynamoSettings) -> dict[str, str]:
    """Name of the work -> subject of the workers' load; empty: the subject of the events includes
    the load."""
    subjects_of: dict[str, str] = {}
    base, separator, topic = settings.subject.rpartition(".")
    if separator and topic == "kv-events":
        subjects_of = {"load": f"{base}.kv_metrics", "passes": f"{base}.forward-pass-metrics"}
    if settings.load_subject is not None:
        subjects_of["load"] = settings.load_subject
    return subjects_of


def _warnings(worker: _Worker, now_s: float, *, connected: bool) -> list[str]:
    """Faults that an operator can fix, a sentence each. connected: to the fleet's NATS server."""
    warnings = []
    counts = worker.rank.counts
    if counts["two_publishers"]:
        warnings.append("two publishers alternate for this worker: its blocks are unknown")
    if counts["malformed"]:
        warnings.append("the worker sends events that kvroute can't read")
    if counts["unknown_medium"]:
        warnings.append("the worker names a storage tier that kvroute doesn't know")
    if not connected:
        warnings.append("the NATS server of the Dynamo fleet is away")
    elif now_s - worker.heard_at_s >= QUIET_S:
        warnings.append(f"the worker has sent nothing for {QUIET_S:g} s: it is idle, or gone")
    if not worker.sends_passes and now_s - worker.known_since_s >= QUIET_S:
        warnings.append(
            "the worker sends no forward-pass metrics, so that it is not known before its first"
            " request, and lost while it is idle: set DYN_FORWARDPASS_METRIC_PORT at the worker"
        )
    return warnings
