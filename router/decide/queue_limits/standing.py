"""A heap of requests, each with a number, from which any request can be removed. Pure.

An entry whose request is gone, or whose number changed, stays in the heap until it comes to the
front or until such entries are more than the live ones.

Laws: `lowest` is the least number of the live requests; the heap has at most 2 * live + SPARE
entries.
"""

from heapq import heapify, heappop, heappush

from router.decide.waiter import Waiter

SPARE = 64
"""Entries of requests that are gone, which are kept however few live ones there are."""


class Standing:
    """Live requests with their numbers."""

    def __init__(self) -> None:
        self._live: dict[Waiter, float] = {}
        self._heap: list[tuple[float, int, Waiter]] = []

    def __len__(self) -> int:
        return len(self._live)

    def put(self, waiter: Waiter, number: float) -> None:
        """Adds a request, or changes its number."""
        self._live[waiter] = number
        heappush(self._heap, (number, waiter.seq, waiter))
        if len(self._heap) > 2 * len(self._live) + SPARE:
            self._compact()

    def discard(self, waiter: Waiter) -> None:
        """Removes a request, if it is there."""
        gone = self._live.pop(waiter, None) is not None
        if gone and len(self._heap) > 2 * len(self._live) + SPARE:
            self._compact()

    def lowest(self) -> tuple[float, Waiter] | None:
        """The live request with the lowest number, of equal ones the first that arrived."""
        heap, live = self._heap, self._live
        while heap:
            number, _, waiter = heap[0]
            if live.get(waiter) == number:
                return number, waiter
            heappop(heap)
        return None

    def due(self, now_s: float) -> Waiter | None:
        """The request of `lowest`, if its number is a time that has come."""
        lowest = self.lowest()
        return lowest[1] if lowest is not None and lowest[0] <= now_s else None

    def _compact(self) -> None:
        """Leaves out the entries of requests that are gone."""
        self._heap = [(number, waiter.seq, waiter) for waiter, number in self._live.items()]
        heapify(self._heap)
