"""The ZMQ sockets between a relay and its engine: a subscription that reconnects, and replays.

Memory: no frame is larger than FRAME_BYTES_MAX, and ZMQ bounds its queues in messages, not bytes.
A subscription queues RECEIVE_QUEUE_MESSAGES here, 100 MiB of batches of 100 KiB (those of a busy
step); further messages stay with the engine, whose own queue is bounded. A replay must be read at
once, since an engine's replay socket drops messages to a slow reader: its bounds are messages,
bytes and time together.

Law: a connection that libzmq gives up (an engine that breaks the protocol, a frame over the bound)
raises ConnectionBroken, because libzmq never connects it again and reports nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from events.engines.endpoints import is_ipv6, masked
from events.engines.wire import PAYLOAD_BYTES_MAX
from events.engines.zmq_framing import ReplayEnd, ReplayPart, parse_replay, replay_request

FRAME_BYTES_MAX = PAYLOAD_BYTES_MAX + 1024
"""Bytes of a frame. A payload over PAYLOAD_BYTES_MAX would be dropped anyway."""
RECEIVE_QUEUE_MESSAGES = 1_000
REPLAY_MESSAGES_MAX = 100_000
REPLAY_BYTES_MAX = 512 * 1024 * 1024
REPLAY_QUIET_S = 2.0
"""Seconds of silence that end a replay, or after which an unanswered request is sent again."""
REPLAY_QUESTIONS = 3
"""Requests for one replay. A request is lost with its connection, and an engine may be busy for
longer than REPLAY_QUIET_S; without an answer the blocks of a healthy engine stay unknown."""
REPLAY_S = 20.0
"""Seconds from the request to the end of the answer. Live messages wait as long, so after that the
relay goes on with the messages received, as partial. Engines send their 10,000 kept batches in
1 s."""
SUBSCRIBED_S = 0.1
"""Seconds until a subscription has reached the engine; a message lost before that shows as a gap in
the engine's numbers, which a replay fills."""
_PING_MS = 1000
_PONG_MS = 3000
"""Interval and time limit of ZMQ's heartbeats: an idle publisher sends nothing else."""
_RETRY_S = 1.0
"""Seconds after a loss until libzmq has given the connection up, unless it announces a reconnect,
which it does at once."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


class EndpointUnusable(Exception):
    """ZMQ can't connect or bind to the endpoint; the message has no password."""


class ConnectionBroken(Exception):
    """libzmq has given up a connection to an engine for good."""


class Subscription:
    """A subscription to one rank's event publisher. Run `watch` beside `receive`, then close it.

    The event loop watches the descriptor of a plain socket: zmq.asyncio takes a future, a poller
    and two turns of the loop for each message. libzmq signals the descriptor once for all that has
    come, so that a waiting message is known by a look at the socket alone.
    """

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, *, topic: str = "", bind: bool = False
    ) -> None:
        """Raises EndpointUnusable."""
        self._bound = bind
        # pyzmq's types know one class of sockets for a context.
        self._socket: zmq.Socket[bytes] = context.socket(  # type: ignore[assignment]
            zmq.SUB,
            socket_class=zmq.Socket,  # type: ignore[arg-type]
        )
        _set_up(self._socket, endpoint, RECEIVE_QUEUE_MESSAGES)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        self._waiting = asyncio.Event()
        """Set while messages may wait."""
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._socket.fileno()
        self._monitor: zmq.asyncio.Socket | None = None
        monitored = f"inproc://monitor-{self._descriptor}"
        try:
            self._socket.monitor(monitored, _EVENTS)
            self._monitor = context.socket(zmq.PAIR)
            self._monitor.connect(monitored)
            _attach(self._socket, endpoint, bind=bind)
            self._loop.add_reader(self._descriptor, self._look)
        except BaseException:
            self.close()
            raise

    async def receive(self) -> list[bytes]:
        """The next message; lets other tasks run even while messages wait."""
        waited = False
        while True:
            try:
                message = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._waiting.clear()
                await self._waiting.wait()
                waited = True
                continue
            if not waited:
                await asyncio.sleep(0)
            return message

    def _look(self) -> None:
        """Handles a signal of the descriptor; reading the socket's events ends the signal."""
        if self._socket.get(zmq.EVENTS):
            self._waiting.set()

    async def watch(self, on_connected: Callable[[], None]) -> None:
        """Calls on_connected after each handshake, for ever. Raises ConnectionBroken."""
        lost, monitor = False, self._monitor
        assert monitor is not None
        while True:
            try:
                async with asyncio.timeout(_RETRY_S if lost else None):
                    frames = await monitor.recv_multipart()
            except TimeoutError:
                raise ConnectionBroken(
                    "the engine's publisher broke the ZMQ protocol, or sent a frame of more than"
                    f" {FRAME_BYTES_MAX} bytes"
                ) from None
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await asyncio.sleep(SUBSCRIBED_S)
                on_connected()
            # A bound socket waits for the engine to connect again.
            lost = not self._bound and event not in (
                zmq.EVENT_HANDSHAKE_SUCCEEDED,
                zmq.EVENT_CONNECT_RETRIED,
            )

    def close(self) -> None:
        """Closes both sockets; waiting messages are dropped."""
        self._loop.remove_reader(self._descriptor)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)


@dataclass(slots=True)
class ReplayAnswer:
    """Messages of an engine's replay socket."""

    parts: list[tuple[int, bytes]] = field(default_factory=list)
    ended: bool = False
    """Whether the end marker came, so that nothing is cut off."""
    malformed: int = 0
    trouble: str = ""
    """Why the answer was cut off: replay_timeout, replay_too_slow or replay_too_large."""


async def ask_replay(
    context: zmq.asyncio.Context, endpoint: str, from_seq: int, answer: ReplayAnswer
) -> None:
    """Requests all messages from number from_seq on from an engine's replay socket; fills the
    answer, and says in `trouble` why it was cut off. Raises EndpointUnusable."""
    socket = context.socket(zmq.DEALER)
    _set_up(socket, endpoint, REPLAY_MESSAGES_MAX)
    whole = asyncio.timeout(REPLAY_S)
    try:
        _attach(socket, endpoint, bind=False)
        async with whole:
            await _request(socket, from_seq)
            await _collect(socket, answer)
    except TimeoutError:
        answer.trouble = "replay_too_slow" if whole.expired() else "replay_timeout"
    finally:
        socket.close(linger=0)


async def _request(socket: zmq.asyncio.Socket, from_seq: int) -> None:
    """Sends the request, REPLAY_QUESTIONS times at most, until the answer begins; raises
    TimeoutError."""
    for _ in range(REPLAY_QUESTIONS):
        await socket.send_multipart(replay_request(from_seq))
        if await socket.poll(round(REPLAY_QUIET_S * 1000)):
            return
    raise TimeoutError


async def _collect(socket: zmq.asyncio.Socket, answer: ReplayAnswer) -> None:
    size = 0
    for _ in range(REPLAY_MESSAGES_MAX):
        await asyncio.sleep(0)  # receiving a waiting message doesn't let other tasks run
        async with asyncio.timeout(REPLAY_QUIET_S):
            part = parse_replay(await socket.recv_multipart())
        match part:
            case ReplayPart(sequence, payload):
                answer.parts.append((sequence, payload))
                size += len(payload)
                if size > REPLAY_BYTES_MAX:
                    answer.trouble = "replay_too_large"
                    return
            case ReplayEnd():
                answer.ended = True
                return
            case _:
                answer.malformed += 1


def _set_up(socket: zmq.Socket[Any], endpoint: str, queue_messages: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))


def _attach(socket: zmq.Socket[Any], endpoint: str, *, bind: bool) -> None:
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except (zmq.ZMQError, UnicodeError) as error:
        # The error's own text has the endpoint, and its password if there is one.
        reason = zmq.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else "no host"
        raise EndpointUnusable(f"{masked(endpoint)[:200]!r}: {reason}") from None
