"""What a run leaves behind: what clients met, what was done to whom and when, how it ended.

All times are seconds of the host's monotonic clock, which every process of a run reads.
"""

from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Written as a line of JSON."""


class Attempt(Record, frozen=True):
    """One request sent to one worker."""

    sent_s: float
    """When the pick was there."""
    ended_s: float
    worker: str
    replica: str = ""
    """The router that picked; empty: the client's fallback."""
    failure: str = ""
    """Empty: the answer came whole. Else refused, broken, slow or the HTTP status."""
    begun: bool = False
    """Whether the answer's first byte came."""


class Served(Record, frozen=True):
    """One request of a client, over all its attempts."""

    client: int
    began_s: float
    ended_s: float
    attempts: tuple[Attempt, ...] = ()
    failure: str = ""
    """Empty: served. Else what the caller met."""
    begun: bool = False
    """Whether the caller had a byte of the answer when it failed."""


class Cause(StrEnum):
    """What was done. The value is its name in tables."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    HANG = "hang"
    ERRORS = "answers 500"
    HALF = "half 500"
    PAGES = "nonsense pages"
    REUSE = "closes as it is used again"
    DESCRIPTORS = "no descriptors left"
    RESTART = "restart in place"
    RELAY = "relay killed"
    WIRE_CUT = "engine-relay cut"
    WIRE_SLOW = "engine-relay slow"
    WIRE_CORRUPT = "engine-relay corrupt"
    LINE_CUT = "client-router cut"
    LINE_SLOW = "client-router slow"
    LINE_CORRUPT = "client-router corrupt"
    NATS = "NATS away"
    DISK = "disk full"
    FLOOD = "relay floods"
    DRAIN = "drain, undrain"
    ROUTER_STOP = "router SIGSTOP"
    ROUTER = "router killed"
    ROLLING = "router restarted"
    MACHINE = "no core"
    """None of ours: a core of the machine ran nothing (machine.py)."""


class Trouble(Record, frozen=True):
    """Something that was wrong for a while: from the moment before it began until it was mended."""

    cause: Cause
    from_s: float
    to_s: float
    worker: str = ""
    """Of an engine's or a relay's trouble."""
    client: int | None = None
    router: int | None = None
    """Of a line's, or a router's own: whose."""

    def overlaps(self, from_s: float, to_s: float) -> bool:
        return self.from_s <= to_s and from_s <= self.to_s


class Ended(Record, frozen=True):
    """A process that ended by itself."""

    process: str
    kind: Literal["router", "relay", "engine", "client", "hostile", "nats"]
    code: int | None


class Held(Record, frozen=True):
    """The blocks of one worker: how many, and the xor of their PrefixHashes."""

    blocks: int
    digest: int


class WorkerSeen(Record, frozen=True):
    """A worker as a router has it after the quiet."""

    held: Held
    state: str
    complete: bool
    excluded: str
    """Why it gets no requests; empty: it does."""
    load: float
    """Requests that are believed to be there: reported, reserved here and by other routers."""
    blocks: float
    """Blocks in use, in the same way."""
    blamed: int = 0
    """Requests that were reported to this router as failed by this worker's fault."""


class Memory(Record, frozen=True):
    """A router's, after its malloc gave back what it could."""

    resident: int
    """Bytes."""
    malloc: int
    """Bytes in use, of gRPC, the index and large Python objects; 0: the C library doesn't say."""
    objects: int
    """Blocks in use by Python's own allocator, of 512 bytes at most each."""
    kinds: dict[str, int] = {}
    """Objects that the collector knows, by their type: the most frequent ones."""


class RouterSeen(Record, frozen=True):
    """A router after the quiet."""

    name: str
    workers: dict[str, WorkerSeen]
    reservations: int
    """Open ones."""
    replica: str
    """What it calls itself in the ids of its reservations."""
    warm: Memory
    """When the warm-up was over."""
    quiet: Memory
    """After the quiet."""


class Resident(Record, frozen=True):
    """A router's resident memory, as the system has it."""

    name: str
    at_s: float
    """Since the clients' start."""
    bytes: int


class Observed(Record, frozen=True):
    """A whole run."""

    served: tuple[Served, ...]
    troubles: tuple[Trouble, ...]
    ended: tuple[Ended, ...]
    engines: dict[str, Held]
    routers: tuple[RouterSeen, ...]
    clients: int
    router_count: int
    from_s: float
    """When the warm-up was over."""
    to_s: float
    """When the clients stopped."""
    attempts: bool = True
    """Whether clients tried again."""
    resident: tuple[Resident, ...] = ()
    """Every few seconds."""
    notes: dict[str, float] = {}
    """Numbers that no law is about."""


Any_ = TypeVar("Any_", bound=Record)


def read(file: Path, kind: type[Any_]) -> list[Any_]:
    """The records in a file; a last line that is cut off, as of a killed process, is left out."""
    whole = file.read_bytes()
    decoder = msgspec.json.Decoder(kind)
    return decoder.decode_lines(whole[: whole.rfind(b"\n") + 1])
