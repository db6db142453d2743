"""One RouteStream call: batches of items come in, results go out in slices.

Laws:
- a batch is answered at once by one message at least, by an empty message if no item has a result:
  a client that waits for this message before it sends the next batch sends as fast as the router
  takes batches;
- an item is decided once, or refused because its time was over;
- an item cancelled after its answer was sent leaves nothing reserved, and neither does an item
  whose answer could not be sent;
- an item that waits for a worker has its result in a message of its own, later, unless it is
  cancelled;
- an item whose caller wants its place in the queue gets it once in TOLD_EACH_S at most, in a
  message of at most TOLD_MAX such items, and never after its result.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import islice
from math import inf
from time import perf_counter, thread_time
from typing import Self

from kvroute.v1 import router_pb2
from router.api.desk import statuses
from router.api.desk.answers import Answered, Later, Steps
from router.api.desk.request_codec import no_valid
from router.fleet.reservations.reservations import Reservation
from router.request.refusal import Reason, Refusal
from router.request.wire.batches import ITEMS_MAX, Batch, Results
from router.request.wire.received import TooMuch

SLICE_S = 0.0003
"""Seconds of CPU time for which items are decided without a break. Then results are sent, so that
the caller works while the router does, and other calls have a turn. A message costs the router less
than 0.1 ms. Wall time would make messages smaller on a busy machine, and it busier."""
CANCELLABLE_MAX = 4096
"""Last answers of a stream that a client can still cancel. A cancel is sent before the answer has
arrived, so that it is about one of the last answers."""
TOLD_EACH_S = 1.0
"""Seconds between two messages about the places of waiting items in the queue."""
TOLD_MAX = 256
"""Items in one message about places in the queue, at most: 2 ms. Further items come in the next."""


class RouteItems:
    """The items of one RouteStream call, and their answers."""

    def __init__(
        self,
        route: Callable[[bytes | None, float], Answered | Later | Steps],
        cancel: Callable[[Reservation], None],
        leave: Callable[[Later], None] = lambda _: None,
        outlook: Callable[[Later], router_pb2.QueueProgress | None] = lambda _: None,
        unsent: Callable[[Reservation], None] = lambda _: None,
        clock: Callable[[], float] = perf_counter,
        cpu_clock: Callable[[], float] = thread_time,
    ) -> None:
        """route: answers a RouteRequest (None: the item has none) at once, later, or in steps;
        raises Refusal. Its second argument: the seconds until the caller's timeout (0: it has
        passed). cancel: ends a reservation that no caller wants. leave: ends the wait of a request.
        outlook: a request's place in the queue. unsent: ends the reservation of an answer that
        could not be sent.
        """
        self._route = route
        self._cancel = cancel
        self._leave = leave
        self._outlook = outlook
        self._unsent = unsent
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._answered: OrderedDict[int, Reservation] = OrderedDict()
        """Reservations of items that can still be cancelled, by item index, the oldest first."""
        self._waiting: dict[int, Later] = {}
        """Items that wait for a worker, by index."""
        self._told: dict[int, None] = {}
        """Indexes of waiting items whose callers want their places in the queue; the next one
        first."""
        self._late = Results()
        self._late_made: list[Reservation] = []
        """Reservations of the results in `_late`, the next message."""
        self._late_sending: list[Reservation] = []
        """Reservations of the late message that was taken last, which may not be sent yet."""
        self.on_late: Callable[[], None] = lambda: None
        """Called when `take_late` has a result: that of an item which waited."""
        self.on_told: Callable[[], None] = lambda: None
        """Called when an item begins to wait whose caller wants its place in the queue."""

    @property
    def waiting(self) -> int:
        """Number of items that wait for a worker."""
        return len(self._waiting)

    def take_late(self) -> bytes | None:
        """RouteResults, as bytes, of items that waited, since the last call, whose message counts
        as sent; None: there are none.
        """
        self._late_sending, self._late_made = self._late_made, []
        return self._late.take() if len(self._late) else None

    def take_told(self) -> bytes | None:
        """RouteResults, as bytes, with the places of waiting items in the queue; None: no caller
        wants further messages about places.
        """
        if not self._told:
            return None
        message = router_pb2.RouteResults()
        for index in list(islice(self._told, TOLD_MAX)):
            del self._told[index]
            waiting = self._waiting.get(index)
            outlook = self._outlook(waiting) if waiting is not None else None
            if outlook is not None:
                self._told[index] = None  # behind the other items
                message.results.add(index=index, waiting=outlook)
        return message.SerializeToString()

    def close(self) -> None:
        """Ends all items, since the stream is over."""
        waiting, self._waiting = self._waiting, {}
        self._told.clear()
        for item in waiting.values():
            self._leave(item)
        self.end([*self._late_sending, *self._late_made])

    def decide(self, batch: Batch) -> "Deciding":
        """An iterator that decides item by item, and yields a message of results whenever SLICE_S
        is spent, and at the end; None: other tasks should run, and there is no result. A message
        counts as sent when the next is taken; the iterator's `close` ends the last one's
        reservations.
        """
        return Deciding(self, batch, self._route, self._clock, self._cpu_clock)

    def end(self, made: list[Reservation]) -> None:
        """Ends reservations whose answers could not be sent."""
        for reservation in made:
            if reservation.ended is None:
                self._unsent(reservation)

    def cancel(self, index: int) -> None:
        """Ends an item whose caller no longer wants the answer: its wait, or its reservation."""
        if (waiting := self._waiting.pop(index, None)) is not None:
            self._told.pop(index, None)
            self._leave(waiting)
            return
        reservation = self._answered.pop(index, None)
        if reservation is not None and not reservation.shared:
            self._cancel(reservation)

    def begin(self, index: int) -> None:
        """Forgets an earlier item with this index, and ends its wait, so that a later cancel of the
        index means the new item.
        """
        if index in self._waiting:
            self.cancel(index)
        self._answered.pop(index, None)

    def answer(
        self, index: int, answered: Answered | Later, results: Results, made: list[Reservation]
    ) -> None:
        """Adds an item's answer to a message's results and its reservation to `made`, or queues the
        item. Raises Refusal.
        """
        if isinstance(answered, Later):
            if answered.outcome is None:
                self._wait(index, answered)
                return
            answered = answered.take()
        self._add(results, made, index, answered)

    def _wait(self, index: int, waiting: Later) -> None:
        """Keeps an item whose result comes later."""
        self._waiting[index] = waiting
        waiting.on_done = partial(self._done, index, waiting)
        if waiting.tells:
            self._told[index] = None
            self.on_told()

    def _done(self, index: int, waiting: Later) -> None:
        if self._waiting.get(index) is not waiting:
            return
        del self._waiting[index]
        self._told.pop(index, None)
        try:
            self._add(self._late, self._late_made, index, waiting.take())
        except Refusal as refusal:
            self._late.add_status(index, statuses.write_status(refusal).SerializeToString())
        self.on_late()

    def _add(
        self, results: Results, made: list[Reservation], index: int, answered: Answered
    ) -> None:
        answer, reservation, repeated = answered
        if not repeated:
            made.append(reservation)
            self._remember(index, reservation)
        results.add_answer(index, answer)

    def _remember(self, index: int, reservation: Reservation) -> None:
        self._answered[index] = reservation
        self._answered.move_to_end(index)
        if len(self._answered) > CANCELLABLE_MAX:
            self._answered.popitem(last=False)


class Deciding:
    """Decides a batch of items, message by message: see RouteItems.decide.

    An iterator and no generator, since `close` must end its reservations, and since it is compiled.
    """

    def __init__(
        self,
        items: RouteItems,
        batch: Batch,
        route: Callable[[bytes | None, float], Answered | Later | Steps],
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
    ) -> None:
        self._items = items
        self._batch = batch
        self._route = route
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._results = Results()
        self._made: list[Reservation] = []
        """Reservations of the message that is made, or was taken and may not be sent yet."""
        self._steps: Steps | None = None
        """Steps of the item that the batch is at, if the item takes several; else None."""
        self._began_s = clock()
        self._sent = False
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes | None:
        self._made.clear()
        if self._over:
            raise StopIteration
        began_s, began_cpu_s = self._clock(), self._cpu_clock()
        while self._steps is not None or self._batch.next():
            self._step()
            # Reading CPU time takes a system call; CPU time is never more than wall time.
            if self._clock() - began_s >= SLICE_S and self._cpu_clock() - began_cpu_s >= SLICE_S:
                return self._message() if len(self._results) else None
        self._over = True
        if len(self._results) or not self._sent:
            return self._message()
        raise StopIteration

    def close(self) -> None:
        """Ends the reservations of the message that was not sent; the rest of the batch is not
        decided."""
        self._over = True
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        made, self._made = self._made, []
        self._items.end(made)

    def _message(self) -> bytes:
        self._sent = True
        return self._results.take()

    def _step(self) -> None:
        """Decides an item, or takes the next of its steps."""
        batch, index = self._batch, self._batch.index
        try:
            answered: Answered | Later | None = None
            if self._steps is None:
                if batch.cancel:
                    self._items.cancel(index)
                    return
                self._items.begin(index)
                routed = self._route(batch.request, self._left_s())
                if isinstance(routed, tuple | Later):
                    answered = routed
                else:  # an item whose steps have begun is counted, whatever comes of it
                    self._steps = routed
            if self._steps is not None:
                answered = self._went_on(self._steps)
            if answered is not None:
                self._items.answer(index, answered, self._results, self._made)
        except Refusal as refusal:
            self._steps = None
            self._results.add_status(index, statuses.write_status(refusal).SerializeToString())

    def _went_on(self, steps: Steps) -> Answered | Later | None:
        """Takes the next step of an item; returns its answer, or None while steps are left."""
        try:
            next(steps)
        except StopIteration as done:
            self._steps = None
            answered: Answered | Later = done.value
            return answered
        return None

    def _left_s(self) -> float:
        """Seconds until the timeout of the item's caller; 0: it has passed; inf: the item has no
        timeout."""
        timeout_ms = self._batch.timeout_ms
        if not timeout_ms:
            return inf
        waited_s = self._clock() - self._began_s
        return 0.0 if timeout_ms <= waited_s * 1000 else timeout_ms / 1000 - waited_s


def read_batch(content: bytes) -> Batch:
    """Reads a RouteBatch; raises Refusal for invalid bytes, or for more than ITEMS_MAX items."""
    try:
        return Batch(content)
    except TooMuch as error:
        raise Refusal(
            Reason.INVALID_FIELD, f"the batch has too many items; at most {ITEMS_MAX} are taken"
        ) from error
    except ValueError as error:
        raise no_valid("RouteBatch", error) from error
