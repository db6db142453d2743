"""One rank of a Dynamo worker in its relay: order, gaps, restarts, facts to publish.

Dynamo has no replay for other programs, so gaps that events/relay/rank.py heals are losses here.
Pure: no clock, no sockets.

Laws:
- an event is applied at most once and in order of its number;
- a number that goes back, or another publisher, means that the worker has restarted: a new epoch,
  and an empty ledger;
- a hole empties the ledger, since removals may be in it: the stream is then true but partial,
  until the worker clears its cache;
- after a loss of the relay's own connection the stream is empty until the number of the worker's
  next event proves that nothing was missed; no call announces the whole ledger.
"""

from collections import Counter

from typing_extensions import override

from events.engines.dynamo import (
    HashesRemoved,
    HashesStored,
    LeftOut,
    Origin,
    RankCleared,
    What,
    WorkerEvent,
)
from events.plane.facts import Epoch
from events.relay.dynamo.ledger import DynamoLedger
from events.relay.ledger import Change, Wiped
from events.relay.rank_stream import RankStream


class DynamoRank(RankStream[DynamoLedger]):
    """The outgoing stream of one rank of a Dynamo worker."""

    def __init__(self, epoch: Epoch, *, blocks_max: int = 1 << 22) -> None:
        counts: Counter[str] = Counter()
        ledger = DynamoLedger(blocks_max, counts)
        super().__init__(ledger, epoch, counts=counts)
        self._blocks_max = blocks_max
        self._next_id: int | None = None
        """The worker's next number; None before its first event."""
        self._origin: Origin | None = None
        """Origin of the last event applied."""
        self._earlier_publisher: int | None = None
        """The publisher before the present one."""
        self._aside: tuple[DynamoLedger, bool] | None = None
        """The ledger, and whether it was complete, while messages may have been missed."""

    @override
    def __repr__(self) -> str:
        kind = "complete" if self.complete else "partial"
        doubt = " in doubt" if self._aside else ""
        return f"<DynamoRank {kind}{doubt} at {self._next_id}, {self.ledger!r}>"

    def on_event(self, event: WorkerEvent, origin: Origin, now_s: float) -> list[bytes]:
        """Applies the worker's next event; returns messages for the facts subject, in order."""
        messages: list[bytes] = []
        number, expected = event.event_id, self._next_id
        if expected is None:
            self.complete = _is_first(number, origin)
        elif number < expected and origin == self._origin:
            self.counts["duplicate"] += 1  # the broker brought the last message twice
            return []
        elif number < expected or self._is_another_life(origin):
            messages += self._new_life(now_s)
            self.complete = _is_first(number, origin)
        elif number > expected:
            self.engine_gaps += 1
            messages += self._lose(now_s)
        elif self._aside is not None:
            messages += self._take_back(now_s)
        self._follow(origin)
        self._next_id = number + 1
        self.last_event_s = now_s
        return messages + self.outbox.add(self._apply(event.what), now_s)

    def doubt(self, now_s: float) -> list[bytes]:
        """Sets the ledger aside, since events may have been lost; returns messages to publish."""
        if self._next_id is None or self._aside is not None:
            return []
        self._aside = (self.ledger, self.complete)
        self.complete = False
        had_any = self.ledger.count() > 0
        self._use(DynamoLedger(self._blocks_max, self.counts))
        return self.outbox.add([Wiped()], now_s) if had_any else []

    def on_failure(self, now_s: float) -> list[bytes]:
        """Empties the ledger after a call raised, since an event may be half applied; returns
        messages to publish.
        """
        return self._lose(now_s)

    def _take_back(self, now_s: float) -> list[bytes]:
        """Begins a new epoch with the ledger that was set aside, since nothing was missed."""
        if self._aside is None:
            raise AssertionError("there is no ledger set aside")
        ledger, self.complete = self._aside
        self._aside = None
        if ledger.count() == 0:
            self._use(ledger)
            return []
        return self._start_epoch(ledger, 1, now_s)

    def _lose(self, now_s: float) -> list[bytes]:
        """Empties the ledger, and drops one set aside, since removals may be lost."""
        self._aside = None
        return self._forget_all(now_s)

    def _new_life(self, now_s: float) -> list[bytes]:
        self.engine_restarts += 1
        self._aside = None
        self.complete = False
        return self._start_epoch(DynamoLedger(self._blocks_max, self.counts), 0, now_s)

    def _is_another_life(self, origin: Origin) -> bool:
        """Whether an event is of another publisher than the last: each publisher counts from the
        start, so a number that happens to be the next proves nothing."""
        last = self._origin
        if last is None or None in (last.publisher_id, origin.publisher_id):
            return False
        return origin.publisher_id != last.publisher_id

    def _follow(self, origin: Origin) -> None:
        """Remembers an event's publisher; counts two publishers that alternate."""
        last = self._origin.publisher_id if self._origin is not None else None
        if last is not None and origin.publisher_id != last:
            if origin.publisher_id == self._earlier_publisher:
                self.counts["two_publishers"] += 1
            self._earlier_publisher = last
        self._origin = origin

    def _apply(self, what: What) -> list[Change]:
        match what:
            case HashesStored(tier, parent, names, blocks, begins):
                self.counts["BlocksStored"] += 1
                return self.ledger.store(tier, parent, names, blocks, begins=begins)
            case HashesRemoved(tier, names):
                self.counts["BlocksRemoved"] += 1
                return self.ledger.remove(tier, names)
            case RankCleared():
                self.counts["BlocksCleared"] += 1
                self.complete = True  # any missed block is gone, too
                return self.ledger.wipe()
            case LeftOut(reason, stores_lost, removals_lost):
                self.counts[reason] += 1
                if stores_lost or removals_lost:
                    self.complete = False
                if reason == "unknown_medium":
                    self.ledger.left_out.add_all((reason,))
                # After an unreadable removal, a block too many may stay: start empty.
                return self.ledger.wipe() if removals_lost else []


def _is_first(number: int, origin: Origin) -> bool:
    """Whether this number is a publisher's first: they count from 1, older releases from 0."""
    return number == 0 or (number == 1 and origin.sequence == 0)
