"""The stream of one rank, as its relay speaks it: ledger, outbox, snapshots, epochs, counters.

The part that ranks of all engines share; events/relay/rank.py and events/relay/dynamo/rank.py add
how the engine's events come in order. Pure: no clock, no sockets; bytes for the facts subject out.

Laws:
- each change of the ledger goes to the outbox and to the snapshots under way, in the same order;
- an epoch starts after the one before, and with a beat.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

from events.plane.facts import Epoch, SnapshotChunk, SnapshotRequest
from events.plane.left_out import LeftOut
from events.relay.ledger import Change, Wiped
from events.relay.outbox import Outbox
from events.relay.snapshot import Holder, SnapshotDesk


class StreamLedger(Holder, Protocol):
    """The blocks that a rank holds, as far as its stream is concerned."""

    left_out: LeftOut
    """Blocks that the engine holds and the ledger doesn't."""

    def __len__(self) -> int:
        """Engine blocks in the map."""

    def count(self) -> int:
        """Placements: (tier, PrefixHash) pairs."""

    def digest(self) -> int:
        """Same as the digest of an index that holds the same placements."""

    def wipe(self) -> list[Change]:
        """Forgets all; `sweep` lets its memory go."""

    def inherit(self, other: Self) -> None:
        """Takes over the memory of a ledger that is given up, for `sweep`."""

    def sweep(self, units: int) -> bool:
        """Lets go of so much of what was wiped; False when nothing is left of it."""


L = TypeVar("L", bound=StreamLedger)


class RankStream(Generic[L]):
    """One (worker, rank)."""

    def __init__(
        self, ledger: L, epoch: Epoch, *, counts: Counter[str], swept_at_once: int
    ) -> None:
        """swept_at_once: units of a wiped ledger that one turn of the event loop lets go."""
        self.complete = False
        """Whether the ledger missed nothing of this life."""
        self.counts = counts
        """Kind of event, and what went wrong, of the whole life of this object."""
        self.engine_gaps = 0
        self.engine_restarts = 0
        self.last_event_s: float | None = None
        self.ledger = ledger
        self.outbox = Outbox(epoch)
        self._desk = SnapshotDesk(ledger, self.outbox)
        self._swept_at_once = swept_at_once

    def flush(self) -> list[bytes]:
        """Gathered facts as a message; the relay calls it a moment after events came."""
        return self.outbox.flush()

    def beat(self, now_s: float) -> list[bytes]:
        """Gathered facts, then the state after them; the relay calls it every second."""
        self._desk.expire(now_s)
        messages = self.outbox.flush()
        ledger = self.ledger
        count, digest, lacks = ledger.count(), ledger.digest(), ledger.left_out.reasons()
        messages.append(self.outbox.beat(count, digest, self.complete, now_s, lacks))
        return messages

    def sweep(self) -> bool:
        """Lets go of a slice of what was held before a wipe; False when nothing is left of it."""
        return self.ledger.sweep(self._swept_at_once)

    def answer(
        self, request: SnapshotRequest, now_s: float
    ) -> tuple[list[bytes], SnapshotChunk | SnapshotRequest]:
        """Answers a router: (gathered facts, which go out first, and the chunk). A request in the
        place of the chunk: a part of it is made, and a later turn calls with that request."""
        messages = self.flush()
        return messages, self._desk.answer(request, self.complete, now_s)

    def _changed(self, changes: Sequence[Change], now_s: float) -> list[bytes]:
        """The ledger has changed: messages that are full by that."""
        self._desk.note(changes)
        return self.outbox.add(changes, now_s)

    def _forget_all(self, now_s: float) -> list[bytes]:
        """Removals may be lost, so that nothing held is certain: the ledger is emptied."""
        self.complete = False
        self._desk.note((Wiped(),))  # a ledger that an event left half emptied reports no change
        return self._changed(self.ledger.wipe(), now_s)

    def _start_epoch(self, ledger: L, seq: int, now_s: float) -> list[bytes]:
        """A new epoch with the blocks of this ledger: routers forget those of the epoch before.

        seq: 0 for an empty ledger; 1 for a ledger with blocks, which routers pull as a snapshot.
        """
        before = self.outbox.epoch
        self.outbox.start_over(Epoch(max(int(now_s * 1e9), before.start_ns + 1), before.nonce), seq)
        ledger.inherit(self.ledger)
        self._use(ledger)
        return self.beat(now_s)

    def _use(self, ledger: L) -> None:
        """The stream goes on with another ledger."""
        self.ledger = ledger
        self._desk.start_over(ledger)
