"""How long a stream of ext_proc may wait for the next step of its request.

    opened -> request headers -> body -> pending, picked, answered -> over -> ended

Laws:
- a request's headers, and after the request the stream's end, are waited for HEAD_TIMEOUT_S, as
  headers are on every HTTP port;
- a body is waited for as in `kvroute gateway` (pace.py); where Envoy sends it whole, its pace can't
  be seen, and BODY_S alone counts;
- from the whole body to the end of the answer only the call's own deadline counts: an engine may be
  silent as long as it computes, and leases bound what is reserved there;
- a stream has one timer at most; a timer that runs too early is set again.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from math import inf


class Wait(Enum):
    """The step that a stream is waiting for."""

    HEADERS = auto()
    BODY = auto()
    NOTHING = auto()
    END = auto()


class Patience:
    """The timer of one stream."""

    __slots__ = ("_due", "_late", "_timer")

    def __init__(self, due: Callable[[], float], late: Callable[[], None]) -> None:
        """due: returns the time at which the stream is late, by the loop's clock; inf: never. late:
        called when the stream is late.
        """
        self._due = due
        self._late = late
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def await_deadline(self) -> None:
        """Sets the timer, or moves it to an earlier time; if the time became later, the timer
        checks when it runs.
        """
        due_s, timer = self._due(), self._timer
        if due_s == inf or (timer is not None and timer.when() <= due_s):
            return
        if timer is not None:
            timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due_s, self._look)

    def stop(self) -> None:
        """Cancels the timer, since the stream is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due, self._late = _never, _nothing  # these refer to the stream, and it to this

    def _look(self) -> None:
        self._timer = None
        if asyncio.get_running_loop().time() >= self._due():
            self._late()
        else:
            self.await_deadline()


def _never() -> float:
    return inf


def _nothing() -> None: ...
