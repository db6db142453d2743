"""Fair queueing of messages by publisher: a flooding publisher loses its own messages only.

    put: a budget a second, a queue, each a publisher's own ──> take: slices, publishers in turns

Pure: no clock, no sockets. A message costs its bytes plus MESSAGE_COST, in proportion to its work;
cost that shows only as the message is read is charged to its slice.

Laws:
- a publisher's messages are taken in the order in which they were put;
- over its budget or its queue's bound, a publisher's own messages are dropped and counted; only
  over the bound of all queues together the longest queue is dropped;
- between two messages of a publisher, every other waiting publisher has its turn; unknown
  publishers get a quarter of each slice, at most, while known publishers wait;
- a slice costs at most SLICE_COST, charges included, plus its last message; held publishers have
  no turn.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

from events.feed.fence import FIRST_PART

MESSAGE_COST = 512
"""Cost of a message besides its bytes: receiving, decoding, or dropping it."""
SLICE_COST = 64 * 1024
"""Cost of a slice: 128 small messages, or 8,000 blocks; about 1 ms of work."""
TURN_COST = 8 * 1024
"""Cost of a publisher's turn within a slice."""
BUDGET_COST = 16 * 1024 * 1024
"""Cost of a publisher's messages in a second: 30,000 small messages, or 2 million blocks. A relay
reads at most 1 million blocks/s from its engine, and sends 500 messages/s a rank."""
QUEUE_COST_MAX = 16 * 1024 * 1024
"""Cost of the waiting messages of one publisher."""
QUEUES_COST_MAX = 128 * 1024 * 1024
"""Cost of all waiting messages."""
PUBLISHERS_MAX = 65_536
"""Publishers with a budget of their own, in a second; further publishers share one budget."""
_WINDOW_S = 1.0
_SHARED = b""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Queue(Generic[T]):
    """The waiting messages of one publisher."""

    publisher: bytes
    known: bool
    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    """Messages with their costs."""
    cost: int = 0
    credit: int = 0
    """Cost left of the publisher's turn; below 0 after a large message."""


class Intake(Generic[T]):
    """The waiting messages of all publishers, in a queue for each."""

    def __init__(self, known: Callable[[bytes], bool]) -> None:
        """known: whether a publisher's worker is in the fleet view, whose size is bounded."""
        self.dropped: Counter[str] = Counter()
        """Reason -> messages"""
        self.cost = 0
        """Cost of all waiting messages."""
        self.budget_part = 1
        """Divisor of every publisher's budget; see events/feed/fence.py"""
        self.let_in: Container[bytes] = ()
        """Publishers let in again lately, whose budgets are divided by FIRST_PART."""
        self.held: Container[bytes] = ()
        """Publishers whose last messages are not fully applied yet."""
        self._known = known
        self._queues: dict[bytes, _Queue[T]] = {}
        """Publisher -> its queue, if messages wait."""
        self._turns: dict[bool, deque[_Queue[T]]] = {True: deque(), False: deque()}
        """Whether known -> the same queues, in the order of their turns."""
        self._spent: dict[bytes, int] = {}
        """Publisher -> cost of its messages in this second."""
        self._window_s = 0.0
        self._losses: Counter[bytes] = Counter()
        self._left = 0
        """Cost left of the present slice."""

    @override
    def __repr__(self) -> str:
        return f"<Intake {len(self)} waiting of {len(self._queues)} publishers>"

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def lossy(self) -> bool:
        """Whether a publisher lost a message since `take_losses`."""
        return bool(self._losses)

    def admits(self, publisher: bytes, size: int, now_s: float) -> bool:
        """Whether a message is within its publisher's budget; if so, charges it."""
        if now_s - self._window_s >= _WINDOW_S:
            self._window_s = now_s
            self._spent.clear()
        spent = self._spent
        before = spent.get(publisher)
        if before is None:
            if len(spent) >= PUBLISHERS_MAX:
                publisher = _SHARED
            before = spent.get(publisher, 0)
        if before * self.budget_part > BUDGET_COST or (
            before * FIRST_PART > BUDGET_COST and publisher in self.let_in
        ):
            self._lose(publisher, "publisher_too_fast")
            return False
        spent[publisher] = before + size + MESSAGE_COST
        return True

    def put(self, publisher: bytes, item: T, size: int) -> None:
        """Adds a message to its publisher's queue, or drops it over a bound. size: its bytes."""
        cost = size + MESSAGE_COST
        queue = self._queues.get(publisher)
        if queue is None:
            queue = self._queues[publisher] = _Queue(publisher, self._known(publisher))
            self._turns[queue.known].append(queue)
        elif queue.cost + cost > QUEUE_COST_MAX:
            self._lose(publisher, "publisher_queue_full")
            return
        queue.waiting.append((item, cost))
        queue.cost += cost
        self.cost += cost
        if self.cost > QUEUES_COST_MAX:
            self._drop_longest()

    def take(self) -> Iterator[T]:
        """The messages of the next slice; iterate to the end."""
        known, unknown = self._turns[True], self._turns[False]
        for_unknown = SLICE_COST // 4 if unknown else 0
        self._left = SLICE_COST - for_unknown
        yield from self._serve(known)
        if for_unknown:
            self._left += for_unknown
            yield from self._serve(unknown)
            yield from self._serve(known)

    def charge(self, cost: int) -> None:
        """Adds `cost` to the slice for the message that was taken last."""
        self._left -= cost

    def take_losses(self) -> Counter[bytes]:
        """Publisher -> messages dropped since the last call; PUBLISHERS_MAX entries at most."""
        losses, self._losses = self._losses, Counter()
        return losses

    def _serve(self, turns: deque[_Queue[T]]) -> Iterator[T]:
        """Yields messages of these publishers, in turns, while the slice has cost left."""
        passed_over = 0
        while passed_over < len(turns) and self._left > 0:
            queue = turns[0]
            if queue.publisher in self.held:
                turns.rotate(-1)
                passed_over += 1
                continue
            passed_over = 0
            waiting = queue.waiting
            alone = len(turns) == 1
            credit = self._left if alone else queue.credit + TURN_COST
            while waiting and credit > 0 and self._left > 0:
                item, cost = waiting.popleft()
                credit -= cost
                queue.cost -= cost
                self.cost -= cost
                self._left -= cost
                yield item
            if waiting:
                queue.credit = 0 if alone else min(credit, 0)
                turns.rotate(-1)
            else:
                turns.popleft()
                del self._queues[queue.publisher]

    def lose(self, publisher: bytes) -> None:
        """Counts a dropped message of a publisher that is shut out (events/feed/fence.py)."""
        self._lose(publisher, "publisher_too_fast")

    def _lose(self, publisher: bytes, reason: str, messages: int = 1) -> None:
        self.dropped[reason] += messages
        if publisher in self._losses or len(self._losses) < PUBLISHERS_MAX:
            self._losses[publisher] += messages

    def _drop_longest(self) -> None:
        """Drops the whole longest queue, so that the bound is not reached again at once."""
        queue = max(self._queues.values(), key=lambda queue: queue.cost)
        self._lose(queue.publisher, "queues_full", len(queue.waiting))
        self.cost -= queue.cost
        self._turns[queue.known].remove(queue)
        del self._queues[queue.publisher]
