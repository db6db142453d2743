"""By how much another host's clock differs from ours, from messages that take a while. Pure.

A message is at least as old as it was under way, so the least difference of many is the nearest to
the truth (as in NTP's clock filter, RFC 5905, section 10, which takes the sample of least delay).
A clock that is set forward shows at once; set back, after two windows at most.

Law: the offset is the least difference of the last WINDOW_S to 2 * WINDOW_S.
"""

from math import inf

from typing_extensions import override

WINDOW_S = 30.0
"""As long as a flood of messages delays all of them, at least."""


class ClockOffset:
    """Of one sender: our clock less the sender's, in seconds."""

    __slots__ = ("_began_s", "_last", "_least")

    def __init__(self) -> None:
        self._began_s = -inf
        self._least = inf
        """Of this window."""
        self._last = inf
        """Of the one before."""

    @override
    def __repr__(self) -> str:
        return f"<ClockOffset {self.seconds:.3f} s>"

    @property
    def seconds(self) -> float:
        """inf: nothing was heard."""
        return min(self._least, self._last)

    def heard(self, sent_s: float, now_s: float) -> None:
        """A message came that was sent at `sent_s` by the sender's clock."""
        if now_s - self._began_s >= WINDOW_S:
            is_next = now_s - self._began_s < 2 * WINDOW_S
            self._last = self._least if is_next else inf
            self._least, self._began_s = inf, now_s
        self._least = min(self._least, now_s - sent_s)
