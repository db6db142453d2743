"""What looks at a share of the decisions, and changes none of them. Pure.

A decision that is due for somebody takes the general way, which comes to the same pick as the lane
and has all its numbers at hand; all others pay for one look at a counter.

Law: over many decisions, each watcher sees its share of them, drawn at random.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from router.decision import Decision

Watcher = Callable[[Decision], None]
"""Gets a decision before anything of it is reserved. May raise: the request goes on."""


@dataclass(slots=True)
class Sampled:
    """A watcher, and its share of the decisions: above 0, at most 1."""

    watcher: Watcher
    share: float
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
        """rng: its own, so that who watches does not change what is picked."""
        self._watchers = watchers
        self._rng = rng
        self._on_failure = on_failure
        self.failures = 0
        """Times that a watcher failed: the first is told, all are counted."""
        for one in watchers:
            one.left = self._gap(one)

    @property
    def left(self) -> int:
        """Decisions before the next one that somebody sees; 0 or less: the next one is seen."""
        return min(one.left for one in self._watchers)

    def passed(self, count: int) -> None:
        """Decisions were made that nobody saw."""
        for one in self._watchers:
            one.left -= count

    def take(self) -> Watcher | None:
        """Who sees the decision that is made next; None: nobody."""
        if self.left > 0:
            self.passed(1)
            return None
        due = []
        for one in self._watchers:
            if one.left > 0:
                one.left -= 1
            else:
                due.append(one.watcher)
                one.left += self._gap(one)

        def see(decision: Decision) -> None:
            for watcher in due:
                try:
                    watcher(decision)
                except Exception as error:  # a watcher's fault is no request's
                    self.failures += 1
                    if self.failures == 1:
                        self._on_failure(error)

        return see

    def _gap(self, one: Sampled) -> int:
        """How many decisions are passed by until one is drawn."""
        if one.share >= 1:
            return 0
        return int(log(1.0 - self._rng.random()) / log(1.0 - one.share))
