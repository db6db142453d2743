"""The router's subscriptions to NATS, which feed the fleet view, and the recoveries it requests.

    facts, load ──> Intake, in turns ──> FleetView ──> Pull ──> ring or snapshot, chunk by chunk
       ^             └──> Fence                                        └──> FleetView
    subscriptions <────────┘            control ──> its listener

Does the I/O for events/feed/fleet_view.py, which is pure. All state changes happen on the event
loop. A message, or a fact of a backlog, whose handling raises any exception is dropped and counted;
so is a recovery.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

from nats.aio.msg import Msg

from events.feed.fence import Plane
from events.feed.fleet_view import FACT_BYTES, SLICE_BYTES, FleetView, Pull
from events.feed.intake import Intake
from events.feed.subscriptions import Subscriptions
from events.plane import subjects
from events.plane.broker import Broker
from events.plane.facts import (
    VERSION,
    Control,
    Epoch,
    FactsMessage,
    Hello,
    SnapshotChunk,
    SnapshotRequest,
    Stored,
    Unreadable,
    decode,
    decode_stream,
    encode,
)
from events.plane.nats_client import OnRaw
from events.plane.tasks import OnFailure, Tasks
from indexer.identity import WorkerKey

RECOVERIES_AT_ONCE = 16
RECOVERY_S = 30.0
"""Time limit of a recovery, seconds: a relay keeps a snapshot for as long."""
RECOVERY_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of a recovery: 8 million blocks. Workers with more can't be recovered or trusted."""
RECOVERIES_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of all recoveries at the same time. A recovery over the bound fails, which frees its bytes,
and starts again with its worker's next beat."""
CHUNKS_MAX = 1024
HEARTBEAT_COST = 8 * 1024
"""Cost of a heartbeat in the intake, besides its bytes: a pool may have to check all workers."""
_DECODED_AT_ONCE = 64
"""Messages of a ring that are decoded between two turns of the event loop."""
_KEYS_MAX = 16_384
"""Subjects whose publisher and worker are remembered."""
_JITTER_S = 0.2
_ANSWER_TIMEOUT_S = 2.0
_TICK_S = 0.25
HELLO_S = 1.0
"""Least seconds between two hellos: relays beat as often anyway. Otherwise each slow-consumer error
of an overloaded router would make the whole fleet answer."""

log = logging.getLogger("kvroute.feed")

OnPayload = Callable[[WorkerKey, bytes], None]


class _PullFailed(Exception):
    """A recovery got no usable answer; the message says why."""


@dataclass(slots=True)
class _Recovery:
    """A recovery that runs."""

    pull: Pull
    bytes: int = 0
    """Bytes of its answers so far."""


class Feed:
    """Keeps a fleet view up to date with the messages that come over NATS."""

    def __init__(
        self,
        broker: Broker,
        view: FleetView,
        *,
        fleet: str,
        replica: str,
        clock: Callable[[], float],
        on_heartbeat: Callable[[WorkerKey, float], None],
        on_forgotten: Callable[[list[WorkerKey], float], None],
        on_control: Callable[[Control], object],
        on_failure: OnFailure,
        rng: random.Random,
    ) -> None:
        self._broker = broker
        self._view = view
        self._fleet = fleet
        self._replica = replica
        self._clock = clock
        self._on_heartbeat = on_heartbeat
        self._on_forgotten = on_forgotten
        self._on_control = on_control
        self._rng = rng
        self._hello_at_s = -HELLO_S
        self._hello_due = False
        """Whether the connection came back, and no hello was sent since."""
        self._intake: Intake[tuple[OnPayload, WorkerKey, bytes]] = Intake(self._is_known)
        self._subscriptions = Subscriptions(broker, fleet, self._send_hello)
        came, out = self._message_came, self._subscriptions.out
        self._came: dict[Plane, OnRaw] = {
            "facts": partial(came, "facts", out("facts"), self._on_facts, 0),
            "load": partial(came, "load", out("load"), self._on_load, HEARTBEAT_COST),
        }
        self._keys: dict[bytes, tuple[bytes, WorkerKey]] = {}
        """Subject -> publisher and worker, of subjects that name a worker."""
        self._arrived = asyncio.Event()
        """Set when the intake has messages."""
        self._worked = False
        """Whether the last slice came from a backlog."""
        self._recoveries: dict[WorkerKey, asyncio.Task[None]] = {}
        self._recovering_bytes = 0
        self._at_once = asyncio.Semaphore(RECOVERIES_AT_ONCE)
        self._tasks = Tasks(on_failure)

    async def start(self) -> None:
        """Subscribes, and sends a hello, which relays answer. The broker must be connected."""
        self._broker.on_connection(self._connection_changed)
        await self._subscriptions.start(self._came)
        await self._broker.subscribe(subjects.control(self._fleet), self._control_came)
        self._tasks.spawn(self._serve(), "facts and heartbeats")
        self._tasks.spawn(self._subscriptions.keep(lambda: self._view.worker_ids), "subscriptions")
        self._tasks.spawn(self._subscriptions.measure(), "delay of the connection")
        self._tasks.spawn(self._tick(), "feed clock")
        await self._send_hello()

    async def stop(self) -> None:
        await self._tasks.close()

    async def send_control(self, control: Control) -> bool:
        """Sends a command to every replica; False without a connection."""
        return await self._broker.publish(subjects.control(self._fleet), encode(control))

    def recover(self, pulls: list[Pull]) -> None:
        """Starts recoveries that the view returned; cancels an earlier one of the same worker."""
        for pull in pulls:
            running = self._recoveries.get(pull.worker)
            if running is not None and not running.done():
                running.cancel()
            task = self._tasks.spawn_task(self._recover(pull), f"recovery of {pull.worker}")
            self._recoveries[pull.worker] = task
            task.add_done_callback(partial(self._recovered, pull))

    def _recovered(self, pull: Pull, task: asyncio.Task[None]) -> None:
        if self._recoveries.get(pull.worker) is task:
            del self._recoveries[pull.worker]

    def _message_came(
        self,
        plane: Plane,
        out: Container[bytes],
        handler: OnPayload,
        extra_cost: int,
        subject: bytes,
        payload: bytes,
    ) -> None:
        """Queues a message; if it is over its publisher's budget, drops it and shuts the publisher
        out."""
        known = self._keys.get(subject)
        publisher = known[0] if known is not None else subjects.worker_token(subject)
        if publisher in out:
            self._intake.lose(publisher)  # queued by the server before its subscription ended
            return
        size = len(payload) + extra_cost
        now_s = asyncio.get_running_loop().time()
        if not self._intake.admits(publisher, size, now_s):
            self._subscriptions.shut_out(plane, publisher, now_s)
            self._view.shut_out[plane] = self._subscriptions.fence.times[plane]
            return
        if known is None:
            key = subjects.worker_of(subject.decode(errors="replace"))
            if key is None:
                self._view.dropped["bad_subject"] += 1
                return
            if len(self._keys) >= _KEYS_MAX:
                self._keys.clear()
            known = self._keys[subject] = publisher, key
        self._intake.put(publisher, (handler, known[1], payload), size)
        self._arrived.set()

    async def _serve(self) -> None:
        """Handles waiting messages slice by slice; other tasks run between two slices."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._intake or self._view.backlogged:
                self.serve_slice()
                await asyncio.sleep(0)

    def serve_slice(self) -> None:
        """Handles one slice of work: of the workers' backlogs and of the intake, alternately. The
        intake holds back the messages of workers with a backlog."""
        view, intake = self._view, self._intake
        backlogged = view.backlogged
        self._worked = bool(backlogged) and not self._worked
        if self._worked:
            try:
                view.work(self._clock())
            except Exception as error:  # from a relay's facts: the next beat shows what is missing
                self._failed("the facts of a worker with a backlog", error)
            return
        intake.held = {subjects.escape(key.worker_id).encode() for key in backlogged}
        applied = view.applied
        for handler, key, payload in intake.take():
            try:
                handler(key, payload)
            except Exception as error:  # from a relay's message: only that message is lost
                self._failed(f"the facts or load of {key}", error)
            if view.applied > applied + 1:  # a message's own cost covers one fact
                intake.charge((view.applied - applied - 1) * FACT_BYTES)
            applied = view.applied
        if intake.lossy:
            self._count_losses()

    def _failed(self, what: str, error: Exception) -> None:
        self._view.dropped["handling_failed"] += 1
        self._broker.listener_failed(what, error)

    def _count_losses(self) -> None:
        now_s = self._clock()
        for publisher, messages in self._intake.take_losses().items():
            if (worker_id := subjects.worker_id_of(publisher)) is not None:
                self._view.on_lost(worker_id, messages, now_s)
        self._view.dropped += self._intake.dropped
        self._intake.dropped.clear()

    def _is_known(self, publisher: bytes) -> bool:
        worker_id = subjects.worker_id_of(publisher)
        return worker_id is not None and self._view.knows(worker_id)

    def _on_facts(self, key: WorkerKey, payload: bytes) -> None:
        if pulls := self._view.on_stream(key, payload, self._clock()):
            self.recover(pulls)

    def _on_load(self, key: WorkerKey, payload: bytes) -> None:
        now_s = self._clock()
        if self._view.on_heartbeat(key, payload, now_s) is not None:
            self._on_heartbeat(key, now_s)

    async def _control_came(self, message: Msg) -> None:
        control = decode(Control, message.data)
        if isinstance(control, Unreadable):
            self._view.dropped[control.reason] += 1
            return
        self._on_control(control)

    def _connection_changed(self, connected: bool) -> None:
        now_s = self._clock()
        self._subscriptions.connection_changed()
        self._view.on_connection(connected, now_s)
        self._hello_due = connected
        self._say_hello(now_s)

    def _say_hello(self, now_s: float) -> None:
        if self._hello_due and now_s - self._hello_at_s >= HELLO_S:
            self._hello_due, self._hello_at_s = False, now_s
            self._tasks.spawn(self._send_hello(), "hello")

    async def _send_hello(self) -> None:
        hello = encode(Hello(VERSION, self._replica))
        await self._broker.publish(subjects.hello(self._fleet), hello)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._subscriptions.tick(self._intake)
            if self._intake.lossy:
                self._count_losses()
            now_s = self._clock()
            self._say_hello(now_s)
            self._view.behind_s = self._subscriptions.behind_s
            forgotten = self._view.tick(now_s)
            for worker in forgotten:
                log.warning("worker %s is forgotten: it sent no beat for too long", worker)
                if (task := self._recoveries.get(worker)) is not None:
                    task.cancel()
            if forgotten:
                self._on_forgotten(forgotten, now_s)

    async def _recover(self, pull: Pull) -> None:
        """Performs a recovery, after a random delay that spreads recoveries of the same moment."""
        await asyncio.sleep(self._rng.uniform(0, _JITTER_S))
        async with self._at_once:
            log.info("%s: %s; a recovery from its relay starts", pull.worker, pull.reason)
            recovery = _Recovery(pull)
            try:
                async with asyncio.timeout(RECOVERY_S):
                    again = await self._perform(recovery)
            except (_PullFailed, TimeoutError) as error:
                reason = str(error) or f"no end after {RECOVERY_S:g} s"
                again = self._view.on_pull_failed(pull, reason, self._clock())
            except Exception as error:  # from a relay's answer: only that recovery is lost
                self._failed(f"the recovery of {pull.worker}", error)
                again = self._view.on_pull_failed(pull, "answer unusable", self._clock())
            finally:
                self._recovering_bytes -= recovery.bytes
                self._view.unstage(pull.worker)
        if again:
            # After this task: recover() would cancel it as the worker's running recovery.
            asyncio.get_running_loop().call_soon(self.recover, again)

    async def _perform(self, recovery: _Recovery) -> list[Pull]:
        """Requests chunk after chunk and applies them; returns the recoveries that are due next.
        Raises _PullFailed."""
        worker, _, from_seq = recovery.pull
        if from_seq is not None:
            epoch, messages = await self._pull_ring(recovery, from_seq)
            await self._backlog_done(worker)
            again = self._view.on_ring(worker, epoch, messages, self._clock())
            await self._backlog_done(worker)
            return again
        last = await self._pull_snapshot(recovery)
        again = self._view.on_snapshot(
            worker, last.epoch, last.as_of, [], last.complete, self._clock()
        )
        await self._backlog_done(worker)
        return again

    async def _backlog_done(self, worker: WorkerKey) -> None:
        """Returns when the worker's backlog is in the index; until then the recovery's bytes count
        against the bound."""
        while worker in self._view.backlogged:
            self._arrived.set()
            await asyncio.sleep(0)

    async def _pull_ring(
        self, recovery: _Recovery, from_seq: int
    ) -> tuple[Epoch, list[FactsMessage]]:
        messages: list[FactsMessage] = []
        for _ in range(CHUNKS_MAX):
            request = SnapshotRequest(from_seq=from_seq + len(messages))
            chunk = await self._request(recovery, request)
            if chunk.expired:
                raise _PullFailed("the relay's ring lacks the first missing messages")
            messages += await _decoded(self._view, chunk.messages)
            if chunk.chunks < 2 or not chunk.messages:
                return chunk.epoch, messages
        raise _PullFailed(f"the relay's ring has no end within {CHUNKS_MAX} answers")

    async def _pull_snapshot(self, recovery: _Recovery) -> SnapshotChunk:
        """Requests and stages all chunks of a snapshot; returns the last chunk. Raises
        _PullFailed."""
        epoch: Epoch | None = None
        as_of: int | None = None
        for i in range(CHUNKS_MAX):
            request = SnapshotRequest(chunk=i, epoch=epoch, as_of=as_of)
            chunk = await self._request(recovery, request)
            if chunk.expired:
                raise _PullFailed("the relay dropped its snapshot before the last chunk")
            if i and (chunk.epoch, chunk.as_of, chunk.chunk) != (epoch, as_of, i):
                raise _PullFailed("the relay's chunks are of different snapshots")
            epoch, as_of = chunk.epoch, chunk.as_of
            if i + 1 >= chunk.chunks:
                await _stage(self._view, recovery.pull.worker, chunk)
                return chunk
            await _stage(self._view, recovery.pull.worker, chunk)
        raise _PullFailed(f"the relay's snapshot has no end within {CHUNKS_MAX} chunks")

    async def _request(self, recovery: _Recovery, request: SnapshotRequest) -> SnapshotChunk:
        subject = subjects.snapshot(self._fleet, recovery.pull.worker)
        answer = await self._broker.request(subject, encode(request), _ANSWER_TIMEOUT_S)
        if answer is None:
            raise _PullFailed(f"no answer from the relay within {_ANSWER_TIMEOUT_S:g} s")
        chunk = decode(SnapshotChunk, answer)
        if isinstance(chunk, Unreadable):
            self._view.dropped[chunk.reason] += 1
            raise _PullFailed("the relay's answer is unreadable")
        recovery.bytes += len(answer)
        self._recovering_bytes += len(answer)
        if recovery.bytes > RECOVERY_BYTES_MAX:
            self._view.dropped["recovery_too_large"] += 1
            raise _PullFailed(f"more than {RECOVERY_BYTES_MAX >> 20} MiB to recover")
        if self._recovering_bytes > RECOVERIES_BYTES_MAX:
            self._view.dropped["no_room_to_recover"] += 1
            raise _PullFailed(
                f"no room beside other recoveries: over {RECOVERIES_BYTES_MAX >> 20} MiB together"
            )
        return chunk


async def _decoded(view: FleetView, payloads: list[bytes]) -> list[FactsMessage]:
    """Messages of a ring, decoded in slices; raises _PullFailed for an unreadable message."""
    messages: list[FactsMessage] = []
    for payload in payloads:
        message, dropped = decode_stream(payload)
        view.dropped.update(part.reason for part in dropped)
        if not isinstance(message, FactsMessage):
            raise _PullFailed("a message of the relay's ring is unreadable")
        messages.append(message)
        if len(messages) % _DECODED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return messages


async def _stage(view: FleetView, worker: WorkerKey, chunk: SnapshotChunk) -> None:
    """Stages a snapshot's chunk in slices; other tasks run between two slices."""
    size = 0
    for fact in chunk.facts:
        for at in range(0, max(1, len(fact.hashes)), SLICE_BYTES):
            part = Stored(fact.hashes[at : at + SLICE_BYTES], fact.tier)
            size += len(part.hashes) + FACT_BYTES
            if size > SLICE_BYTES:
                size = 0
                await asyncio.sleep(0)
            view.stage(worker, (part,))
