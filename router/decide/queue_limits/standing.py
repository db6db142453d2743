"""A heap of requests, each with a number, from which any request can be removed. Pure.

Live requests are those that were added and not removed. An entry whose request was removed, or got
another number, stays in the heap until it comes to the front or the heap is over its bound.

Laws: `lowest` is the least number of the live requests; the heap has at most 2 * (number of live
requests) + SPARE entries.
"""

from heapq import heapify, heappop, heappush

from router.decide.waiter import Waiter

SPARE = 64
"""Entries of removed requests that the heap may have however few live requests there are."""


class Standing:
    """Live requests, each with a number such as a time, and the lowest of these numbers."""

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
        """The lowest number and its live request, of equal ones the first that arrived; None: no
        request is live.
        """
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
        """Makes the heap again, of the live requests alone."""
        self._heap = [(number, waiter.seq, waiter) for waiter, number in self._live.items()]
        heapify(self._heap)
