"""The relay's side of one stream: changes become numbered messages, and a ring keeps the last.

Pure: no clock, no sockets; bytes out. A message is at most about `message_bytes` long. The ring has
the last messages, up to `ring_bytes`, for routers that missed some.

Laws:
- sequence numbers count from 1 in each epoch without a hole, whether or not messages are delivered;
- a beat has the state after the last message, with no change pending.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from typing_extensions import override

from events.plane.facts import (
    TIER_NAMES,
    VERSION,
    Beat,
    Cleared,
    Epoch,
    Fact,
    FactsMessage,
    Removed,
    Stored,
    encode,
    pack_hashes,
)
from events.relay.ledger import Change, Gone, Placed, Wiped

MESSAGE_BYTES = 64 * 1024
RING_BYTES = 8 * 1024 * 1024
_FACT_BYTES = 56
"""Bytes of a fact besides its hashes, at most."""


class Outbox:
    """Messages of one stream, in order."""

    def __init__(
        self, epoch: Epoch, message_bytes: int = MESSAGE_BYTES, ring_bytes: int = RING_BYTES
    ) -> None:
        self.epoch = epoch
        self.seq = 0
        """Number of the last message."""
        self._message_bytes = message_bytes
        self._ring_bytes_max = ring_bytes
        self._pending: list[Fact] = []
        self._pending_bytes = 0
        self._pending_since_s = 0.0
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0

    @override
    def __repr__(self) -> str:
        return f"<Outbox at {self.seq}, {len(self._pending)} facts pending, ring {len(self._ring)}>"

    def start_over(self, epoch: Epoch, seq: int = 0) -> None:
        """Begins a new epoch with an empty ring and nothing pending.

        seq: 1 for an epoch that begins with blocks, as if a first message had been lost.
        """
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} is not after {self.epoch}")
        self.epoch = epoch
        self.seq = seq
        self._pending.clear()
        self._pending_bytes = 0
        self._ring.clear()
        self._ring_bytes = 0

    def add(self, changes: Sequence[Change], read_at_s: float) -> list[bytes]:
        """Gathers changes, read at read_at_s (Unix time); returns the messages that are full."""
        full = []
        for change in changes:
            for fact in _facts(change, self._message_bytes):
                size = _size(fact)
                if self._pending_bytes + size > self._message_bytes:
                    full += self.flush()
                if not self._pending:
                    self._pending_since_s = read_at_s
                self._pending.append(fact)
                self._pending_bytes += size
        return full

    def flush(self) -> list[bytes]:
        """The gathered facts as a message; empty if there are none."""
        if not self._pending:
            return []
        self.seq += 1
        message = encode(
            FactsMessage(VERSION, self.epoch, self.seq, self._pending, self._pending_since_s)
        )
        self._pending = []
        self._pending_bytes = 0
        self._ring.append(message)
        self._ring_bytes += len(message)
        while self._ring_bytes > self._ring_bytes_max and len(self._ring) > 1:
            self._ring_bytes -= len(self._ring.popleft())
        return [message]

    def beat(
        self, blocks: int, digest: int, complete: bool, now_s: float, lacks: tuple[str, ...] = ()
    ) -> bytes:
        """The stream's state after the last message; flush first. lacks: see facts.Beat."""
        if self._pending:
            raise AssertionError("a beat was made before the pending facts were flushed")
        beat = Beat(VERSION, self.epoch, self.seq, blocks, digest, complete, now_s, lacks)
        return encode(beat)

    def replay(self, from_seq: int) -> list[bytes] | None:
        """Messages from from_seq on, as they were sent; None when the ring lacks some of them."""
        missing = self.seq - from_seq + 1
        if from_seq < 1 or missing < 0 or missing > len(self._ring):
            return None
        return list(islice(self._ring, len(self._ring) - missing, None))


def _facts(change: Change, message_bytes: int) -> list[Fact]:
    """A change as facts, each at most as long as a message may be."""
    step = max(1, (message_bytes - _FACT_BYTES) // 8)
    match change:
        case Placed(tier, parent, hashes):
            return [
                Stored(
                    pack_hashes(hashes[i : i + step]),
                    TIER_NAMES[tier],
                    hashes[i - 1] if i else parent,
                )
                for i in range(0, len(hashes), step)
            ]
        case Gone(tier, hashes):
            return [
                Removed(pack_hashes(hashes[i : i + step]), TIER_NAMES[tier])
                for i in range(0, len(hashes), step)
            ]
        case Wiped():
            return [Cleared()]


def _size(fact: Fact) -> int:
    """The approximate bytes of a fact in a message."""
    return _FACT_BYTES + (0 if isinstance(fact, Cleared) else len(fact.hashes))
