"""Frames that steer a connection or its streams, and carry nothing else. Pure.

Laws:
- each of them counts (calm.Calm);
- the last value of a setting in a frame counts, once: a frame of settings costs what its streams
  and bytes cost, however often it has the same one.
"""

from router.net.http2.calm import Calm
from router.net.http2.frames import (
    ACK,
    END_STREAM,
    FAREWELL,
    GOAWAY,
    LAST,
    PING,
    RESET_WORK,
    SETTING,
    SETTINGS,
    SETTINGS_STREAMS,
    U32,
    WINDOW_MAX,
    Code,
    ConnectionFault,
    frame,
)
from router.net.http2.messages import Service
from router.net.http2.streams import Streams
from router.net.listener.held import Held


class Control(Streams):
    """Handles one connection's control frames: windows, settings, pings, resets and GOAWAY."""

    def __init__(self, service: Service, held: Held, ping_every_s: float) -> None:
        """held: counts the bytes that this connection holds. ping_every_s: see Calm."""
        super().__init__(service, held)
        sending = self._sending
        self._calm = Calm(ping_every_s, lambda: sending.sent)
        self._last = 0
        """Number of the last stream of the peer."""
        self.acknowledged = False
        """Whether the peer has read a GOAWAY, and opens no more streams."""
        self.last_sent = False
        """Whether a PING was sent behind the last bytes."""
        self.read_all = False
        """Whether it came back: the peer has read them."""

    def _is_idle(self, number: int) -> bool:
        """Whether a number is of no stream that the peer has opened."""
        return number > self._last or not number & 1

    def _rst_stream(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM must have 4 bytes")
        if self._is_idle(number):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "RST_STREAM names no open stream")
        self._calm.reset()
        self._work += RESET_WORK
        if (stream := self.streams.get(number)) is not None:
            self._forget(stream)
            return
        self._calm.control()
        self._early.pop(number, None)
        unsent = self._answered.pop(number, None)
        if unsent is not None and U32.unpack(payload)[0] != Code.NO_ERROR:
            unsent()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS must be on stream 0")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(
                Code.FRAME_SIZE_ERROR, "the length of SETTINGS must be a multiple of 6"
            )
        self._calm.control()
        if flags & ACK:
            return
        self._work += len(payload) >> 5
        sending = self._sending
        last = dict(SETTING.iter_unpack(payload))
        if last.get(2, 0) > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "ENABLE_PUSH must be 0 or 1")
        window = last.get(4, sending.window)
        if window != sending.window:
            streams = len(self.streams)
            self._calm.control(streams // SETTINGS_STREAMS)
            self._work += streams // 8
            sending.resize(window, self.streams.values())
        if 5 in last:
            sending.frames_of(last[5])
        self.out.append(frame(SETTINGS, ACK, 0))

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING must be on stream 0")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING must have 8 bytes")
        if flags & ACK:
            self._calm.control()
            self.acknowledged |= payload == FAREWELL
            self.read_all |= payload == LAST
            return
        self._calm.ping()
        self.out.append(frame(PING, ACK, 0, payload))

    def _priority(self, number: int, payload: bytes) -> None:
        self._calm.control()
        if not number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY must not be on stream 0")
        if len(payload) == 5:
            if U32.unpack_from(payload)[0] & WINDOW_MAX != number:
                return
            code, about = Code.PROTOCOL_ERROR, "its own dependency"
        else:
            code, about = Code.FRAME_SIZE_ERROR, "PRIORITY has 5 bytes"
        if (stream := self.streams.get(number)) is not None:
            self._reset(stream, code, about)
        elif self._is_idle(number):  # which RST_STREAM can't name
            raise ConnectionFault(code, about)
        else:
            self._refuse(number, END_STREAM, code)

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have 4 bytes")
        self._calm.control()
        room = U32.unpack(payload)[0] & WINDOW_MAX
        if not number:
            if not room:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE must add more than 0")
            self._sending.grant_all(room)
        elif self._is_idle(number):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE names no open stream")
        elif (stream := self.streams.get(number)) is not None:
            if not room:
                self._reset(stream, Code.PROTOCOL_ERROR, "WINDOW_UPDATE must add more than 0")
            elif not self._sending.grant(stream, room):
                self._reset(stream, Code.FLOW_CONTROL_ERROR, "a stream's window exceeds 2^31 - 1")

    def _other(self, kind: int, number: int, payload: bytes) -> None:
        self._calm.control()
        if kind == GOAWAY and number:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "GOAWAY must be on stream 0")
        if kind == GOAWAY and len(payload) < 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "GOAWAY must have 8 bytes or more")
