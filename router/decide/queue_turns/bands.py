"""Priority bands: levels of the queue, each with its own share of the turns. Pure.

A request waits in the highest band whose `from_priority` its priority reaches, and comes into the
next higher band once waiting has raised its priority to that band's from_priority:

    priority + queue.bands_aging * (now_s - arrived_s) >= from_priority

Strict bands have their turns from the highest one on, others by their weights, in requests.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from router.config.keys import ConfigError
from router.config.settings.queue_settings import BandSettings
from router.decide.waiter import Waiter

WHERE = "$.queue.bands"
ALL = BandSettings(name="all", from_priority=0)
"""The only band where the configuration has none."""


@dataclass(frozen=True, slots=True)
class Bands:
    """The configured bands, the lowest first."""

    settings: tuple[BandSettings, ...]
    from_priorities: tuple[int, ...]
    aging: float
    """Points that a second of waiting adds to a priority."""

    @classmethod
    def of(cls, bands: Sequence[BandSettings], aging: float) -> "Bands":
        """Makes the bands; raises ConfigError for two bands with the same name or from_priority."""
        for key in ("name", "from_priority"):
            values = [getattr(band, key) for band in bands]
            for i, value in enumerate(values):
                if value in values[:i]:
                    raise ConfigError(f"{value!r} is used twice - at `{WHERE}[{i}].{key}`")
        ascending = sorted(bands, key=lambda band: band.from_priority) or [ALL]
        return cls(tuple(ascending), tuple(band.from_priority for band in ascending), aging)

    def level(self, waiter: Waiter, now_s: float) -> int:
        """Number of a request's band; the lowest band takes all lower priorities, too."""
        if len(self.settings) == 1:
            return 0
        return self.level_of(waiter.points + self.aging * max(0.0, now_s - waiter.arrived_s))

    def level_of(self, priority: float) -> int:
        """Number of the band of a priority."""
        return max(0, bisect_right(self.from_priorities, priority) - 1)

    def rises_at_s(self, waiter: Waiter, level: int) -> float:
        """Time when a request of a band rises into the next higher band; inf: never."""
        if level + 1 >= len(self.settings) or self.aging <= 0:
            return inf
        points = self.settings[level + 1].from_priority - waiter.points
        return waiter.arrived_s + points / self.aging
