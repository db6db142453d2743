"""The outgoing stream of one rank: ledger, outbox, snapshots, epochs, counters.

Shared by the ranks of all engines; events/relay/rank.py and events/relay/dynamo/rank.py put the
engine's events in order. Pure: no clock, no sockets; bytes for the facts subject out.

Laws:
- each change of the ledger goes to the outbox, in order;
- an epoch starts after the epoch before, and with a beat.
"""

from collections import Counter
from typing import Generic, Protocol, TypeVar

from events.plane.facts import Epoch, SnapshotChunk, SnapshotRequest
from events.plane.left_out import LeftOut
from events.relay.ledger import Change
from events.relay.outbox import Outbox
from events.relay.snapshot import Holder, SnapshotServer


class StreamLedger(Holder, Protocol):
    """Interface: the blocks of a rank, as its stream needs them."""

    left_out: LeftOut
    """Blocks of the engine that are not in the ledger."""

    def __len__(self) -> int:
        """Engine blocks in the ledger."""

    def count(self) -> int:
        """Placements: (tier, PrefixHash) pairs."""

    def digest(self) -> int:
        """Equal to the digest of an index with the same placements."""

    def wipe(self) -> list[Change]:
        """Forgets all blocks."""


L = TypeVar("L", bound=StreamLedger)


class RankStream(Generic[L]):
    """The outgoing stream of one (worker, rank)."""

    def __init__(self, ledger: L, epoch: Epoch, *, counts: Counter[str]) -> None:
        self.complete = False
        """Whether the ledger missed nothing of this epoch."""
        self.counts = counts
        """Kind of event, or of failure -> occurrences since this object was made."""
        self.engine_gaps = 0
        self.engine_restarts = 0
        self.last_event_s: float | None = None
        self.ledger = ledger
        self.outbox = Outbox(epoch)
        self._server = SnapshotServer(ledger, self.outbox)

    def flush(self) -> list[bytes]:
        """The gathered facts as a message; the relay calls this a moment after events came."""
        return self.outbox.flush()

    def beat(self, now_s: float) -> list[bytes]:
        """A message of the gathered facts, then a beat with the state after it; the relay calls
        this every second."""
        self._server.expire(now_s)
        messages = self.outbox.flush()
        ledger = self.ledger
        count, digest, lacks = ledger.count(), ledger.digest(), ledger.left_out.reasons()
        messages.append(self.outbox.beat(count, digest, self.complete, now_s, lacks))
        return messages

    def answer(self, request: SnapshotRequest, now_s: float) -> tuple[list[bytes], SnapshotChunk]:
        """Answers a router: (messages to send first, and the chunk)."""
        messages = self.flush()
        return messages, self._server.answer(request, self.complete, now_s)

    def _forget_all(self, now_s: float) -> list[bytes]:
        """Empties the ledger after a loss: removals may be lost, so no block is certain."""
        self.complete = False
        return self.outbox.add(self.ledger.wipe(), now_s)

    def _start_epoch(self, ledger: L, seq: int, now_s: float) -> list[bytes]:
        """Begins an epoch with the blocks of this ledger: routers forget those of the epoch before.

        seq: 0 for an empty ledger; 1 for a ledger with blocks, which routers pull as a snapshot.
        """
        before = self.outbox.epoch
        self.outbox.start_over(Epoch(max(int(now_s * 1e9), before.start_ns + 1), before.nonce), seq)
        self._use(ledger)
        return self.beat(now_s)

    def _use(self, ledger: L) -> None:
        """Lets the stream go on with another ledger."""
        self.ledger = ledger
        self._server.start_over(ledger)
