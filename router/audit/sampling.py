"""What looks at a share of the decisions, and changes none of them. Pure.

A decision that is due for somebody takes the general way, which comes to the same pick as the lane
and has all its numbers at hand; all others pay for one look at a counter.

Law: over many requests, each watcher sees its share of them, drawn at random, picks and refusals
alike.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log

from router.decision.decision import Decision
from router.request.refusal import Refused

Watcher = Callable[[Decision], None]
"""Gets a decision before anything of it is reserved. May raise: the request goes on."""
RefusalWatcher = Callable[[Refused], None]
"""Gets a request that was refused. May raise, too."""


@dataclass(slots=True)
class Sampled:
    """A watcher, and its share of the decisions: above 0, at most 1."""

    watcher: Watcher
    share: float
    on_refused: RefusalWatcher | None = None
    """Sees the same share of the refusals; None: they are nothing to it."""
    left: int = 0
    """Decisions to pass by before the next one that it sees."""


class Watch:
    """All watchers of a router."""

    def __init__(
        self,
        watchers: Sequence[Sampled],
        rng: random.Random,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """watchers: see `use`. rng: its own, so that who watches does not change what is picked."""
        self._rng = rng
        self._on_failure = on_failure
        self.failures = 0
        """Times that a watcher failed: the first is told, all are counted."""
        self.use(watchers)

    def use(self, watchers: Sequence[Sampled]) -> None:
        """Others watch from now on."""
        self._watchers = watchers
        for one in watchers:
            one.left = self._gap(one)

    @property
    def left(self) -> float:
        """Decisions before the next one that somebody sees; 0 or less: the next one is seen; inf:
        nobody watches."""
        return min((one.left for one in self._watchers), default=inf)

    def passed(self, count: int) -> None:
        """Decisions were made that nobody saw."""
        for one in self._watchers:
            one.left -= count

    def take(self) -> "Due | None":
        """Who sees what becomes of the next request; None: nobody."""
        if self.left > 0:
            self.passed(1)
            return None
        due = []
        for one in self._watchers:
            if one.left > 0:
                one.left -= 1
            else:
                due.append(one)
                one.left += self._gap(one)
        return Due(due, self._failed)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            self._on_failure(error)

    def _gap(self, one: Sampled) -> int:
        """How many decisions are passed by until one is drawn."""
        if one.share >= 1:
            return 0
        return int(log(1.0 - self._rng.random()) / log(1.0 - one.share))


class Due:
    """Those who see what becomes of one request."""

    def __init__(
        self, watchers: Sequence[Sampled], on_failure: Callable[[Exception], None]
    ) -> None:
        self._watchers = watchers
        self._on_failure = on_failure

    def __call__(self, decision: Decision) -> None:
        """A decision, before anything of it is reserved."""
        for one in self._watchers:
            try:
                one.watcher(decision)
            except Exception as error:  # a watcher's fault is no request's
                self._on_failure(error)

    def refused(self, refused: Refused) -> None:
        """It got no worker."""
        for one in self._watchers:
            if one.on_refused is not None:
                try:
                    one.on_refused(refused)
                except Exception as error:  # nor is this
                    self._on_failure(error)
