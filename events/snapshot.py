"""The relay's answers to routers that missed something: its ring, or all that it holds, in chunks.

Pure. A snapshot is frozen when its first chunk is asked for, so that its chunks fit together while
the stream goes on; frozen ones are few and short-lived.
"""

from dataclasses import dataclass

from events.facts import TIER_NAMES, VERSION, SnapshotChunk, SnapshotRequest, Stored, pack_hashes
from events.ledger import Ledger
from events.outbox import Outbox
from indexer.identity import Tier

CHUNK_BYTES = 512 * 1024
"""Half of what a NATS server takes by default."""
_FROZEN_MAX = 4
_FROZEN_LIFE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Frozen:
    as_of: int
    made_at_s: float
    complete: bool
    tiers: tuple[tuple[Tier, bytes], ...]
    """Packed hashes of each tier"""

    def chunks(self) -> list[tuple[Tier, int]]:
        """Tier and first byte of each chunk."""
        return [
            (tier, at) for tier, packed in self.tiers for at in range(0, len(packed), CHUNK_BYTES)
        ]


class SnapshotDesk:
    """Answers for one stream. The caller flushes the outbox before it asks."""

    def __init__(self, ledger: Ledger, outbox: Outbox) -> None:
        self._ledger = ledger
        self._outbox = outbox
        self._frozen: list[_Frozen] = []

    def start_over(self, ledger: Ledger) -> None:
        """Another life of the stream."""
        self._ledger = ledger
        self._frozen.clear()

    def answer(self, request: SnapshotRequest, complete: bool, now_s: float) -> SnapshotChunk:
        """One chunk of what was asked for. complete: whether the ledger missed nothing."""
        if request.epoch is not None and request.epoch != self._outbox.epoch:
            return self._expired()
        if request.from_seq is not None:
            return self._ring(request, complete)
        frozen = self._find(request, complete, now_s)
        if frozen is None:
            return self._expired()
        places = frozen.chunks()
        facts = []
        if request.chunk < len(places):
            tier, at = places[request.chunk]
            packed = dict(frozen.tiers)[tier]
            facts = [Stored(packed[at : at + CHUNK_BYTES], TIER_NAMES[tier])]
        return SnapshotChunk(
            v=VERSION,
            epoch=self._outbox.epoch,
            as_of=frozen.as_of,
            chunk=request.chunk,
            chunks=max(1, len(places)),
            facts=facts,
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
        # The asker goes on from where this part ends, so more than one chunk needs no memory here.
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
        self._frozen = [one for one in self._frozen if now_s - one.made_at_s < _FROZEN_LIFE_S]
        wanted = self._outbox.seq if request.as_of is None else request.as_of
        for frozen in self._frozen:
            if frozen.as_of == wanted:
                return frozen
        if request.as_of is not None:
            return None
        tiers = tuple(
            (tier, pack_hashes(hashes)) for tier, hashes in self._ledger.placements() if hashes
        )
        frozen = _Frozen(wanted, now_s, complete, tiers)
        self._frozen = [*self._frozen[-(_FROZEN_MAX - 1) :], frozen]
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
