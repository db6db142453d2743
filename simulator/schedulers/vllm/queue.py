"""vLLM's queues: first come, first served, or by priority. Pure.

Source: vllm-project/vllm vllm/v1/core/sched/request_queue.py, release 0.32.0.
"""

import heapq
from collections.abc import Iterable, Iterator

from simulator.schedulers.vllm.config import VllmSequence


class WaitingQueue:
    """Waiting requests: in order of arrival, where requests that are put back go to the head; or by
    (priority, arrival), lowest first."""

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[tuple[float, ...], VllmSequence]] = []
        """(place in the order, request); no two requests have the same place."""
        self._head = self._end = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[VllmSequence]:
        """The requests, next first."""
        return (sequence for _, sequence in sorted(self._heap))

    def add(self, sequence: VllmSequence) -> None:
        """Puts a new request in."""
        self._end += 1
        self._push(sequence, self._end)

    def put_back(self, sequences: Iterable[VllmSequence]) -> None:
        """Puts requests back in that were taken out and still wait, given in their old order."""
        for sequence in reversed(list(sequences)):
            self._head -= 1
            self._push(sequence, self._head)

    def peek(self) -> VllmSequence:
        """The next request. Raises IndexError."""
        return self._heap[0][1]

    def pop(self) -> VllmSequence:
        """Takes the next request out. Raises IndexError."""
        return heapq.heappop(self._heap)[1]

    def remove(self, sequence: VllmSequence) -> bool:
        """Takes a request out at any place; False when it isn't there. O(length)."""
        entry = next((entry for entry in self._heap if entry[1] is sequence), None)
        if entry is None:
            return False
        self._heap.remove(entry)
        heapq.heapify(self._heap)
        return True

    def _push(self, sequence: VllmSequence, place: int) -> None:
        heapq.heappush(self._heap, (sequence.rank if self._by_priority else (place,), sequence))
