"""Deadlines of one connection's calls, as their callers set them (grpc-timeout).

Law: a deadline counts from a call's headers; a call that is over within the turn in which it was
opened gets no timer.
"""

import asyncio
from functools import lru_cache
from typing import Protocol

from router.net.http2.requests import Head
from router.net.http2.sockets import Http2Protocol

PASSED = "the call's deadline passed before its answer"
_UNITS_S = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "S": 1.0, "M": 60.0, "H": 3600.0}


class NoTimeoutError(ValueError):
    """A call's `grpc-timeout` is invalid; the call ends with INTERNAL."""


class Timed(Protocol):
    """Interface: a call with a deadline."""

    def await_deadline(self) -> None:
        """Sets a timer for the deadline, if the call is still open."""


class Deadlines:
    """The deadlines of one connection's open calls, and their timers."""

    def __init__(self, protocol: Http2Protocol) -> None:
        self._protocol = protocol
        self.clock = asyncio.get_running_loop().time
        self._new: list[Timed] = []
        """Calls of this turn: few are open still at its end, and only those get a timer."""

    def of(self, head: Head) -> float | None:
        """Deadline of a call by the loop's clock; None: it has none. Raises NoTimeoutError."""
        if head.timeout is None:
            return None
        seconds = timeout_s(head.timeout)
        if seconds is None:
            raise NoTimeoutError(
                f"the header grpc-timeout has no valid value: {head.timeout[:32]!r}"
            )
        return self.clock() + seconds

    def add(self, call: Timed) -> None:
        """Adds a call with a deadline that was opened in this turn."""
        self._new.append(call)
        self._protocol.on_turn_over = self._await_all

    def _await_all(self) -> None:
        calls, self._new = self._new, []
        for call in calls:
            call.await_deadline()


@lru_cache(maxsize=1024)
def timeout_s(text: str) -> float | None:
    """Seconds of a `grpc-timeout` value; None: it is invalid."""
    unit = _UNITS_S.get(text[-1:])
    digits = text[:-1]
    if unit is None or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        return None
    return int(digits) * unit
