"""The relay's answers to routers that missed messages: its ring, or all its blocks, in chunks.

Pure. A snapshot is of the moment at which its first chunk is requested, so that its chunks fit
together while the stream goes on.

Laws:
- all chunks of a snapshot together are the ledger after message `as_of`;
- snapshots are short-lived and bounded: 32 MiB each for four million placements.
"""

from collections.abc import Mapping
from typing import Protocol

from events.plane.facts import TIER_NAMES, VERSION, SnapshotChunk, SnapshotRequest, Stored
from events.relay.outbox import Outbox
from indexer.identity import HashArray, Tier

CHUNK_BYTES = 512 * 1024
"""Bytes of a chunk: half of a NATS server's default limit."""
_FROZEN_MAX = 64
"""Snapshots that are kept, one for each router: those of a busy stream begin at different messages.
"""
_FROZEN_BYTES_MAX = 128 * 1024 * 1024
"""Bytes of the kept snapshots; the newest alone may have more."""
_FROZEN_LIFE_S = 30.0
"""Seconds from a router's first request that a snapshot is kept: the time limit of a recovery."""


class Holder(Protocol):
    """Interface of a ledger, as snapshots need it."""

    def held(self, tier: Tier) -> HashArray:
        """A new array of a tier's prefixes."""


class _Frozen:
    """One snapshot: all placements of a ledger at one moment, in chunks."""

    begun_at_s = 0.0
    """When a router last requested the first chunk."""

    def __init__(self, ledger: Holder, as_of: int, *, complete: bool) -> None:
        self.as_of = as_of
        self.complete = complete
        self._packed = {tier: ledger.held(tier).tobytes() for tier in Tier}
        self._places = [
            (tier, at)
            for tier, packed in self._packed.items()
            for at in range(0, len(packed), CHUNK_BYTES)
        ]
        """Tier and first byte of each chunk."""
        self.bytes = sum(map(len, self._packed.values()))

    def __len__(self) -> int:
        """Chunks."""
        return len(self._places)

    def facts(self, chunk: int) -> list[Stored]:
        """The blocks of a chunk, counted from 0; empty past the last chunk."""
        return [
            Stored(self._packed[tier][at : at + CHUNK_BYTES], TIER_NAMES[tier])
            for tier, at in self._places[chunk : chunk + 1]
        ]


class SnapshotServer:
    """Answers SnapshotRequests about one stream. The caller flushes the outbox before each."""

    def __init__(self, ledger: Holder, outbox: Outbox) -> None:
        self._ledger = ledger
        self._outbox = outbox
        self._frozen: dict[int, _Frozen] = {}
        """as_of -> its snapshot, in the order of begun_at_s."""

    def start_over(self, ledger: Holder) -> None:
        """Takes a new ledger of the stream, and drops all snapshots."""
        self._ledger = ledger
        self._frozen.clear()

    def expire(self, now_s: float) -> None:
        """Drops snapshots that are too old; call every second."""
        self._frozen = {
            as_of: frozen
            for as_of, frozen in self._frozen.items()
            if now_s - frozen.begun_at_s < _FROZEN_LIFE_S
        }

    def answer(self, request: SnapshotRequest, complete: bool, now_s: float) -> SnapshotChunk:
        """A chunk of the ring or of a snapshot. complete: whether the ledger missed nothing."""
        if request.epoch is not None and request.epoch != self._outbox.epoch:
            return self._expired()
        if request.from_seq is not None:
            return self._ring(request, complete)
        frozen = self._find(request, complete, now_s)
        if frozen is None:
            return self._expired()
        return SnapshotChunk(
            v=VERSION,
            epoch=self._outbox.epoch,
            as_of=frozen.as_of,
            chunk=request.chunk,
            chunks=max(1, len(frozen)),
            facts=frozen.facts(request.chunk),
            complete=frozen.complete and complete,
        )

    def _ring(self, request: SnapshotRequest, complete: bool) -> SnapshotChunk:
        messages = self._outbox.replay(request.from_seq or 0)
        if messages is None:
            return self._expired()
        part: list[bytes] = []
        size = 0
        for message in messages:
            size += len(message)
            if part and size > CHUNK_BYTES:
                break
            part.append(message)
        # The router requests the rest from where this part ends, so nothing is kept for it.
        return SnapshotChunk(
            v=VERSION,
            epoch=self._outbox.epoch,
            as_of=self._outbox.seq,
            chunk=0,
            chunks=1 if len(part) == len(messages) else 2,
            messages=part,
            complete=complete,
        )

    def _find(self, request: SnapshotRequest, complete: bool, now_s: float) -> _Frozen | None:
        self.expire(now_s)
        if request.as_of is not None:
            return self._frozen.get(request.as_of)
        as_of, kept = self._outbox.seq, self._frozen
        frozen = kept.pop(as_of, None) or _Frozen(self._ledger, as_of, complete=complete)
        frozen.begun_at_s = now_s
        kept[as_of] = frozen
        while len(kept) > _FROZEN_MAX or (len(kept) > 1 and _bytes(kept) > _FROZEN_BYTES_MAX):
            del kept[next(iter(kept))]
        return frozen

    def _expired(self) -> SnapshotChunk:
        return SnapshotChunk(
            v=VERSION,
            epoch=self._outbox.epoch,
            as_of=self._outbox.seq,
            chunk=0,
            chunks=0,
            expired=True,
        )


def _bytes(kept: Mapping[int, _Frozen]) -> int:
    return sum(frozen.bytes for frozen in kept.values())
