"""vLLM's queues: first come, first served, or by priority. Pure.

Source: vllm-project/vllm vllm/v1/core/sched/request_queue.py, release 0.32.0.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from simulator.schedulers.vllm.config import VllmSequence


class WaitingQueue(Protocol):
    """Waiting requests in an order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[VllmSequence]:
        """The requests, next first."""

    def add(self, sequence: VllmSequence) -> None:
        """Puts a new request in."""

    def put_back(self, sequences: Iterable[VllmSequence]) -> None:
        """Puts requests back in that were taken out and still wait, given in their old order."""

    def peek(self) -> VllmSequence:
        """The next request. Raises IndexError."""

    def pop(self) -> VllmSequence:
        """Takes the next request out. Raises IndexError."""

    def remove(self, sequence: VllmSequence) -> bool:
        """Takes a request out at any place; False when it isn't there. O(length)."""


class FcfsQueue:
    """Queue in order of arrival; a request that is put back goes to the head."""

    def __init__(self) -> None:
        self._queue: deque[VllmSequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[VllmSequence]:
        return iter(self._queue)

    def add(self, sequence: VllmSequence) -> None:
        self._queue.append(sequence)

    def put_back(self, sequences: Iterable[VllmSequence]) -> None:
        self._queue.extendleft(reversed(list(sequences)))

    def peek(self) -> VllmSequence:
        return self._queue[0]

    def pop(self) -> VllmSequence:
        return self._queue.popleft()

    def remove(self, sequence: VllmSequence) -> bool:
        if sequence not in self._queue:
            return False
        self._queue.remove(sequence)
        return True


class PriorityQueue:
    """Queue by (priority, arrival), lowest first, for requests that are put back as well."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], VllmSequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[VllmSequence]:
        return (sequence for _, sequence in sorted(self._heap))

    def add(self, sequence: VllmSequence) -> None:
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def put_back(self, sequences: Iterable[VllmSequence]) -> None:
        for sequence in sequences:
            self.add(sequence)

    def peek(self) -> VllmSequence:
        return self._heap[0][1]

    def pop(self) -> VllmSequence:
        return heapq.heappop(self._heap)[1]

    def remove(self, sequence: VllmSequence) -> bool:
        entry = (sequence.rank, sequence)
        if entry not in self._heap:
            return False
        self._heap.remove(entry)
        heapq.heapify(self._heap)
        return True


QUEUES: dict[str, Callable[[], WaitingQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}
