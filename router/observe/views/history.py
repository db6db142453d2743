"""The last hour of one router, as a point each 10 s. Pure: no clock, no sockets.

Totals only grow, so a point is the difference of two readings, over the time between them. A ratio
whose denominator is 0 is None, never 0: a chart shows a gap there. Totals are read from the same
counters as the router's metrics.

Law: at most POINTS_MAX points are held; each of their maps has at most NAMES_MAX + 1 names.
"""

from collections import deque
from collections.abc import Mapping
from heapq import nlargest

import msgspec
from typing_extensions import override

from router.decide.core.tally import PickTally
from router.decide.queue.views import OTHER, Sums
from router.fleet.health.time_check import TimeCheck

POINT_S = 10.0
"""Seconds between two points."""
POINTS_MAX = 360
"""Most points that are held: those of an hour."""
NAMES_MAX = 16
"""Bands, and tenants, that a point names: those with most waiting requests. OTHER sums the rest."""


class Totals(msgspec.Struct, frozen=True):
    """Sums since the router's start; none ever falls."""

    picks: int = 0
    prompt_tokens: int = 0
    reachable_tokens: int = 0
    """Sum over picks of the usable overlap on the worker that held most, tokens."""
    taken_tokens: int = 0
    """Sum over picks of the usable overlap on the picked worker, tokens."""
    predicted: int = 0
    """Number of picks whose time to the first token was predicted."""
    predicted_s: float = 0.0
    """Sum of these predicted times, seconds."""
    measured: int = 0
    """Number of the picks with a predicted time whose first token was reported."""
    measured_s: float = 0.0
    """Sum of the seconds from these picks to their first tokens."""
    refused: int = 0
    """Number of requests that got no worker."""

    @classmethod
    def of(cls, tally: PickTally, check: TimeCheck, refused: int = 0) -> "Totals":
        """Sums since the start, from the counts of picks and of measured first tokens."""
        prompt_tokens, reachable_tokens, *taken_tokens = tally.tokens.tolist()
        return cls(
            picks=int(tally.picks[0]),
            prompt_tokens=prompt_tokens,
            reachable_tokens=reachable_tokens,
            taken_tokens=sum(taken_tokens),
            predicted=tally.ttfts,
            predicted_s=tally.ttft_s,
            measured=sum(check.counts),
            measured_s=check.measured_s,
            refused=refused,
        )


class Waiting(msgspec.Struct, frozen=True):
    """Requests that wait in this router now, by band and by tenant."""

    bands: Mapping[str, int] = {}
    tenants: Mapping[str, int] = {}

    @classmethod
    def of(cls, sums: Sums) -> "Waiting":
        bands = {band: depth.count for band, depth in sums.bands.items()}
        return cls(bands, sums.tenants)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A point: rates and means between two readings of Totals; waiting requests at the second."""

    at_s: float
    """Time of the second reading, in seconds of the caller's clock."""
    picks_per_s: float
    refused_per_s: float = 0.0
    hit_taken: float | None
    """Usable overlap taken / prompt tokens; None: no prompt tokens."""
    hit_reachable: float | None
    """Usable overlap on the workers that held most / prompt tokens; None: no prompt tokens."""
    ttft_predicted_s: float | None
    """Mean predicted time to the first token; None: no pick's time was predicted."""
    ttft_measured_s: float | None
    """Mean measured time to the first token of picks with a predicted one; where there are none,
    the running mean of all picks; None: unknown."""
    bands: dict[str, int]
    """Band -> waiting requests at `at_s`."""
    tenants: dict[str, int]


class History:
    """The last hour of one router, as points."""

    def __init__(self, now_s: float, totals: Totals) -> None:
        """totals: the reading from which the first point is counted."""
        self._read_s = now_s
        self._totals = totals
        self._points: deque[Point] = deque(maxlen=POINTS_MAX)

    @override
    def __repr__(self) -> str:
        return f"<History {len(self._points)} of {POINTS_MAX} points, read at {self._read_s:.0f} s>"

    @property
    def points(self) -> tuple[Point, ...]:
        """The points, the oldest first."""
        return tuple(self._points)

    def is_due(self, now_s: float) -> bool:
        """Whether POINT_S went by since the last reading."""
        return now_s - self._read_s >= POINT_S

    def add(
        self, now_s: float, totals: Totals, waiting: Waiting, first_token_s: float | None = None
    ) -> Point | None:
        """Adds a point, and forgets the oldest beyond POINTS_MAX; None, and no change, before
        the next point is due.

        A late reading makes one longer point: its rates are means over all that time.
        first_token_s: a running mean of measured first tokens, for points without measured
        predictions; None: no first token was reported lately.
        """
        if not self.is_due(now_s):
            return None
        before, elapsed_s = self._totals, now_s - self._read_s
        tokens = totals.prompt_tokens - before.prompt_tokens
        measured_s = _ratio(
            totals.measured_s - before.measured_s, totals.measured - before.measured
        )
        point = Point(
            at_s=now_s,
            picks_per_s=(totals.picks - before.picks) / elapsed_s,
            refused_per_s=(totals.refused - before.refused) / elapsed_s,
            hit_taken=_ratio(totals.taken_tokens - before.taken_tokens, tokens),
            hit_reachable=_ratio(totals.reachable_tokens - before.reachable_tokens, tokens),
            ttft_predicted_s=_ratio(
                totals.predicted_s - before.predicted_s, totals.predicted - before.predicted
            ),
            ttft_measured_s=first_token_s if measured_s is None else measured_s,
            bands=_named(waiting.bands),
            tenants=_named(waiting.tenants),
        )
        self._points.append(point)
        self._read_s, self._totals = now_s, totals
        return point


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _named(counts: Mapping[str, int]) -> dict[str, int]:
    """The NAMES_MAX largest counts, equal ones by name; the rest in sum as OTHER."""
    if len(counts) <= NAMES_MAX:
        return dict(counts)
    own = {name: count for name, count in counts.items() if name != OTHER}
    shown = dict(nlargest(NAMES_MAX, own.items(), key=_by_count))
    shown[OTHER] = sum(counts.values()) - sum(shown.values())
    return shown


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return item[1], item[0]
