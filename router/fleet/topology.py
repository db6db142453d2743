"""How far workers are from one another, by the labels that say where they run. Pure.

    0  the same host        (label `host`; a worker without one is its own host)
    1  the same rack        (label `rack`)
    2  the same cluster     (label `cluster`)
    3  another cluster, or unknown

A name stands for one place in the whole fleet. A worker without a label shares its place with none.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from router.fleet.table import Column

BEYOND = 3


PLACES = ("host", "rack", "cluster")
"""Names of the worker labels for places, the nearest kind first."""


class Topology:
    """Distances between the workers of a pool, each of which is a row."""

    def __init__(self, labels: Sequence[Mapping[str, str]]) -> None:
        """labels: the labels of each worker."""
        places: dict[tuple[object, ...], int] = {}
        self._place = np.empty(len(labels), np.intp)
        for row, of_worker in enumerate(labels):
            place = tuple(of_worker.get(name) or (row, name) for name in PLACES)
            self._place[row] = places.setdefault(place, len(places))
        distance = np.full((len(places), len(places)), BEYOND, np.float64)
        for level in reversed(range(len(PLACES))):
            codes: dict[object, int] = {}
            of = np.array([codes.setdefault(place[level], len(codes)) for place in places])
            distance[of[:, None] == of[None, :]] = level
        self._distance = distance
        """Distance between each two places."""

    def between(self, row: int, other: int) -> float:
        """Distance from one worker to another."""
        return float(self._distance[self._place[row], self._place[other]])

    def distances_to(self, row: int) -> Column:
        """Distance from each worker to one worker."""
        distances: Column = self._distance[:, self._place[row]][self._place]
        return distances

    def mean_distance(self, targets: npt.NDArray[np.bool_]) -> Column:
        """Mean distance from each worker to some of them; 0 where there are none.

        targets: True for those workers.
        """
        count = np.count_nonzero(targets)
        if not count:
            return np.zeros(len(self._place))
        at = np.bincount(self._place[targets], minlength=len(self._distance))
        there = np.flatnonzero(at)
        sums = self._distance[:, there] @ at[there].astype(np.float64)
        means: Column = (sums / count)[self._place]
        return means
