"""A histogram that its owner counts in, and scrapes read. Pure."""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """Counts of values by their size, and their sum."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, inclusive and ascending."""
    counts: list[int] = field(init=False)
    """Number of values in each bucket, and above the last bound."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
