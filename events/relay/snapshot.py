"""The relay's answers to routers that missed messages: its ring, or all its blocks, in chunks.

Pure. A snapshot is of the moment at which its first chunk is requested, so that its chunks fit
together while the stream goes on. Each chunk is made when it is requested, SLICE_HASHES in a turn
of the event loop. The ledger changes meanwhile: the server gets each change (`note`), and records
for each changed hash of an unread shelf whether the ledger held it at that moment.

Laws:
- all chunks of a snapshot together are the ledger after message `as_of`;
- no call reads more than SLICE_HASHES hashes and one shelf of the ledger;
- snapshots are few, short-lived, and end before they record more than NOTED_MAX changes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from events.plane.facts import (
    TIER_NAMES,
    VERSION,
    SnapshotChunk,
    SnapshotRequest,
    Stored,
    pack_hashes,
)
from events.relay.ledger import SHELVES, Change, Gone, Wiped
from events.relay.outbox import Outbox
from indexer.identity import PrefixHash, Tier

CHUNK_BYTES = 512 * 1024
"""Bytes of a chunk: half of a NATS server's default limit."""
SLICE_HASHES = 1 << 13
"""Hashes packed in a turn of the event loop: about 1 ms."""
NOTED_MAX = 1 << 18
"""Changes of unread shelves that a snapshot records: 30 MiB. If the ledger changes more often
before all chunks are requested, the snapshot expires."""
_FROZEN_MAX = 4
_FROZEN_LIFE_S = 30.0


class Holder(Protocol):
    """Interface of a ledger, as snapshots need it."""

    def shelves(self) -> Iterator[tuple[Tier, int, dict[PrefixHash, int]]]:
        """All placements: tier, number of the shelf, and the shelf with hashes as its keys. A hash
        is on the shelf (hash modulo SHELVES); shelves change with the ledger."""


class _Frozen:
    """One snapshot, with the chunks made so far."""

    def __init__(self, ledger: Holder, as_of: int, now_s: float, *, complete: bool) -> None:
        self.as_of = as_of
        self.made_at_s = now_s
        self.complete = complete
        self.pages: list[tuple[Tier, bytes]] = []
        """The chunks made so far: tier and packed hashes."""
        self._unread = [row for row in ledger.shelves() if row[2]]
        self._unread.reverse()
        counts = Counter[Tier]()
        for tier, _, shelf in self._unread:
            counts[tier] += len(shelf)
        self.count = sum(-(-8 * count // CHUNK_BYTES) for count in counts.values())
        """Chunks, made or not."""
        self._before: dict[tuple[Tier, int], dict[PrefixHash, bool]] = {
            (tier, number): {} for tier, number, _ in self._unread
        }
        """Unread shelf -> hash that arrived or left since -> whether it was held"""
        self._noted = 0
        self._keys: list[PrefixHash] = []
        """Hashes left of the shelf that is being read."""
        self._tier = Tier.DEVICE
        """Tier of that shelf."""
        self._page: list[bytes] = []
        """Packed hashes of the next chunk."""
        self._page_bytes = 0

    @property
    def made(self) -> bool:
        """Whether all chunks are made, so that the ledger is not read any further."""
        return len(self.pages) == self.count

    def lacks(self, chunk: int) -> bool:
        """Whether a chunk has yet to be made."""
        return len(self.pages) <= chunk < self.count

    def note(self, change: Change) -> bool:
        """Records a change of the ledger. False: the rest of this snapshot can't be made."""
        if isinstance(change, Wiped):
            return False
        tier, was_held = change.tier, isinstance(change, Gone)
        for prefix in change.hashes:
            before = self._before.get((tier, prefix % SHELVES))
            if before is not None and prefix not in before:
                before[prefix] = was_held
                self._noted += 1
        return self._noted <= NOTED_MAX

    def make(self, chunk: int) -> None:
        """Continues the chunks up to `chunk`, by SLICE_HASHES at most."""
        room = SLICE_HASHES
        while room > 0 and self.lacks(chunk):
            if not self._keys:
                self._read_shelf()
            part = self._keys[-min(room, (CHUNK_BYTES - self._page_bytes) // 8) :]
            del self._keys[-len(part) :]
            room -= len(part)
            self._page.append(pack_hashes(part))
            self._page_bytes += 8 * len(part)
            tier_ends = not self._keys and (not self._unread or self._unread[-1][0] != self._tier)
            if tier_ends or self._page_bytes == CHUNK_BYTES:
                self.pages.append((self._tier, b"".join(self._page)))
                self._page, self._page_bytes = [], 0

    def _read_shelf(self) -> None:
        """Reads the hashes that the next shelf held at the moment of the snapshot."""
        self._tier, number, shelf = self._unread.pop()
        before = self._before.pop((self._tier, number))
        self._noted -= len(before)
        self._keys = (
            [prefix for prefix in shelf if before.get(prefix, True)] if before else [*shelf]
        )
        self._keys += [prefix for prefix, was in before.items() if was and prefix not in shelf]


class SnapshotServer:
    """Answers for one stream. The caller flushes the outbox before each answer, and reports each
    change of the ledger with `note`."""

    def __init__(self, ledger: Holder, outbox: Outbox) -> None:
        self._ledger = ledger
        self._outbox = outbox
        self._frozen: list[_Frozen] = []

    def start_over(self, ledger: Holder) -> None:
        """A new ledger of the stream: drops all snapshots."""
        self._ledger = ledger
        self._frozen.clear()

    def note(self, changes: Iterable[Change]) -> None:
        """Changes of the ledger."""
        if self._frozen and not all(frozen.made for frozen in self._frozen):
            for change in changes:
                self._frozen = [
                    frozen for frozen in self._frozen if frozen.made or frozen.note(change)
                ]

    def expire(self, now_s: float) -> None:
        """Drops snapshots that are too old; call every second."""
        self._frozen = [
            frozen for frozen in self._frozen if now_s - frozen.made_at_s < _FROZEN_LIFE_S
        ]

    def answer(
        self, request: SnapshotRequest, complete: bool, now_s: float
    ) -> SnapshotChunk | SnapshotRequest:
        """A chunk of the ring or of a snapshot; or, while that chunk is being made, the request for
        the next call, in a later turn. complete: whether the ledger missed nothing."""
        if request.epoch is not None and request.epoch != self._outbox.epoch:
            return self._expired()
        if request.from_seq is not None:
            return self._ring(request, complete)
        frozen = self._find(request, complete, now_s)
        if frozen is None:
            return self._expired()
        frozen.make(request.chunk)
        if frozen.lacks(request.chunk):
            return msgspec.structs.replace(request, epoch=self._outbox.epoch, as_of=frozen.as_of)
        facts = []
        if request.chunk < len(frozen.pages):
            tier, packed = frozen.pages[request.chunk]
            facts = [Stored(packed, TIER_NAMES[tier])]
        return SnapshotChunk(
            v=VERSION,
            epoch=self._outbox.epoch,
            as_of=frozen.as_of,
            chunk=request.chunk,
            chunks=max(1, frozen.count),
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
        wanted = self._outbox.seq if request.as_of is None else request.as_of
        for frozen in self._frozen:
            if frozen.as_of == wanted:
                return frozen
        if request.as_of is not None:
            return None
        frozen = _Frozen(self._ledger, wanted, now_s, complete=complete)
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
