"""Sampling of decisions for the shadow policy and the decision log; changes none. Pure.

A decision that no watcher is due to get costs one check of a counter; for the others, all numbers
that watchers read are made.

Law: over many requests, each watcher sees its share of them, drawn at random, picks and refusals
alike.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from router.decide.decision.decision import Decision
from router.request.refusal import Refused

Watcher = Callable[[Decision], None]
"""Gets a decision before anything of it is reserved. May raise: the request goes on."""
RefusalWatcher = Callable[[Refused], None]
"""Gets a request that was refused. May raise: the refusal stands."""


@dataclass(slots=True)
class Sampled:
    """An observer, and its share of the decisions: above 0, at most 1."""

    watcher: Watcher
    share: float
    on_refused: RefusalWatcher | None = None
    """Gets the same share of the refusals; None: the watcher takes none."""
    left: int = 0
    """Decisions to skip before the watcher's next one."""


class Watch:
    """All observers of a router."""

    def __init__(
        self,
        watchers: Sequence[Sampled],
        rng: random.Random,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """watchers: all observers. rng: for sampling only, so that observers do not change picks.
        on_failure: called with the first error of a watcher."""
        self._rng = rng
        self._on_failure = on_failure
        self.failures = 0
        """Times that a watcher failed: all are counted, the first is logged."""
        self.use(watchers)

    def __len__(self) -> int:
        """Number of observers."""
        return len(self._watchers)

    def use(self, watchers: Sequence[Sampled]) -> None:
        """Replaces the observers."""
        self._watchers = watchers
        for sampled in watchers:
            sampled.left = self._gap(sampled)

    def take(self) -> "Due | None":
        """The observers that get the next request's outcome; None: no observer does."""
        due = []
        for sampled in self._watchers:
            if sampled.left > 0:
                sampled.left -= 1
            else:
                due.append(sampled)
                sampled.left += self._gap(sampled)
        return Due(due, self._failed) if due else None

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            self._on_failure(error)

    def _gap(self, sampled: Sampled) -> int:
        """A random number of decisions to skip, so that the observer gets its share of them."""
        if sampled.share >= 1:
            return 0
        return int(log(1.0 - self._rng.random()) / log(1.0 - sampled.share))


@dataclass(slots=True)
class Due:
    """The observers that get one request's outcome."""

    watchers: Sequence[Sampled]
    on_failure: Callable[[Exception], None]
    waited_s: float = 0.0
    """Seconds that the request spent in the router's queue before its outcome."""

    def __call__(self, decision: Decision) -> None:
        """Gives the observers a decision, before anything of it is reserved."""
        decision.waited_s = self.waited_s
        for sampled in self.watchers:
            try:
                sampled.watcher(decision)
            except Exception as error:  # a watcher's fault is no request's
                self.on_failure(error)

    def refused(self, refused: Refused) -> None:
        """Gives the observers a request that got no worker."""
        if self.waited_s:
            refused = replace(refused, waited_s=self.waited_s)
        for sampled in self.watchers:
            if sampled.on_refused is not None:
                try:
                    sampled.on_refused(refused)
                except Exception as error:  # as above
                    self.on_failure(error)
