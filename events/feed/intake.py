"""Messages of many publishers, served in turns: a flood of one costs that one its own messages.

    put: a budget a second, a queue, each a publisher's own ──> take: slices, publishers in turns

Pure: no clock, no sockets. A message costs its bytes and MESSAGE_COST, about as its work does; what
only shows as it is read is charged to its slice.

Laws:
- a publisher's messages come out in the order in which they went in;
- over a budget or a queue's bound, the messages of that publisher are dropped and counted, and of
  no other; only over the bound of all queues together the longest one goes;
- between two messages of one publisher, every other that waits has its turn; publishers that are
  not known yet have a quarter of each slice, at most, while known ones wait;
- a slice costs SLICE_COST at most, charges included, and its last message; publishers that are held
  have no turn.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

MESSAGE_COST = 512
"""Of a message, besides its bytes: reading it, looking at it, dropping it."""
SLICE_COST = 64 * 1024
"""Of what is taken at once: 128 small messages, or 8,000 blocks; about 1 ms of work."""
TURN_COST = 8 * 1024
"""A publisher's part of that, before it is another's turn."""
BUDGET_COST = 16 * 1024 * 1024
"""A publisher's messages in one second: 30,000 small ones, or 2 million blocks. A relay reads 1
million blocks/s from its engine at most, and sends 500 messages/s a rank."""
QUEUE_COST_MAX = 16 * 1024 * 1024
"""Of what waits of one publisher."""
QUEUES_COST_MAX = 128 * 1024 * 1024
"""Of what waits of all."""
PUBLISHERS_MAX = 65_536
"""Publishers of one second with a budget of their own; further ones share one."""
_WINDOW_S = 1.0
_SHARED = b""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Queue(Generic[T]):
    """What waits of one publisher."""

    publisher: bytes
    known: bool
    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    """Messages with their costs."""
    cost: int = 0
    credit: int = 0
    """What the publisher may still take out in its turn; below 0 after a large message."""


class Intake(Generic[T]):
    """Queues by publisher."""

    def __init__(self, known: Callable[[bytes], bool]) -> None:
        """known: whether a publisher was heard before, of which there is a bound."""
        self.dropped: Counter[str] = Counter()
        """Reason -> messages"""
        self.cost = 0
        """Of all that waits."""
        self.held: Container[bytes] = ()
        """Publishers whose last messages are still being worked on."""
        self._known = known
        self._queues: dict[bytes, _Queue[T]] = {}
        """Of publishers of which something waits."""
        self._turns: dict[bool, deque[_Queue[T]]] = {True: deque(), False: deque()}
        """The same ones, known and unknown, in the order of their turns."""
        self._spent: dict[bytes, int] = {}
        """Of each publisher's budget, in this second."""
        self._window_s = 0.0
        self._losses: Counter[bytes] = Counter()
        self._left = 0
        """Of the slice that is being taken."""

    @override
    def __repr__(self) -> str:
        return f"<Intake {len(self)} waiting of {len(self._queues)} publishers>"

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def lossy(self) -> bool:
        """Whether anybody lost a message since `take_losses`."""
        return bool(self._losses)

    def admits(self, publisher: bytes, size: int, now_s: float) -> bool:
        """Whether a message is within its publisher's budget, which it is charged to."""
        if now_s - self._window_s >= _WINDOW_S:
            self._window_s = now_s
            self._spent.clear()
        spent = self._spent
        before = spent.get(publisher)
        if before is None:
            if len(spent) >= PUBLISHERS_MAX:
                publisher = _SHARED
            before = spent.get(publisher, 0)
        if before > BUDGET_COST:
            self._lose(publisher, "publisher_too_fast")
            return False
        spent[publisher] = before + size + MESSAGE_COST
        return True

    def put(self, publisher: bytes, item: T, size: int) -> None:
        """Adds a message to its publisher's queue, or drops it."""
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
        """The next slice, to be taken to its end."""
        known, unknown = self._turns[True], self._turns[False]
        for_unknown = SLICE_COST // 4 if unknown else 0
        self._left = SLICE_COST - for_unknown
        yield from self._serve(known)
        if for_unknown:
            self._left += for_unknown
            yield from self._serve(unknown)
            yield from self._serve(known)

    def charge(self, cost: int) -> None:
        """The last message that was taken costs the slice so much more."""
        self._left -= cost

    def take_losses(self) -> Counter[bytes]:
        """Publisher -> messages that it lost since the last call; PUBLISHERS_MAX at most."""
        losses, self._losses = self._losses, Counter()
        return losses

    def _serve(self, turns: deque[_Queue[T]]) -> Iterator[T]:
        """Takes what is left of the slice from these publishers in turns."""
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

    def _lose(self, publisher: bytes, reason: str, messages: int = 1) -> None:
        self.dropped[reason] += messages
        if publisher in self._losses or len(self._losses) < PUBLISHERS_MAX:
            self._losses[publisher] += messages

    def _drop_longest(self) -> None:
        """Makes room in one go, so that it is long until this has to be done again."""
        queue = max(self._queues.values(), key=lambda one: one.cost)
        self._lose(queue.publisher, "queues_full", len(queue.waiting))
        self.cost -= queue.cost
        self._turns[queue.known].remove(queue)
        del self._queues[queue.publisher]
