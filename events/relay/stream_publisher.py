"""Publishes the streams of a relay: queues, beats, heartbeats, hello, snapshots.

Shared by both kinds of relay: the ranks of an engine (events/relay/relay.py) and the workers of a
Dynamo fleet (events/relay/dynamo/relay.py). Owns the queues and the timers; the messages come from
the ranks (events/relay/rank_stream.py).

Laws:
- messages of a stream leave in order; of more than OUT_MESSAGES_MAX that wait for the broker, the
  oldest are dropped and counted as `unsent`;
- a heartbeat and a beat of each stream leave every BEAT_S, and at once after `beat_soon`;
- a failure of one stream's messages leaves the other streams alone, and ends with its next beat.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar

from nats.aio.msg import Msg

from events.plane import subjects
from events.plane.broker import Broker
from events.plane.facts import SnapshotRequest, Unreadable, decode, encode
from events.plane.supervisor import Supervisor
from events.relay.rank_stream import RankStream
from indexer.identity import WorkerKey

BEAT_S = 1.0
COALESCE_S = 0.002
"""Least seconds between two messages of the facts, so that small events share a message: the first
change after a pause leaves at once."""
HELLO_JITTER_S = 0.2
"""Relays answer a router's hello after a random time of at most this, not all at once."""
OUT_MESSAGES_MAX = 1024
"""Messages of a stream that wait for the broker, each of 64 KiB at most: far more than the ring of
the outbox, so routers that miss older messages need a snapshot anyway."""

R = TypeVar("R", bound=RankStream[Any])


class OutgoingStream(Generic[R]):
    """One rank, its queue, and the supervisor of its work."""

    def __init__(self, key: WorkerKey, rank: R, supervisor: Supervisor) -> None:
        self.key = key
        self.rank = rank
        self.supervisor = supervisor
        self.out: deque[bytes] = deque()
        """Messages of the facts subject that wait for the broker."""


S = TypeVar("S", bound=OutgoingStream[Any])


class StreamPublisher(Generic[S]):
    """Publishes the streams of one relay, and answers routers about them."""

    def __init__(
        self,
        broker: Broker,
        *,
        fleet: str,
        heartbeat: Callable[[S, float], bytes],
        counts: Counter[str],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """heartbeat: makes a stream's heartbeat at a Unix time; empty: none is sent.

        counts: where `unsent` and `malformed_request` are counted.
        """
        self.streams: dict[WorkerKey, S] = {}
        """The published streams; see `add` and `remove`."""
        self._broker = broker
        self._fleet = fleet
        self._heartbeat = heartbeat
        self._counts = counts
        self._clock = clock
        self._rng = rng
        self._changed: dict[WorkerKey, S] = {}
        """Streams that may have something to send."""
        self._send_due = asyncio.Event()
        self._sent_at_s = -inf
        """Loop time at which the last messages of facts left."""
        self._beat_due = asyncio.Event()
        self._hello_came = False
        """Whether a hello waits for its beats."""

    def start(self, supervisor: Supervisor) -> None:
        """Starts to send facts, beats and heartbeats, until the supervisor closes."""
        _ = supervisor.keep(self._send, "facts")
        _ = supervisor.keep(self._beat, "beats")

    def add(self, stream: S) -> None:
        """Publishes a stream from the next beat on."""
        self.streams[stream.key] = stream

    def remove(self, stream: S) -> None:
        """Ends the publishing of a stream."""
        del self.streams[stream.key]
        self._changed.pop(stream.key, None)

    def queue(self, stream: S, messages: Iterable[bytes] = ()) -> None:
        """Sends these messages, and the facts that the rank has gathered, in the next turn of the
        event loop, or COALESCE_S after the last time."""
        self._enqueue(stream, messages)
        if not self._changed:
            loop = asyncio.get_running_loop()
            if (wait_s := self._sent_at_s + COALESCE_S - loop.time()) > 0:
                loop.call_later(wait_s, self._send_due.set)
            else:
                self._send_due.set()
        self._changed[stream.key] = stream

    def beat_soon(self) -> None:
        """Sends the next heartbeats and beats at once."""
        self._beat_due.set()

    async def on_hello(self, _message: Msg) -> None:
        """Handles a router's Hello: all streams beat within HELLO_JITTER_S. Hellos that come before
        that share the beat, so that none waits behind another.
        """
        if not self._hello_came:
            self._hello_came = True
            wait_s = self._rng.uniform(0, HELLO_JITTER_S)
            asyncio.get_running_loop().call_later(wait_s, self._answer_hellos)

    def _answer_hellos(self) -> None:
        self._hello_came = False
        self.beat_soon()

    async def answer(self, stream: S, message: Msg) -> None:
        """Answers a router's SnapshotRequest."""
        request = decode(SnapshotRequest, message.data)
        if isinstance(request, Unreadable):
            self._counts["malformed_request"] += 1
            return
        messages, chunk = stream.rank.answer(request, self._clock())
        self.queue(stream, messages)
        if message.reply:
            await self._broker.publish(message.reply, encode(chunk))

    def _speaks_for(self, stream: S) -> bool:
        return self.streams.get(stream.key) is stream

    def _enqueue(self, stream: S, messages: Iterable[bytes]) -> None:
        stream.out.extend(messages)
        while len(stream.out) > OUT_MESSAGES_MAX:
            stream.out.popleft()
            self._counts["unsent"] += 1

    async def _send(self) -> None:
        while True:
            await self._send_due.wait()
            self._send_due.clear()
            self._sent_at_s = asyncio.get_running_loop().time()
            changed, self._changed = self._changed, {}
            for stream in changed.values():
                try:
                    await self._send_all(stream)
                except Exception as error:  # of that stream; its next beat sends the rest
                    stream.supervisor.failed("facts", error)

    async def _send_all(self, stream: S) -> None:
        if self._speaks_for(stream):
            self._enqueue(stream, stream.rank.flush())
        subject = subjects.facts(self._fleet, stream.key)
        while stream.out and self._speaks_for(stream):
            await self._broker.publish(subject, stream.out.popleft())

    async def _beat(self) -> None:
        while True:
            self._beat_due.clear()
            for stream in list(self.streams.values()):
                if self._speaks_for(stream):
                    await self._beat_one(stream)
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._beat_due.wait()

    async def _beat_one(self, stream: S) -> None:
        now_s = self._clock()
        try:
            if heartbeat := self._heartbeat(stream, now_s):
                await self._broker.publish(subjects.load(self._fleet, stream.key), heartbeat)
        except Exception as error:  # beats go on without it
            stream.supervisor.failed("heartbeat", error)
        try:
            self.queue(stream, stream.rank.beat(now_s))
        except Exception as error:  # the next beat is due in BEAT_S
            stream.supervisor.failed("beats", error)
