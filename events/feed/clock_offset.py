"""The offset between another host's clock and ours, from messages with unknown delays. Pure.

A message's delay only adds to the difference, so the least difference of many messages is nearest
to the true offset (as in NTP's clock filter, RFC 5905, section 10, which takes the sample of least
delay). A clock that is set forward shows at once; set back, after two windows at most.

Law: the offset is the least difference of the last one to two windows.
"""

from math import inf

from typing_extensions import override

WINDOW_S = 30.0
"""Seconds of a window; a flood that delays all messages is shorter."""


class ClockOffset:
    """Our clock less one sender's clock, in seconds."""

    __slots__ = ("_began_s", "_last", "_least", "_window_s")

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._began_s = -inf
        self._least = inf
        """Least difference of the present window."""
        self._last = inf
        """Least difference of the window before."""

    @override
    def __repr__(self) -> str:
        return f"<ClockOffset {self.seconds:.3f} s>"

    @property
    def seconds(self) -> float:
        """The offset; inf before the first message."""
        return min(self._least, self._last)

    def heard(self, sent_s: float, now_s: float) -> None:
        """Takes a message that arrived at now_s, by our clock, and was sent at sent_s, by the
        sender's."""
        if now_s - self._began_s >= self._window_s:
            is_next = now_s - self._began_s < 2 * self._window_s
            self._last = self._least if is_next else inf
            self._least, self._began_s = inf, now_s
        self._least = min(self._least, now_s - sent_s)
