"""Routers that take calls and say nothing: stopped processes, cut lines, packets that vanish.

gRPC sees no fault there: the kernel of a stopped process acknowledges all bytes. HTTP/2 pings would
tell, but the router takes only one every 10 s (more often is an attack to gRPC, and ends the
connection), and a ping that fails breaks off everything on the connection. So the calls themselves
are watched, and a health check decides:

    call unanswered, no word for half the bound ──> health check, for the other half
        any word                                 ──> well
        none                                     ──> silent; health checks go on, one at a time

Laws:
- a router is silent only after a whole bound without a word, half of it with a health check open;
- the first word of any call or health check ends the silence;
- a router that owes nothing is sent no health check, unless it is silent.
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

log = logging.getLogger("kvroute.client")


def is_word(error: BaseException) -> bool:
    """Whether an error is something that a router said, and not what the client or gRPC made up."""
    if not isinstance(error, KvRouteError):
        return False
    made_up = (RouterUnreachable, DeadlineExceeded, ClientOverloaded, ClientClosed)
    return error.reason is not None or not isinstance(error, made_up)


class Quiet:
    """For how long one router has owed an answer without a word. Pure: takes the time.

    A call that ends without an answer, by its deadline or its caller, leaves the debt: many short
    calls find a silent router as one long call does.
    """

    def __init__(self, bound_s: float) -> None:
        self.silent = False
        self._bound_s = bound_s
        self._since_s: float | None = None
        """The last word, or the first call after it if nothing was owed then; None: none is."""
        self._open = 0

    @property
    def probe_at_s(self) -> float | None:
        """When a health check is due; None: nothing is owed."""
        return None if self._since_s is None else self._since_s + self._bound_s / 2

    def asked(self, now_s: float) -> None:
        """A call went out."""
        self._open += 1
        if self._since_s is None:
            self._since_s = now_s

    def ended(self, now_s: float, *, heard: bool) -> None:
        """A call is over; heard: by the router's word."""
        self._open -= 1
        if heard:
            self.heard(now_s)

    def heard(self, now_s: float) -> None:
        """The router said something."""
        self.silent = False
        self._since_s = now_s if self._open else None

    def gone(self) -> None:
        """The connection ended, and with it what was owed: that is no silence."""
        if not self.silent:
            self._since_s = None

    def unanswered(self, probed_s: float) -> bool:
        """A health check of that time got no answer; returns whether the router is silent."""
        self.silent = self.silent or (self._since_s is not None and self._since_s <= probed_s)
        return self.silent


class Watch:
    """Keeps watch over one router. Needs a running loop."""

    def __init__(
        self,
        name: str,
        bound_s: float,
        probe: Callable[[float], Awaitable[object]],
        on_silent: Callable[[], None],
        counts: Counter[str],
    ) -> None:
        """probe: a health check, for so many seconds; raises KvRouteError. on_silent: called when
        the router goes silent, and after every further health check without an answer.

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
        """Whether the router says nothing."""
        return self._quiet.silent

    def asked(self) -> None:
        """A call went out."""
        self._quiet.asked(self._loop.time())
        if self._timer is None and self._prober is None:
            self._set_timer()

    def ended(self, *, heard: bool) -> None:
        """A call is over; heard: by the router's word."""
        self._quiet.ended(self._loop.time(), heard=False)
        if heard:
            self._heard()

    async def close(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait({self._prober})

    def _set_timer(self) -> None:
        due_s = self._quiet.probe_at_s
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        """Rings once in a bound or so, however many calls there are."""
        self._timer = None
        due_s = self._quiet.probe_at_s
        if due_s is not None and due_s <= self._loop.time():
            self._prober = asyncio.create_task(self._ask())
        else:
            self._set_timer()

    async def _ask(self) -> None:
        """Health checks until the router says a word, or turns out to be gone."""
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
        except Exception as error:  # be it our own: without a check no router counts as silent
            log.debug("a health check of %s failed: %s", self._name, error)
            self._heard()
        else:
            self._heard()

    def _unanswered(self, probed_s: float) -> None:
        before = self.silent
        if not self._quiet.unanswered(probed_s):
            return
        if not before:
            self._counts["silences"] += 1
            told = "the router at %s has said nothing for %g s: calls avoid it until it does"
            log.warning(told, self._name, 2 * self._probe_s)
        self._on_silent()

    def _heard(self) -> None:
        if self.silent:
            self._counts["silences_over"] += 1
            log.info("the router at %s answers again", self._name)
        self._quiet.heard(self._loop.time())
