"""How often recent prompts began with each prefix. Pure, and in bounded memory.

    hits   = sum over requests of exp(-seconds since / FADE_S)
    window = FADE_S * (1 - exp(-age / FADE_S)), at least AGE_S_MIN; age: since the first hit
    rate   = hits / window, requests a second
    score  = hits / sqrt(window)

As long as a prefix is young, the score is hits / sqrt(age): what Mooncake's Conductor is said to
rank by. Later hits and window both fade, so that a steady prefix keeps its score.

Laws:
- a prefix is forgotten only when as many others were hit since its last hit as there is room for;
- without hits, rate and score only fall.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, sqrt

from typing_extensions import override

PrefixKey = tuple[str, int]
"""A model's name, as requests have it, and a PrefixHash."""

FADE_S = 60.0
AGE_S_MIN = 1.0


@dataclass(slots=True)
class PrefixRate:
    """How often one prefix is hit."""

    first_s: float
    hit_s: float
    """Time of the last hit."""
    hits: float = 0.0
    """Hits, faded as of hit_s."""

    def hit(self, now_s: float) -> None:
        self.hits = 1.0 + self._hits(now_s)
        self.hit_s = now_s

    def rate(self, now_s: float) -> float:
        """Hits a second."""
        return self._hits(now_s) / self._window_s(now_s)

    def score(self, now_s: float) -> float:
        """The prefix's score, by the formula above: higher is hotter."""
        return self._hits(now_s) / sqrt(self._window_s(now_s))

    def _hits(self, now_s: float) -> float:
        return self.hits * exp((self.hit_s - now_s) / FADE_S)

    def _window_s(self, now_s: float) -> float:
        return max(AGE_S_MIN, FADE_S * (1.0 - exp((self.first_s - now_s) / FADE_S)))


class PrefixRates:
    """The rates of all prefixes, in the order of their last hits."""

    def __init__(self, entries_max: int) -> None:
        self.forgotten = 0
        """Prefixes forgotten for want of room."""
        self._entries_max = entries_max
        self._rates: OrderedDict[PrefixKey, PrefixRate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    @override
    def __repr__(self) -> str:
        return f"<PrefixRates {len(self)} prefixes, {self.forgotten} forgotten>"

    def forget(self) -> None:
        """Forgets the hits of all prefixes."""
        self._rates.clear()

    def hit(self, key: PrefixKey, now_s: float) -> PrefixRate:
        """Counts a prompt that begins with a prefix, and returns the prefix's rate."""
        rate = self._rates.get(key)
        if rate is None:
            if len(self._rates) >= self._entries_max:
                self._rates.popitem(last=False)
                self.forgotten += 1
            rate = self._rates[key] = PrefixRate(now_s, now_s, 1.0)
        else:
            self._rates.move_to_end(key)
            rate.hit(now_s)
        return rate
