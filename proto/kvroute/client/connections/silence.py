"""Detects routers that take calls and send nothing: stopped processes, cut cables, lost packets.

gRPC sees no fault there: the kernel of a stopped process acknowledges all bytes. HTTP/2 pings would
show it, but a router accepts one ping every 10 s (gRPC takes more for an attack and ends the
connection), and a failed ping breaks off every call on the connection. So the calls themselves are
watched, against a bound in seconds (silent_s), and a health check decides:

    call unanswered, nothing received for half the bound ──> health check, for the other half
        any answer                                        ──> well
        none                                              ──> silent; more checks, one at a time

Laws:
- a router is silent only after a whole bound without an answer, half of it with a health check
  open;
- the first answer to any call or health check ends the silence;
- a router that owes no answer gets no health check, unless it is silent.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from typing_extensions import override

from kvroute.client.errors import (
    ClientClosed,
    ClientOverloaded,
    DeadlineExceeded,
    KvRouteError,
    RouterUnreachable,
)

SILENT_S = 2.0
"""Seconds without an answer after which a router that owes one counts as silent."""

log = logging.getLogger("kvroute.client")


def from_router(error: BaseException) -> bool:
    """Whether an error was sent by a router, rather than made by this client or by gRPC."""
    if not isinstance(error, KvRouteError):
        return False
    made_here = (RouterUnreachable, DeadlineExceeded, ClientOverloaded, ClientClosed)
    return error.reason is not None or not isinstance(error, made_here)


class Quiet:
    """Measures for how long one router has owed an answer and sent nothing. Pure: the time is
    given.

    A call that ends without an answer, by its deadline or its caller, still counts as owed: many
    short calls detect a silent router as well as one long call.
    """

    def __init__(self, bound_s: float) -> None:
        self.silent = False
        self._bound_s = bound_s
        self._since_s: float | None = None
        """Time of the last answer, or of the first call after it if none was open then; None: no
        answer is owed."""
        self._open = 0

    @property
    def probe_at_s(self) -> float | None:
        """Time at which a health check is due, in seconds; None: no answer is owed."""
        return None if self._since_s is None else self._since_s + self._bound_s / 2

    def call_began(self, now_s: float) -> None:
        """Records a call that was sent."""
        self._open += 1
        if self._since_s is None:
            self._since_s = now_s

    def call_ended(self, now_s: float, *, answered: bool) -> None:
        """Records the end of a call; answered: whether the router answered it."""
        self._open -= 1
        if answered:
            self.answered(now_s)

    def answered(self, now_s: float) -> None:
        """Records an answer of the router."""
        self.silent = False
        self._since_s = now_s if self._open else None

    def gone(self) -> None:
        """Forgets the answers owed, since the connection ended: that is no silence."""
        if not self.silent:
            self._since_s = None

    def unanswered(self, probed_s: float) -> bool:
        """Records that the health check sent at probed_s got no answer; returns whether the router
        is silent.
        """
        self.silent = self.silent or (self._since_s is not None and self._since_s <= probed_s)
        return self.silent


class Watch:
    """Detects the silence of one router. Needs a running loop."""

    def __init__(
        self,
        name: str,
        bound_s: float,
        probe: Callable[[float], Awaitable[object]],
        on_silent: Callable[[], None],
        counts: Counter[str],
    ) -> None:
        """probe: a health check with a deadline in seconds; raises KvRouteError. on_silent: called
        when the router goes silent, and after every further health check without an answer.

        counts: `probes`; `silences` begun, `silences_over`.
        """
        self._name = name
        self._probe_s = bound_s / 2
        self._probe = probe
        self._on_silent = on_silent
        self._counts = counts
        self._quiet = Quiet(bound_s)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._prober: asyncio.Task[None] | None = None

    @override
    def __repr__(self) -> str:
        return f"<Watch {self._name}, {'silent' if self.silent else 'well'}>"

    @property
    def silent(self) -> bool:
        """Whether the router counts as silent."""
        return self._quiet.silent

    def call_began(self) -> None:
        """Records a call that was sent."""
        self._quiet.call_began(self._loop.time())
        if self._timer is None and self._prober is None:
            self._set_timer()

    def call_ended(self, *, answered: bool) -> None:
        """Records the end of a call; answered: whether the router answered it."""
        self._quiet.call_ended(self._loop.time(), answered=False)
        if answered:
            self._answered()

    async def close(self) -> None:
        """Ends the timer and the health checks."""
        if self._timer is not None:
            self._timer.cancel()
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait({self._prober})

    def _set_timer(self) -> None:
        due_s = self._quiet.probe_at_s
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        """The timer's callback: begins health checks if the router was quiet for half the bound,
        else waits on. It comes about once in a bound, however many calls there are."""
        self._timer = None
        due_s = self._quiet.probe_at_s
        if due_s is not None and due_s <= self._loop.time():
            self._prober = asyncio.create_task(self._check_until_known())
        else:
            self._set_timer()

    async def _check_until_known(self) -> None:
        """Health checks until the router answers, or its connection has ended."""
        try:
            await self._check()
            while self.silent:
                await self._check()
        finally:
            self._prober = None
        self._set_timer()

    async def _check(self) -> None:
        probed_s = self._loop.time()
        self._counts["probes"] += 1
        try:
            await self._probe(self._probe_s)
        except RouterUnreachable:
            self._quiet.gone()
            if self.silent:  # gRPC connects again meanwhile
                await asyncio.sleep(self._probe_s)
        except DeadlineExceeded:
            self._unanswered(probed_s)
        except Exception as error:  # also a bug: without a health check no router is silent
            log.debug("a health check of %s failed: %s", self._name, error)
            self._answered()
        else:
            self._answered()

    def _unanswered(self, probed_s: float) -> None:
        before = self.silent
        if not self._quiet.unanswered(probed_s):
            return
        if not before:
            self._counts["silences"] += 1
            message = "the router at %s has sent nothing for %g s: calls avoid it until it answers"
            log.warning(message, self._name, 2 * self._probe_s)
        self._on_silent()

    def _answered(self) -> None:
        if self.silent:
            self._counts["silences_over"] += 1
            log.info("the router at %s answers again", self._name)
        self._quiet.answered(self._loop.time())
