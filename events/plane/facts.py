"""The messages of the event plane over NATS.

MessagePack maps with a version field (contract: docs/nats.md). Unknown fields are ignored; an
unknown kind of message or fact is an outcome with a counter. Hashes are sent as a byte string of
little-endian u64s, so that neither side makes an object for each block.

Law: facts are sets; a facts message that is applied twice changes nothing the second time.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from events.engines.numbers import OWN_MAX, OWN_VALUE_MAX, in_table
from indexer.hashing import HashArray
from indexer.identity import Tier

VERSION = 1

MESSAGE_BYTES_MAX = 1 << 20
"""Bytes of any message but heartbeats and facts, hashes included: a NATS server's default limit. A
relay's answers are a little above 512 KiB."""
FACTS_BYTES_MAX = 1 << 18
"""Bytes of a message of the facts subject. A relay's messages stay below 64 KiB."""
HEARTBEAT_BYTES_MAX = 1 << 17
"""Bytes of a heartbeat; a router keeps the last heartbeat of each worker."""
REQUEST_BYTES_MAX = 4096
"""Bytes of a SnapshotRequest: five numbers, and space for fields of later releases."""
FACTS_MAX = 4096
"""Facts in a SnapshotChunk. A relay's chunks and messages have about 1,000 at most."""
FACTS_IN_MESSAGE_MAX = 1536
LACKS_MAX = 16
"""Reasons for left-out blocks in a beat; a relay has nine."""
NUMBERS_MAX = 256
"""Entries of a heartbeat's `numbers`."""
RING_MESSAGES_MAX = 1 << 14
"""Messages of a ring in a SnapshotChunk."""

WARM_TOKENS_MAX = 250_000
"""Tokens in a Warm message, within a NATS server's default limit of 1 MiB."""

Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""A count that an engine reports; fits every field of the gRPC API kvroute.v1."""
SequenceNumber = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A message's number in its epoch; at most 2^62, so that successors fit in 64 bits."""
Name = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=4096)]
UnixSeconds = Annotated[float, Meta(ge=0, le=1e11)]
"""Unix time in seconds: finite, and a time that a calendar can show."""

TIER_NAMES = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.DISK: "disk"}
TIERS = {name: tier for tier, name in TIER_NAMES.items()}


class Epoch(NamedTuple):
    """One life of a relay's stream, by its start in Unix time; a later life compares higher."""

    start_ns: int
    nonce: int


class Stored(msgspec.Struct, frozen=True, tag="stored", tag_field="kind", omit_defaults=True):
    """Blocks that arrived on a tier: a chain after `parent`, or from a prompt's beginning."""

    hashes: bytes
    tier: str
    parent: int | None = None


class Removed(msgspec.Struct, frozen=True, tag="removed", tag_field="kind"):
    """Blocks that are gone from a tier."""

    hashes: bytes
    tier: str


class Cleared(msgspec.Struct, frozen=True, tag="cleared", tag_field="kind", omit_defaults=True):
    """All blocks are gone from a tier; without a tier, from all tiers."""

    tier: str | None = None


Fact = Stored | Removed | Cleared


class FactsMessage(msgspec.Struct, frozen=True, tag="facts", tag_field="kind"):
    """Facts in order. seq counts these messages from 1 in each epoch."""

    v: int
    epoch: Epoch
    seq: SequenceNumber
    facts: Annotated[list[Fact], Meta(max_length=FACTS_IN_MESSAGE_MAX)]
    time_s: UnixSeconds
    """Unix time at which the relay read the first of the facts."""


class Beat(msgspec.Struct, frozen=True, tag="beat", tag_field="kind", omit_defaults=True):
    """A stream's state after facts message `seq`: shows routers that the last messages were lost,
    or that their index differs."""

    v: int
    epoch: Epoch
    seq: SequenceNumber
    blocks: Count
    """placements: (tier, PrefixHash) pairs"""
    digest: int
    """see indexer.index.mix_digest"""
    complete: bool
    """False: the relay may have missed blocks, so its stream has only a part of the engine's."""
    time_s: UnixSeconds
    lacks: Annotated[tuple[Name, ...], Meta(max_length=LACKS_MAX)] = ()
    """Reasons for which blocks of the engine are left out of the stream: keys of
    events/plane/left_out.py, and others from later relays. Empty: no block is left out."""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One worker's identity and load. None or 0: unknown, the engine doesn't report it."""

    v: int = VERSION
    epoch: Epoch
    address: Text
    engine: Name
    engine_version: Name = ""
    model: Name = ""
    model_aliases: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    lora_names: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    max_model_len: Count = 0
    block_size: Count = 0
    """Tokens of a canonical block: a block of the facts."""
    engine_block_size: Count = 0
    """Tokens of a block of the engine; the relay splits or merges these to canonical blocks."""
    role: Name = "both"
    labels: Annotated[dict[Name, Name], Meta(max_length=256)] = {}
    multi_rank: bool = False
    """The engine has several ranks, so a request must name one."""
    priority_scheduling: Name = ""
    """Which priority number the engine serves sooner, "lower" or "higher"; empty: it doesn't
    schedule by priority."""
    healthy: bool = True
    """False: the engine's health or metrics stopped answering."""
    probed: bool = True
    """False: the relay has just started, and no probe of the engine has ended; healthy is False
    until then."""
    events: bool = True
    """False: the engine publishes no KV events, so its stream is empty."""
    tells_salts: bool = True
    """False: this release of the engine leaves cache salts out of its KV events, so that salted
    blocks look like blocks without a salt."""
    loads_loras: bool = False
    """The engine loads a LoRA that is not among lora_names when a request names it."""
    warms: bool = False
    """The relay lets routers make the engine compute a prefix ahead of its requests."""
    running: Count = 0
    waiting: Count = 0
    used_blocks: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """KV cache of the rank that requests hold, in blocks of block_size tokens."""
    total_blocks: Count | None = None
    """Whole KV cache of the rank, in blocks of block_size tokens."""
    total_slots: Count | None = None
    token_budget: Count | None = None
    preemptions: Count = 0
    numbers: Annotated[
        dict[Name, Annotated[float, Meta(ge=0, le=1e18)]], Meta(max_length=NUMBERS_MAX)
    ] = {}
    """Further numbers of the engine's page, by their names in events/engines/numbers.py. Routers
    read those that they know."""
    own_numbers: Annotated[
        dict[Name, Annotated[float, Meta(ge=-OWN_VALUE_MAX, le=OWN_VALUE_MAX)]],
        Meta(max_length=OWN_MAX),
    ] = {}
    """The operator's own numbers, as engines.numbers of the relay names them; those that the
    engine's page has now."""
    sampled_at_s: UnixSeconds | None = None
    """Unix time of the load sample; None: no sample yet."""
    sent_at_s: UnixSeconds
    warnings: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    warning_codes: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    """Codes (router/fleet/health/warnings.py) of the first warnings; the others have the code
    `relay`."""
    kv_connector: Name = ""
    """Connector that transfers KV caches: a name of vLLM's --kv-transfer-config."""
    kv_engine_id: Name = ""
    """The engine_id in vLLM's --kv-transfer-config, or as generated; empty: unknown."""
    bootstrap_host: Name = ""
    """Host for KV transfers; empty: the host of the address."""
    bootstrap_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    asleep: bool = False
    """The engine sleeps: it serves no requests until it is woken up, and healthy is False
    meanwhile. Blocks that it gives up leave its stream; predicted ones are forgotten."""

    def known_numbers(self) -> dict[str, float]:
        """Numbers that this release knows, and the operator's own; a later relay may send more."""
        return {**self.own_numbers, **in_table(self.numbers)}


class SnapshotRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests a chunk of a stream's whole state, or (from_seq) messages of its ring.

    A first request has no epoch; the next requests repeat epoch and as_of of the first answer.
    """

    v: int = VERSION
    chunk: Count = 0
    epoch: Epoch | None = None
    as_of: SequenceNumber | None = None
    from_seq: SequenceNumber | None = None


class SnapshotChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chunk: placements as they were after message `as_of`, or messages of the ring."""

    v: int
    epoch: Epoch
    as_of: SequenceNumber
    chunk: Count
    chunks: Count
    facts: Annotated[list[Stored], Meta(max_length=FACTS_MAX)] = []
    messages: Annotated[list[bytes], Meta(max_length=RING_MESSAGES_MAX)] = []
    """Ring replay: FactsMessages as they were sent."""
    complete: bool = True
    expired: bool = False
    """The requested snapshot, or part of the ring, is gone: start again."""


class Warm(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A router's request that a relay's engine compute a prefix; answered with Warmed."""

    v: int = VERSION
    id: Name
    """Id of this copy, unique in the fleet."""
    tokens: Annotated[bytes, Meta(max_length=4 * WARM_TOKENS_MAX)] = b""
    """Little-endian u32 ids: full blocks from the prompt's beginning."""
    lora_name: Name = ""
    cache_salt: Name = ""
    cancel: bool = False
    """Cancels the copy with this id; tokens are left out, and there is no answer."""


class Warmed(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The result of a Warm."""

    v: int = VERSION
    id: Name
    done: bool
    detail: Text = ""
    """Why it was not done."""


class Hello(msgspec.Struct, frozen=True):
    """A router's request that all relays send their heartbeats and beats at once."""

    v: int
    replica: Name


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fleet command, to every replica. id makes it idempotent."""

    v: int
    id: Name
    action: Name
    """drain, undrain, remove or resync"""
    worker_id: Name
    tombstone_s: float = 0.0
    at_s: UnixSeconds = 0.0
    """Unix time of the command: of two commands for a worker, the newer holds."""
    by: Name = ""
    """Identity of the caller that gave the command; empty: an older release did not say."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that was dropped, and why; reason is a short word fit for a metric label."""

    reason: str
    detail: str


_stream_decoder = msgspec.msgpack.Decoder(FactsMessage | Beat)
_encoder = msgspec.msgpack.Encoder()


class _LooseFacts(msgspec.Struct, frozen=True):
    """A stream message with undecoded facts."""

    kind: str
    v: int = VERSION
    epoch: Epoch | None = None
    seq: SequenceNumber | None = None
    facts: Annotated[list[msgspec.Raw], Meta(max_length=FACTS_IN_MESSAGE_MAX)] = []
    time_s: UnixSeconds = 0.0


class _FactKind(msgspec.Struct, frozen=True):
    kind: str


class _LooseKinds(msgspec.Struct, frozen=True):
    """A stream message with only the kinds of its facts decoded."""

    facts: list[_FactKind]


_loose_decoder = msgspec.msgpack.Decoder(_LooseFacts)
_kinds_decoder = msgspec.msgpack.Decoder(_LooseKinds)
_fact_decoder = msgspec.msgpack.Decoder(Fact)

M = TypeVar("M", bound=msgspec.Struct)

Message = (
    FactsMessage
    | Beat
    | Heartbeat
    | SnapshotRequest
    | SnapshotChunk
    | Hello
    | Control
    | Warm
    | Warmed
)


def encode(message: Message) -> bytes:
    """A message's bytes."""
    return _encoder.encode(message)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """A heartbeat's bytes. Raises ValueError or OverflowError when routers couldn't read them."""
    payload = _encoder.encode(heartbeat)
    if isinstance(read := decode(Heartbeat, payload), Unreadable):
        raise ValueError(f"routers can't read this heartbeat ({read.reason}): {read.detail}")
    return payload


def decode_stream(payload: bytes) -> tuple[FactsMessage | Beat | None, tuple[Unreadable, ...]]:
    """A message of the facts subject, and its dropped parts. Never raises.

    Facts of an unknown kind are left out of the message, so that older routers can read messages of
    newer relays; the other facts stay in order. A message with a broken fact is dropped whole: the
    gap in the sequence then makes the stream recover.
    """
    if len(payload) > FACTS_BYTES_MAX:
        return None, (_too_large(payload),)
    try:
        message = _stream_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _decode_loosely(payload, error)
    if isinstance(message, FactsMessage) and (bad := _implausible(message.facts)):
        return None, (Unreadable("malformed", bad),)
    return message, ()


def decode(kind: type[M], payload: bytes) -> M | Unreadable:
    """One message, read as a struct of any subject but facts (see `decode_stream`).

    No payload makes it raise; a struct without a row in _FORMS raises KeyError.
    """
    form = _FORMS[kind]
    if len(payload) > form.bytes_max:
        return _too_large(payload)
    try:
        message: M = form.decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable("malformed", str(error))
    fault = form.fault(message)
    return Unreadable("malformed", fault) if fault else message


def pack_hashes(hashes: Sequence[int] | HashArray) -> bytes:
    """Hashes as bytes of a message; raises OverflowError outside [0, 2^64)."""
    if isinstance(hashes, np.ndarray):
        return hashes.astype("<u8", copy=False).tobytes()
    return array("Q", hashes).tobytes()


def unpack_hashes(packed: bytes) -> HashArray:
    """The hashes of a fact, without a copy; raises ValueError when bytes are left over."""
    return np.frombuffer(packed, dtype="<u8")


def _decode_loosely(
    payload: bytes, error: Exception
) -> tuple[FactsMessage | None, tuple[Unreadable, ...]]:
    try:
        loose = _loose_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, (Unreadable("malformed", str(error)),)
    if loose.kind not in ("facts", "beat"):
        return None, (Unreadable("unknown_kind", loose.kind[:64]),)
    if loose.kind == "beat" or loose.epoch is None or loose.seq is None:
        return None, (Unreadable("malformed", str(error)),)
    facts: list[Fact] = []
    unknown: list[Unreadable] = []
    try:  # around the loop: an exception for each fact would cost 6 us each
        for raw, fact in zip(loose.facts, _kinds_decoder.decode(payload).facts, strict=True):
            if fact.kind in ("stored", "removed", "cleared"):
                facts.append(_fact_decoder.decode(raw))
            else:
                unknown.append(Unreadable("unknown_kind", fact.kind[:64]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as broken:
        return None, (Unreadable("malformed", str(broken)),)
    if not unknown:  # the facts are readable, so another field is not
        return None, (Unreadable("malformed", str(error)),)
    if bad := _implausible(facts):
        return None, (Unreadable("malformed", bad),)
    return FactsMessage(loose.v, loose.epoch, loose.seq, facts, loose.time_s), tuple(unknown)


def _implausible(facts: Sequence[Fact]) -> str:
    """Why these facts can't be applied; empty: they can."""
    for fact in facts:
        if fact.tier is not None and fact.tier not in TIERS:
            return f"unknown tier {fact.tier[:64]!r}"
        if isinstance(fact, Cleared):
            continue
        if len(fact.hashes) % 8:
            return f"{len(fact.hashes)} bytes of hashes are no multiple of 8"
    return ""


def _too_large(payload: bytes) -> Unreadable:
    return Unreadable("too_large", f"{len(payload)} bytes")


def _unprintable(beat: Heartbeat) -> str:
    """Which name of a heartbeat has control characters; empty: none. Names reach headers, logs and
    terminals of others. Warnings may have lines: they are shown as text."""
    names = (
        *(beat.address, beat.engine, beat.engine_version, beat.model, beat.role),
        *(beat.kv_connector, beat.kv_engine_id, beat.bootstrap_host, beat.priority_scheduling),
        *(*beat.model_aliases, *beat.labels, *beat.labels.values(), *beat.warning_codes),
        "".join((*beat.lora_names, *beat.own_numbers)),
    )
    for name in names:
        if not name.isprintable():
            return f"control characters in {name[:64]!r}"
    return ""


def _tokens_fault(warm: Warm) -> str:
    """Why a Warm's tokens are no prefix; empty: they are one."""
    if not warm.cancel and (not warm.tokens or len(warm.tokens) % 4):
        return f"{len(warm.tokens)} bytes of tokens are no positive multiple of 4"
    return ""


class _Form(NamedTuple):
    """The decoder, bound and check of a message."""

    decoder: msgspec.msgpack.Decoder[Any]
    bytes_max: int = MESSAGE_BYTES_MAX
    fault: Callable[[Any], str] = lambda _: ""
    """Why a decoded message can't be used; empty: it can."""


_FORMS: dict[type[msgspec.Struct], _Form] = {
    Heartbeat: _Form(msgspec.msgpack.Decoder(Heartbeat), HEARTBEAT_BYTES_MAX, _unprintable),
    SnapshotRequest: _Form(msgspec.msgpack.Decoder(SnapshotRequest), REQUEST_BYTES_MAX),
    SnapshotChunk: _Form(
        msgspec.msgpack.Decoder(SnapshotChunk), fault=lambda chunk: _implausible(chunk.facts)
    ),
    Hello: _Form(msgspec.msgpack.Decoder(Hello)),
    Control: _Form(msgspec.msgpack.Decoder(Control)),
    Warm: _Form(msgspec.msgpack.Decoder(Warm), fault=_tokens_fault),
    Warmed: _Form(msgspec.msgpack.Decoder(Warmed)),
}
