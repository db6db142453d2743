"""KV cache that the answers of a worker's open requests will still need.

All running requests of an engine grow by about a token a step. So the most that they hold at once
comes just before one of them ends, and a new request has to fit beside that:

    grown(i) = min(expected(i), pace * age(i))       tokens of answer i that are out
    left(i)  = expected(i) - grown(i)
    held(v)  = v + sum of (grown(i) + v) over answers with left(i) >= v
                 + sum of expected(i) over answers with left(i) = 0
    peak     = the largest held(v), for v from 0 to the new request's expected tokens

expected(i) is answer i's expected length in tokens, age(i) the seconds since its pick, and pace the
tokens a second at which the sum of grown(i) is what the answers hold now. An answer longer than
expected holds what was expected until it ends. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class ExpectedOutputs:
    """Expected lengths of the answers of this router's open requests on one worker, without answers
    of a single token.
    """

    tokens: int = 0
    """Sum of the expected lengths, tokens that are out included."""
    _open: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Reservation -> when it was opened, expected tokens."""

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return iter(self._open.values())

    def add(self, reservation_id: str, now_s: float, tokens: int) -> None:
        """Adds a reservation that began, unless its answer is a single token."""
        if tokens > 1:
            self._open[reservation_id] = (now_s, tokens)
            self.tokens += tokens

    def drop(self, reservation_id: str) -> None:
        """Removes a reservation that ended, if it was added."""
        if (ended := self._open.pop(reservation_id, None)) is not None:
            self.tokens -= ended[1]

    def peak_tokens(self, held_tokens: float, new_tokens: int, now_s: float) -> float:
        """The most tokens of answers at once while a new request's answer grows to new_tokens.

        held_tokens: KV cache in use beyond the prompts of open requests, in tokens. What exceeds
        the expected lengths here is held by other requests, and counts as staying. O(n log n).
        """
        if not self._open:
            return held_tokens + new_tokens
        began_s, expected = np.array(list(self._open.values()), np.float64).T
        ages_s = np.maximum(now_s - began_s, 0.0)
        pace = held_tokens / ages_s.sum() if ages_s.any() else 0.0
        grown = np.minimum(expected, pace * ages_s)
        left = expected - grown
        order = np.argsort(left, kind="stable")
        left, grown = left[order], grown[order]
        others = max(0.0, held_tokens - float(grown.sum()))
        done = int(np.searchsorted(left, 0.0, side="right"))
        others += float(grown[:done].sum())
        left, grown = left[done:], grown[done:]
        alive = np.append(np.cumsum(grown[::-1])[::-1], 0.0)
        counts = np.arange(len(left), -1, -1.0)
        at = np.append(left, np.inf)
        within = at <= new_tokens
        ends = alive[within] + (counts[within] + 1.0) * at[within]
        last = int(np.searchsorted(left, new_tokens, side="left"))
        final = float(alive[last] + (counts[last] + 1.0) * new_tokens)
        return others + max(final, float(alive[0]), float(ends.max()) if len(ends) else 0.0)
