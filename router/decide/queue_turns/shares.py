"""Weighted shares of dispatches: of tenants in uncached tokens, of bands in requests. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996):

    start = max(virtual time, finish of the flow's last request)
    finish = start + cost / weight
    virtual time = start of the last request that went

The flow with the lowest start has the turn. Law (theorem 1 there): while two flows have waiting
requests that fit, their service divided by their weights differs, over any window, by at most one
largest request of each flow divided by its weight.

Why this and not deficit round robin: the bound is the same, but a turn here needs no quantum, which
would have to be as large as the largest prompt, and no rounds to walk, and the cost of a request
need not be known before it goes: how much of a prompt is cached is known with the pick.

A flow that can't use its turn, since no worker has room for its request, keeps a claim of one
largest request, whatever the others got in the meantime. Nothing is remembered of a time in which
no request waited: without contention there is nothing to share.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Flow = TypeVar("Flow", int, str)

OVERDRAWN_MAX = 4096
"""Flows without waiting requests whose last finish is remembered; over it the finish of the flow
that left first is forgotten."""


class Shares(Generic[Flow]):
    """Flows (tenants or bands) with waiting requests, in the order of their turns."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._largest = 0.0
        """Cost of the largest request that went."""
        self._starts: dict[Flow, tuple[float, int]] = {}
        """Starts of flows with waiting requests; equal ones go in the order in which they were
        set."""
        self._order: list[tuple[float, int, Flow]] = []
        self._seq = 0
        self._finishes: dict[Flow, float] = {}
        """Finishes of flows without waiting requests, where they are after the virtual time."""

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Flow]:
        """The flows with waiting requests, in the order of their turns; none may come or go."""
        return (flow for _, _, flow in self._order)

    def enter(self, flow: Flow) -> None:
        """Adds a flow whose first request waits."""
        self._put(flow, max(self._virtual, self._finishes.pop(flow, 0.0)))

    def leave(self, flow: Flow) -> None:
        """Removes a flow whose last request has left."""
        start = self._take(flow)
        if not self._starts:
            self._finishes.clear()
            self._largest = 0.0
        elif start > self._virtual:
            if len(self._finishes) >= OVERDRAWN_MAX:
                del self._finishes[next(iter(self._finishes))]
            self._finishes[flow] = start

    def charge(self, flow: Flow, cost: float, weight: float) -> None:
        """Charges a flow for a request that goes. cost: uncached tokens, or 1 for a request."""
        if len(self._starts) == 1 and flow in self._starts and not self._finishes:
            return  # there is nothing to share
        start = max(self._take(flow), self._virtual - self._largest / weight)
        if start > self._virtual:
            self._virtual = start
        if cost > self._largest:
            self._largest = cost
        self._put(flow, start + cost / weight)

    def _put(self, flow: Flow, start: float) -> None:
        self._seq += 1
        self._starts[flow] = start, self._seq
        insort(self._order, (start, self._seq, flow))

    def _take(self, flow: Flow) -> float:
        start, seq = self._starts.pop(flow)
        order = self._order
        del order[0 if order[0][2] == flow else bisect_left(order, (start, seq, flow))]
        return start
