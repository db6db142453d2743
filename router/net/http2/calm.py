"""Bounds on the rate of a peer's frames that carry no request. Pure.

Law: every frame that carries nothing counts, of whatever kind: PING, SETTINGS, WINDOW_UPDATE,
PRIORITY, GOAWAY, acknowledgements, unknown kinds, empty DATA, small parts of header blocks, and all
frames of streams that are over or were refused. CONTROL_MAX a second may come, and
CONTROL_PER_ANSWER more for each frame of an answer. A PING does not count if a frame of an answer
was sent since the last PING: clients measure the network by pings.
"""

from collections.abc import Callable
from math import inf

from router.net.http2.frames import (
    CONTROL_MAX,
    CONTROL_PER_ANSWER,
    CONTROL_SAVED_MAX,
    PING_SLACK,
    PING_STRIKES,
    RESETS_MAX,
    Code,
    ConnectionFault,
)


class Calm:
    """Counts one connection's frames that carry no request, and its resets."""

    def __init__(self, ping_every_s: float, sent: Callable[[], int]) -> None:
        """ping_every_s: least seconds between two pings without an answer of a call between them;
        PING_STRIKES may come sooner, as in gRPC's own server. sent: returns the number of answers'
        frames sent so far.
        """
        self._ping_every_s = ping_every_s
        self._sent = sent
        self._pinged_s = -inf
        self._pinged_sent = 0
        """Frames of answers when the last ping came."""
        self._strikes = 0
        self.now_s = 0.0
        """Monotonic seconds, set by the caller before it counts frames."""
        self._left = float(CONTROL_MAX)
        self._left_at_s = 0.0
        self._left_at_sent = 0
        """When, and after how many frames of answers, _left was last added to."""
        self._second = 0
        self._resets = 0

    def control(self, count: int = 1) -> None:
        """Counts frames that carry no request; raises ConnectionFault beyond the bound."""
        self._left -= count
        if self._left < 0:
            self._add()
            if self._left < 0:
                about = f"the client sent over {CONTROL_MAX} frames a second that carry nothing"
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)

    def _add(self) -> None:
        sent = self._sent()
        self._left += CONTROL_PER_ANSWER * (sent - self._left_at_sent)
        self._left = min(self._left, CONTROL_SAVED_MAX)
        if self._left < CONTROL_MAX:
            passed_s = self.now_s - self._left_at_s
            self._left = min(CONTROL_MAX, self._left + CONTROL_MAX * passed_s)
        self._left_at_s, self._left_at_sent = self.now_s, sent

    def ping(self) -> None:
        """Counts a PING; raises ConnectionFault beyond the bound."""
        pinged_s, self._pinged_s = self._pinged_s, self.now_s
        if (sent := self._sent()) != self._pinged_sent:
            self._pinged_sent, self._strikes = sent, 0
            return
        self.control()
        if self.now_s - pinged_s < PING_SLACK * self._ping_every_s:
            self._strikes += 1
            if self._strikes > PING_STRIKES:
                # The text has gRPC's clients ping less often from then on.
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too_many_pings")

    def reset(self) -> None:
        """Counts an RST_STREAM; raises ConnectionFault beyond the bound."""
        if (second := int(self.now_s)) != self._second:
            self._second, self._resets = second, 0
        self._resets += 1
        if self._resets > RESETS_MAX:
            about = f"the client sent over {RESETS_MAX} RST_STREAM a second"
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, about)
