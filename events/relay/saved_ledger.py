"""A rank's ledger as bytes, saved by a relay for its next start. Pure.

    "kvroute ledger 2\\n", XXH3-128 of the rest (16 bytes), MessagePack of a _Kept

Law: bytes that are incomplete, or written for another engine or by another release, raise
UnusableLedger. No bytes, with a right checksum or not, raise anything else, at reading or later.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta
from xxhash import xxh3_128_digest

from events.engines.zmq_framing import SEQUENCE_LIMIT
from events.plane.facts import UnixSeconds
from events.relay.ledger import Ledger, LedgerCopy
from indexer.identity import WorkerKey

MAGIC = b"kvroute ledger 2\n"
"""Format and version; the number changes with the format of what follows."""
_CHECKSUM_BYTES = 16


class UnusableLedger(ValueError):
    """A saved ledger can't be used; the message says why."""


class Checkpoint(msgspec.Struct, frozen=True):
    """The engine's message after which a ledger was saved."""

    seq: Annotated[int, Meta(ge=0, le=SEQUENCE_LIMIT - 2)]
    digest: Annotated[int, Meta(ge=0)]
    """XXH3-64 of the message."""
    complete: bool
    process_start_s: UnixSeconds | None
    """Start of the engine's process, from its metrics (Unix time)."""
    taken_at_s: UnixSeconds
    """Unix time at which the ledger was copied."""

    def is_before(self, started_s: float) -> bool:
        """Whether the engine's process that started at started_s is newer than this ledger."""
        if self.process_start_s is not None:
            return started_s != self.process_start_s
        return started_s > self.taken_at_s


@dataclass(frozen=True, slots=True)
class Source:
    """The worker and settings that a saved ledger belongs to."""

    worker: WorkerKey
    engine: str
    wanted_block_size: int | None


class _Kept(msgspec.Struct, frozen=True):
    worker_id: str
    dp_rank: int
    engine: str
    wanted_block_size: int | None
    checkpoint: Checkpoint
    ledger: LedgerCopy


_decoder = msgspec.msgpack.Decoder(_Kept)
_encoder = msgspec.msgpack.Encoder()


def pack(source: Source, checkpoint: Checkpoint, copy: LedgerCopy) -> bytes:
    """The bytes of a saved ledger: 43 for each block of 16 tokens, 47 for a page of one."""
    kept = _Kept(*source.worker, source.engine, source.wanted_block_size, checkpoint, copy)
    body = _encoder.encode(kept)
    return MAGIC + xxh3_128_digest(body) + body


def unpack(source: Source, data: bytes) -> tuple[Checkpoint, Ledger]:
    """The checkpoint and ledger that `data` has saved for this source; raises UnusableLedger."""
    start = len(MAGIC) + _CHECKSUM_BYTES
    if data[: len(MAGIC)] != MAGIC:
        raise UnusableLedger(f"the file begins with {data[: len(MAGIC)]!r}, not with {MAGIC!r}")
    body = memoryview(data)[start:]
    if data[len(MAGIC) : start] != xxh3_128_digest(body):
        raise UnusableLedger(
            f"the checksum of the file's {len(body)} bytes differs from the checksum in its header"
        )
    try:
        kept = _decoder.decode(body)
        of = Source(WorkerKey(kept.worker_id, kept.dp_rank), kept.engine, kept.wanted_block_size)
        if of != source:
            raise ValueError(f"the saved ledger is of {of}, not of {source}")
        return kept.checkpoint, Ledger.restored(kept.ledger, source.wanted_block_size)
    except Exception as error:  # no content of a file may end the relay
        raise UnusableLedger(str(error) or type(error).__name__) from error
