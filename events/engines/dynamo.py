"""Reads the messages that workers of an NVIDIA Dynamo fleet publish on NATS: KV events, load. Pure.

    envelope  {publisher_id, sequence, published_at, topic, payload}     MessagePack, named
    payload   one RouterEvent, or a list of them (1.6); on `kv_metrics` an ActiveLoad, on
              `forward-pass-metrics` a ForwardPassMetrics
    JSON      a RouterEvent without an envelope, as older releases send it

    RouterEvent {worker_id, storage_tier, event: {event_id, dp_rank, data}}
    data        {stored: {parent_hash, start_position, blocks: [{block_hash, tokens_hash}]}}
                | {removed: {block_hashes}} | "cleared"

    ForwardPassMetrics {version, worker_id, dp_rank, scheduled_requests, queued_requests}
    requests           {num_prefill_requests, num_decode_requests, ...}

`block_hash` is the engine's own name for a block; `tokens_hash` is our BlockHash. A worker sends
its forward-pass metrics after each step, and each second while it has none.

Laws:
- for any bytes the result is a DynamoMessage. An event that can't be used keeps its number, if that
  is readable, and a reason, so that the numbers have no gap and the loss is known;
- a message on load proves its worker's presence as soon as worker and rank are readable, whatever
  its numbers are.

Source: ai-dynamo/dynamo lib/kv-router/src/protocols.rs and lib/runtime (event plane), release
1.6.1; its publishers' bytes are in tests/events/engines/test_dynamo.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from xxhash import xxh3_64_intdigest

from events.engines.wire import RANK_MAX, READ_ERRORS, REASON_CHARS, U64_MASK
from indexer.identity import BlockHash, Tier

MESSAGE_BYTES_MAX = 8 << 20
"""Bytes of a message; Dynamo's stay within NATS's default of 1 MiB."""

HASHES_MAX = 1 << 16
"""Hashes in a message, eight times those of Dynamo's largest."""

EVENTS_MAX = 1 << 13
"""Events in a message; Dynamo's have 128 at most."""

STORAGE_TIERS = {"device": Tier.DEVICE, "host_pinned": Tier.HOST, "disk": Tier.DISK}
SHARED_TIERS = frozenset({"external"})
EVENT_TOPICS = frozenset({"kv-events", "kv_events"})
LOAD_TOPICS = frozenset({"kv_metrics", "kv-metrics"})
PASS_TOPICS = frozenset({"forward-pass-metrics", "forward_pass_metrics"})
PASS_VERSION = 1
"""Version of ForwardPassMetrics whose numbers are read; of other versions, only worker and rank."""

_I64_MIN = -(1 << 63)


@dataclass(frozen=True, slots=True)
class HashesStored:
    """A chain of blocks that arrived on a tier, after `parent` if there is one."""

    tier: Tier
    parent: int | None
    names: Sequence[int]
    """The engine's own hashes."""
    blocks: Sequence[BlockHash]
    begins: bool = True
    """False: the chain does not start a prompt, with or without a parent."""


@dataclass(frozen=True, slots=True)
class HashesRemoved:
    """Blocks that left a tier."""

    tier: Tier
    names: Sequence[int]


@dataclass(frozen=True, slots=True)
class RankCleared:
    """All blocks of a rank left all tiers."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An event that can't be used, or isn't about a worker's blocks; reason fits a metric label."""

    reason: str
    stores_lost: bool = False
    removals_lost: bool = False


What = HashesStored | HashesRemoved | RankCleared | LeftOut


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """One event of one (worker, rank)."""

    worker_id: int
    dp_rank: int
    event_id: int
    """Counts the events of a (worker, rank)."""
    what: What


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's presence, and its load. None: absent in the message."""

    worker_id: int
    dp_rank: int
    used_blocks: int | None = None
    """All KV blocks in use, by the engine's count."""
    decode_blocks: int | None = None
    """Blocks of requests that decode, by the sender's count."""
    running: int | None = None
    """Requests of the engine's last step."""
    waiting: int | None = None
    """Requests that its last step left in its queue."""
    from_pass: bool = False
    """Whether these are forward-pass metrics, which an idle worker sends, too."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The message that carried an event. publisher_id and sequence: None without an envelope."""

    publisher_id: int | None
    sequence: int | None
    digest: int


@dataclass(frozen=True, slots=True)
class DynamoMessage:
    """The readable parts of a NATS message."""

    origin: Origin
    events: tuple[WorkerEvent, ...] = ()
    load: WorkerLoad | None = None
    dropped: tuple[str, ...] = ()
    """The reason for each event (or message) whose worker could not be read."""
    detail: str = ""
    """The last error, as a sentence."""


Unsigned = Annotated[int, Meta(ge=0)]


class _Envelope(Struct):
    publisher_id: Unsigned
    sequence: Unsigned
    topic: str
    payload: bytes


class _Block(Struct):
    block_hash: int
    tokens_hash: int


class _Stored(Struct):
    blocks: list[_Block]
    parent_hash: int | None = None
    start_position: int | None = None


class _Removed(Struct):
    block_hashes: list[int]


class _Data(Struct):
    """The data of an event: one field is set; none for a kind of a later release."""

    stored: _Stored | UnsetType = UNSET
    removed: _Removed | UnsetType = UNSET
    cleared: UnsetType | None = UNSET


class _Event(Struct):
    event_id: Unsigned
    data: _Data | Literal["cleared"]
    dp_rank: Annotated[int, Meta(ge=0, le=RANK_MAX)] = 0


class _RouterEvent(Struct):
    worker_id: Unsigned
    event: _Event
    storage_tier: str = "device"
    residency_domain: str = "worker"


class _BareEvent(Struct):
    """An event whose data are unreadable or of an unknown kind."""

    event_id: Unsigned
    data: Raw
    dp_rank: Annotated[int, Meta(ge=0, le=RANK_MAX)] = 0


class _BareRouterEvent(Struct):
    worker_id: Unsigned
    event: _BareEvent


class _ActiveLoad(Struct):
    worker_id: Unsigned
    dp_rank: Annotated[int, Meta(ge=0, le=RANK_MAX)] = 0
    active_decode_blocks: Annotated[int, Meta(ge=0)] | None = None
    kv_used_blocks: Annotated[int, Meta(ge=0)] | None = None


Requests = Annotated[int, Meta(ge=0, le=1 << 30)]


class _Requests(Struct, frozen=True):
    num_prefill_requests: Requests = 0
    num_decode_requests: Requests = 0


class _Presence(Struct):
    worker_id: Annotated[str, Meta(pattern="^[0-9]{1,20}$")] | Unsigned
    version: int = PASS_VERSION
    dp_rank: Annotated[int, Meta(ge=0, le=RANK_MAX)] = 0


class _ForwardPass(_Presence):
    scheduled_requests: _Requests = _Requests()
    queued_requests: _Requests = _Requests()


class _Wire:
    """The decoders of one encoding."""

    def __init__(self, decoder: Any) -> None:
        self.events = decoder(
            _RouterEvent | Annotated[list[_RouterEvent], Meta(max_length=EVENTS_MAX)]
        )
        self.event = decoder(_RouterEvent)
        self.bare_event = decoder(_BareRouterEvent)
        self.parts = decoder(Annotated[list[Raw], Meta(max_length=EVENTS_MAX)])
        self.kinds = decoder(dict[str, Raw] | str)
        self.load = decoder(_ActiveLoad)
        self.forward_pass = decoder(_ForwardPass)
        self.presence = decoder(_Presence)


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_MSGPACK = _Wire(msgspec.msgpack.Decoder)
_JSON = _Wire(msgspec.json.Decoder)


def decode_dynamo(
    data: bytes, *, bytes_max: int = MESSAGE_BYTES_MAX, hashes_max: int = HASHES_MAX
) -> DynamoMessage:
    """Reads a message of a subject of `kv-events`, `kv_metrics` or `forward-pass-metrics`; never
    raises. bytes_max, hashes_max: bounds of a message."""
    if len(data) > bytes_max:
        # Not decoded; the numbers of the next events will show the gap.
        return DynamoMessage(
            Origin(None, None, 0),
            dropped=("too_large",),
            detail=f"{len(data)} bytes are more than the {bytes_max} allowed",
        )
    digest = xxh3_64_intdigest(data)
    if _is_json(data):
        return _read_events(data, Origin(None, None, digest), hashes_max)
    try:
        envelope = _ENVELOPE.decode(data)
    except READ_ERRORS as error:
        return DynamoMessage(
            Origin(None, None, digest), dropped=("malformed",), detail=_because(error)
        )
    origin = Origin(envelope.publisher_id, envelope.sequence, digest)
    if envelope.topic in LOAD_TOPICS:
        return _read_load(envelope.payload, origin)
    if envelope.topic in PASS_TOPICS:
        return _read_pass(envelope.payload, origin)
    if envelope.topic in EVENT_TOPICS:
        return _read_events(envelope.payload, origin, hashes_max)
    return DynamoMessage(origin, dropped=("other_topic",))


def _read_load(payload: bytes, origin: Origin) -> DynamoMessage:
    wire = _JSON if _is_json(payload) else _MSGPACK
    try:
        load: _ActiveLoad = wire.load.decode(payload)
    except READ_ERRORS as error:
        return DynamoMessage(origin, dropped=("malformed_load",), detail=_because(error))
    if load.worker_id > U64_MASK:
        return DynamoMessage(origin, dropped=("malformed_load",), detail="worker_id is no u64")
    return DynamoMessage(
        origin,
        load=WorkerLoad(
            load.worker_id, load.dp_rank, load.kv_used_blocks, load.active_decode_blocks
        ),
    )


def _read_pass(payload: bytes, origin: Origin) -> DynamoMessage:
    wire = _JSON if _is_json(payload) else _MSGPACK
    dropped: tuple[str, ...] = ()
    detail = ""
    read: _Presence
    try:
        read = wire.forward_pass.decode(payload)
    except READ_ERRORS as error:
        dropped, detail = ("malformed_load",), _because(error)
        try:
            read = wire.presence.decode(payload)
        except READ_ERRORS:
            return DynamoMessage(origin, dropped=dropped, detail=detail)
    worker_id = int(read.worker_id)
    if worker_id > U64_MASK:
        return DynamoMessage(origin, dropped=("malformed_load",), detail="worker_id is no u64")
    if read.version != PASS_VERSION:
        dropped = ("other_version",)
        detail = f"forward-pass metrics of version {read.version}"[:REASON_CHARS]
    if dropped or not isinstance(read, _ForwardPass):
        load = WorkerLoad(worker_id, read.dp_rank, from_pass=True)
        return DynamoMessage(origin, load=load, dropped=dropped, detail=detail)
    running, waiting = read.scheduled_requests, read.queued_requests
    load = WorkerLoad(
        worker_id,
        read.dp_rank,
        running=running.num_prefill_requests + running.num_decode_requests,
        waiting=waiting.num_prefill_requests + waiting.num_decode_requests,
        from_pass=True,
    )
    return DynamoMessage(origin, load=load)


def _read_events(payload: bytes, origin: Origin, hashes_max: int) -> DynamoMessage:
    wire = _JSON if _is_json(payload) else _MSGPACK
    read: Sequence[_RouterEvent | Raw]
    try:
        decoded = wire.events.decode(payload)
        read = decoded if isinstance(decoded, list) else (decoded,)
    except READ_ERRORS as error:
        try:
            read = wire.parts.decode(payload)
        except READ_ERRORS:
            if _is_list(payload):
                return DynamoMessage(origin, dropped=("malformed",), detail=_because(error))
            read = (Raw(payload),)
    events: list[WorkerEvent] = []
    dropped: list[str] = []
    detail = ""
    room = hashes_max
    for part in read:
        event, why = _read_event(part, wire)
        detail = why or detail
        if event is None:
            dropped.append("malformed")
            continue
        if isinstance(event.what, HashesStored | HashesRemoved):
            room -= len(event.what.names)
            if room < 0:
                detail = f"more than {hashes_max} hashes in one message"
                event = _without(event, "too_many_hashes")
        events.append(event)
    return DynamoMessage(origin, tuple(events), dropped=tuple(dropped), detail=detail)


def _read_event(part: _RouterEvent | Raw, wire: _Wire) -> tuple[WorkerEvent | None, str]:
    """(the readable parts of an event, or None; why other parts can't be read, empty: all can)."""
    if isinstance(part, Raw):
        try:
            decoded: _RouterEvent = wire.event.decode(part)
        except READ_ERRORS as error:
            return _salvage(part, wire), _because(error)
        part = decoded
    event = part.event
    if max(part.worker_id, event.event_id) > U64_MASK:
        return None, "worker_id or event_id is no u64"
    try:
        what = _meaning(part)
    except ValueError as error:
        what = LeftOut("malformed", stores_lost=True, removals_lost=not _is_store(event.data))
        return WorkerEvent(part.worker_id, event.dp_rank, event.event_id, what), _because(error)
    return WorkerEvent(part.worker_id, event.dp_rank, event.event_id, what), ""


def _meaning(router_event: _RouterEvent) -> What:
    """The content of an event; raises ValueError when it makes no sense."""
    if router_event.residency_domain != "worker":
        return LeftOut("shared")
    data = router_event.event.data
    if data == "cleared":
        return RankCleared()
    if sum(field is not UNSET for field in (data.stored, data.removed, data.cleared)) > 1:
        raise ValueError("an event has several kinds of data")
    if data.cleared is None:
        return RankCleared()
    if isinstance(data.stored, UnsetType) and isinstance(data.removed, UnsetType):
        return LeftOut("unknown_kind")
    if router_event.storage_tier in SHARED_TIERS:
        return LeftOut("shared")
    tier = STORAGE_TIERS.get(router_event.storage_tier)
    if tier is None:
        return LeftOut("unknown_medium")
    if isinstance(data.removed, _Removed):
        return HashesRemoved(tier, _unsigned(data.removed.block_hashes))
    if not isinstance(data.stored, _Stored):
        raise AssertionError("an event's data are neither stored nor removed")
    stored = data.stored
    parent = stored.parent_hash
    return HashesStored(
        tier,
        None if parent is None else _unsigned([parent])[0],
        _unsigned([block.block_hash for block in stored.blocks]),
        [BlockHash(hashed) for hashed in _unsigned([block.tokens_hash for block in stored.blocks])],
        begins=not stored.start_position,
    )


def _salvage(raw: Raw, wire: _Wire) -> WorkerEvent | None:
    """The worker and number of an event whose other parts can't be read."""
    try:
        bare: _BareRouterEvent = wire.bare_event.decode(raw)
    except READ_ERRORS:
        return None
    if max(bare.worker_id, bare.event.event_id) > U64_MASK:
        return None
    try:
        data = wire.kinds.decode(bare.event.data)
    except READ_ERRORS:
        data = {}
    kinds = frozenset([data] if isinstance(data, str) else data)
    what = LeftOut("malformed", stores_lost=True, removals_lost=kinds != {"stored"})
    if kinds and not kinds & {"stored", "removed", "cleared"}:
        what = LeftOut("unknown_kind")
    return WorkerEvent(bare.worker_id, bare.event.dp_rank, bare.event.event_id, what)


def _without(event: WorkerEvent, reason: str) -> WorkerEvent:
    """An event with its number, and a reason in the place of its content."""
    removals = not isinstance(event.what, HashesStored)
    what = LeftOut(reason, stores_lost=True, removals_lost=removals)
    return WorkerEvent(event.worker_id, event.dp_rank, event.event_id, what)


def _is_store(data: _Data | Literal["cleared"]) -> bool:
    return data != "cleared" and data.removed is UNSET and data.cleared is UNSET


def _unsigned(hashes: list[int]) -> list[int]:
    """Hashes as u64: engines' own may be signed, and -1 and 2^64-1 are the same 8 bytes."""
    if not hashes:
        return hashes
    least = min(hashes)
    if least < _I64_MIN or max(hashes) > U64_MASK:
        raise ValueError("a hash is not of 64 bits")
    return hashes if least >= 0 else [number & U64_MASK for number in hashes]


def _is_list(payload: bytes) -> bool:
    """Whether a payload begins with an array, in MessagePack or JSON."""
    first = payload.lstrip()[:1] if _is_json(payload) else payload[:1]
    return first in (b"[", b"\xdc", b"\xdd") or b"\x90" <= first <= b"\x9f"


def _is_json(data: bytes) -> bool:
    """Whether the first byte that isn't blank opens a JSON object or array.

    In MessagePack `{` and `[` are the numbers 123 and 91, and blanks are numbers too: no message.
    """
    return data[:64].lstrip()[:1] in (b"{", b"[")


def _because(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:REASON_CHARS]
