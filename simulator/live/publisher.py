"""The engine's ZMQ sockets: publishes event batches, and replays the last of them on request.

A message is (topic, sequence number in 8 bytes big-endian, payload); numbers count from 0, one for
each batch. A replay request is ("", first number); its answer is a message for each batch,
("", topic, number, payload), and ("", "", -1, "") at the end: vLLM's framing since 0.26. As with
vLLM, a replay silently leaves out batches older than the ring, and messages that don't fit into a
slow subscriber's queue are dropped.
"""

import asyncio
from collections import deque
from itertools import islice

import zmq
import zmq.asyncio

from simulator.engines.vllm_wire import END_OF_REPLAY, encode_sequence

_SEND_QUEUE = 100_000
"""Messages queued for a subscriber; vLLM's default."""

RING_BATCHES = 10_000
"""Number of the last batches that can be replayed."""
ANY_PORT = "tcp://127.0.0.1:*"


class Publisher:
    """A PUB socket and a ROUTER socket over one ring of batches. Needs a running loop.

    Raises zmq.ZMQError for an endpoint that is taken.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        endpoint: str = ANY_PORT,
        replay_endpoint: str = ANY_PORT,
    ) -> None:
        self.topic = "kv-events"
        self.malformed_requests = 0
        """Number of unreadable replay requests."""
        self._next = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING_BATCHES)
        self._events: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        self._events.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._events.setsockopt(zmq.LINGER, 0)
        self._replay.setsockopt(zmq.LINGER, 0)
        try:
            for socket, where in ((self._events, endpoint), (self._replay, replay_endpoint)):
                # `*` is every address of both families; libzmq does without IPv6 if need be.
                socket.setsockopt(zmq.IPV6, int(where.startswith(("tcp://*", "tcp://["))))
                socket.bind(where)
        except zmq.ZMQError:
            self._close_sockets()  # a context waits for all of its sockets when it ends
            raise
        self._answering = asyncio.create_task(self._answer())

    @property
    def endpoint(self) -> str:
        """The endpoint of the events, as it is bound."""
        return _bound_to(self._events)

    @property
    def replay_endpoint(self) -> str:
        return _bound_to(self._replay)

    @property
    def next_sequence(self) -> int:
        return self._next

    def publish(self, payload: bytes) -> int:
        """Sends a batch to all subscribers and keeps it for replays; returns its number."""
        sequence = self._next
        self._next += 1
        self._ring.append((sequence, payload))
        # A PUB socket drops for a full or absent subscriber; it never blocks.
        self._events.send_multipart(
            (self.topic.encode(), encode_sequence(sequence), payload), zmq.NOBLOCK
        )
        return sequence

    async def close(self) -> None:
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._events.close()
        self._replay.close()

    async def _answer(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                self.malformed_requests += 1
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            skip = max(0, first - self._ring[0][0]) if self._ring else 0
            for sequence, payload in list(islice(self._ring, skip, None)):
                await self._replay.send_multipart(
                    (client, b"", self.topic.encode(), encode_sequence(sequence), payload)
                )
            await self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bound_to(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
