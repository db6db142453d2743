"""A round of dispatch over the lines of a pool: which requests are tried, and had no room. Pure.

Requests without room are looked past, within bounds, so that a large request doesn't idle a fleet
that could serve those behind it, and requests that few workers may serve don't hold the others.

Law: a round has at most FAILURES_FACTOR * (look_past + 1) attempts that fail, at most look_past + 1
of the same band and narrowing, and at most LOOKS_MAX requests that are skipped without an attempt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.decide.queue_limits.tenants import Tenants
from router.decide.queue_order.ranking import Rankings
from router.decide.queue_turns.bands import Bands
from router.decide.queue_turns.line import Line
from router.decide.queue_turns.siblings import Siblings
from router.decide.waiter import Waiter
from router.request.narrowing import Narrowing

LOOKS_MAX = 1024
"""Requests that a round skips without an attempt: about 0.3 ms."""
FAILURES_FACTOR = 4
"""Most failed attempts of a round, as a multiple of those with the same band and narrowing."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings by which waiting requests have their turns."""

    rankings: Rankings
    bands: Bands
    tenants: Tenants
    siblings: Siblings
    strict: bool
    look_past: int

    def held_by(self, waiter: Waiter, now_s: float) -> str:
        """What holds a request though a worker may have room: the key of a quota, or `sibling`;
        empty: nothing."""
        if quota := self.tenants.held_by(waiter.tenant, now_s):
            return quota
        return "sibling" if self.siblings.holds(waiter, now_s) else ""


class Round:
    """One pass over the queue: which of its requests may be tried next, and what was tried and
    passed over so far, for each line (requests of a pool and tenant, in order)."""

    def __init__(self, rules: Rules, version: int, now_s: float, lines: Callable[[], int]) -> None:
        self.went = False
        """Whether the last `of_line` ended because a request of its line was dispatched."""
        self._rules = rules
        self._look_past = rules.look_past
        self._lines = lines
        self._line_look_past = rules.look_past
        """Requests without room that are looked past in one line: the same number in each."""
        self._version = version
        self._now_s = now_s
        self._done: set[Line] = set()
        self._places: dict[Line, int] = {}
        self._skips = 0
        self._failures = 0
        self._failures_max = FAILURES_FACTOR * (rules.look_past + 1)
        self._failed: dict[tuple[int | Line, Narrowing | None], int] = {}
        """Number of requests without room, by band or line, and narrowing."""

    def over(self) -> bool:
        """Whether the round has failed or skipped as many requests as its bounds allow."""
        return self._failures >= self._failures_max or self._skips >= LOOKS_MAX

    def may_go(self, line: Line) -> bool:
        """Whether some request of a line is still to be tried in this round."""
        return not (
            line in self._done
            or (line.tenant and self._rules.tenants.held_by(line.tenant, self._now_s))
            or (self._failures and self._is_finished(line))
        )

    def of_line(self, line: Line) -> Iterator[Waiter]:
        """Yields requests of a line until one is dispatched; then another line may have the
        turn.
        """
        self.went = False
        entries = line.entries
        place = self._places.get(line, 0)
        while place < len(entries):
            entry = entries[place]
            waiter = entry[3]
            if self._is_out(line, waiter):
                self._skips += 1
            else:
                yield waiter
                if waiter.pool is None:
                    self._places[line] = line.after(place, entry)
                    self.went = True
                    return
            if waiter.passed_at == self._version:
                self._fail(line, waiter)
                if self._is_finished(line):
                    break
            if self.over():
                break
            place = line.after(place, entry)
        self._done.add(line)

    def _is_out(self, line: Line, waiter: Waiter) -> bool:
        """Whether a request must not be attempted now: it had no room since the last change, its
        wait has timed out, too many with the same allowed workers (narrowing) had none, or its
        tenant's quota or a request with the same prefix (sibling) holds it."""
        return (
            waiter.passed_at == self._version
            or waiter.expires_s <= self._now_s
            or (self._failures > 0 and self._is_closed(line, waiter.narrowing))
            or self._rules.held_by(waiter, self._now_s) != ""
        )

    def _is_closed(self, line: Line, narrowing: Narrowing | None) -> bool:
        """Whether more requests of a narrowing had no room, in a line or its band, than may."""
        failed = self._failed
        return (
            failed.get((line.level, narrowing), 0) > self._look_past
            or failed.get((line, narrowing), 0) > self._line_look_past
        )

    def _is_finished(self, line: Line) -> bool:
        """Whether a line has no request that may still be tried, by its narrowing."""
        return self._is_closed(line, None) and all(
            self._is_closed(line, narrowing) for narrowing in line.narrowings
        )

    def _fail(self, line: Line, waiter: Waiter) -> None:
        if not self._failures:
            self._line_look_past = self._look_past // max(1, self._lines())
        self._failures += 1
        for where in (line.level, line):
            key = (where, waiter.narrowing)
            self._failed[key] = self._failed.get(key, 0) + 1
