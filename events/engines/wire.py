"""Reads the MessagePack batches that engines publish: the parts common to all of them.

    batch  [time, [event, ...], rank?]       or a map with these under their names
    event  ["BlockStored", field, ...]       vLLM up to 0.23, SGLang up to 0.5.19
           {"type": "BlockStored", ...}      since then

Law: for any bytes the result is an EngineBatch. A bad event costs that event, an unreadable batch
costs that batch, and both leave a sentence in `malformed`.

Pure. Batches are cut into events, and events into fields, without objects for unused values: a
newer engine's extra fields are skipped, and a bomb of nested arrays costs no memory.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from events.engines.events import EngineBatch, EngineEvent
from indexer.identity import EngineHash

PAYLOAD_BYTES_MAX = 16 << 20
"""A million tokens with hashes and image ids are about 10 MiB; engines send far less a step."""

EVENTS_MAX = 1 << 17
"""Events in a batch. vLLM sends an event for each evicted block, so thousands are ordinary."""

TOKENS_MAX = 1 << 20
"""Tokens, and so blocks, in an event: a million tokens are the longest prompts of models."""

BLOCK_SIZE_MAX = 1 << 20
"""Tokens of a block. Mamba groups have the largest blocks: a whole context."""

UNKNOWN_KIND_CHARS = 64
REASON_CHARS = 200

HASH_BYTES_MIN, HASH_BYTES_MAX = 8, 32
RANK_MAX = 1 << 16
U32_LIMIT = 1 << 32
U64_MASK = (1 << 64) - 1

Hashes = Annotated[list[int | bytes], Meta(max_length=TOKENS_MAX)]
"""Block hashes on the wire: unsigned (vLLM) or signed (SGLang) 64-bit numbers, or digests of 8 to
32 bytes."""

KINDS = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))

NO_TOKENS = array("I")

READ_ERRORS = (ValueError, OverflowError, RecursionError, MemoryError)
"""All errors of msgspec for unreadable bytes; its own errors and UnicodeDecodeError are
ValueErrors, and a nesting deeper than the interpreter's stack raises RecursionError."""


class Unreadable(ValueError):
    """Why one event can't be used, as a sentence. Never leaves a decoder."""


WireEvent = TypeVar("WireEvent", bound=Struct)


@dataclass(frozen=True, slots=True)
class Schema(Generic[WireEvent]):
    """One engine's events: the decoders of both encodings, and the conversion to EngineEvents."""

    arrays: msgspec.msgpack.Decoder[WireEvent]
    maps: msgspec.msgpack.Decoder[WireEvent]
    meaning: Callable[[WireEvent], EngineEvent]
    """The EngineEvent of a decoded event; raises Unreadable."""


class Removed(Struct, tag="BlockRemoved"):
    """The fields that every engine's removal event has."""

    block_hashes: Hashes
    medium: str | None = None


class Cleared(Struct, tag="AllBlocksCleared"):
    """All blocks of the cache are gone; the same in every engine."""


class ClearedArray(Cleared, array_like=True, tag="AllBlocksCleared"):
    """Cleared in the array encoding."""


class _ArrayBatch(Struct, array_like=True):
    ts: Raw
    events: Annotated[list[Raw], Meta(max_length=EVENTS_MAX)]
    rank: Raw = Raw()


class _MapBatch(Struct):
    """A batch in the map form of a vLLM main-branch snapshot between 0.22 and 0.26; no release."""

    ts: Raw
    events: Annotated[list[Raw], Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: Raw = Raw()
    attn_dp_rank: Raw = Raw()


class _ArrayTime(Struct, array_like=True):
    ts: Raw


class _MapTime(Struct):
    ts: Raw


class _ArrayKind(Struct, array_like=True):
    kind: str


class _MapKind(Struct):
    kind: str = msgspec.field(name="type")


_ARRAY_BATCH = msgspec.msgpack.Decoder(_ArrayBatch)
_MAP_BATCH = msgspec.msgpack.Decoder(_MapBatch)
_ARRAY_TIME = msgspec.msgpack.Decoder(_ArrayTime)
_MAP_TIME = msgspec.msgpack.Decoder(_MapTime)
_ARRAY_KIND = msgspec.msgpack.Decoder(_ArrayKind)
_MAP_KIND = msgspec.msgpack.Decoder(_MapKind)
_TIME = msgspec.msgpack.Decoder(float)
_RANK: msgspec.msgpack.Decoder[int | None] = msgspec.msgpack.Decoder(int | None)
_TOKENS: msgspec.msgpack.Decoder[list[int] | None] = msgspec.msgpack.Decoder(
    Annotated[list[int], Meta(max_length=TOKENS_MAX)] | None
)
_TOKEN_PAIRS: msgspec.msgpack.Decoder[list[tuple[int, int]]] = msgspec.msgpack.Decoder(
    Annotated[list[tuple[int, int]], Meta(max_length=TOKENS_MAX)]
)


def decode_batch(payload: bytes, schema: Schema[Any]) -> EngineBatch:
    """The events of a payload, in their order, and the reasons for events left out.

    Never raises. An unreadable time or rank is left out, with a sentence, and the events stay: the
    relay has both from elsewhere.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        return _unreadable(f"{len(payload)} bytes are more than the {PAYLOAD_BYTES_MAX} allowed")
    try:
        batch: _ArrayBatch | _MapBatch
        batch = (_ARRAY_BATCH if _is_array(payload) else _MAP_BATCH).decode(payload)
    except READ_ERRORS as error:
        return _unreadable(_because(error))

    malformed: list[str] = []
    time_s = read_time_s(batch.ts, malformed)
    dp_rank = read_dp_rank(_rank_of(batch), malformed)
    meaning = schema.meaning
    # Nearly all batches have one encoding.
    is_array = bool(batch.events) and _is_array(batch.events[0])
    decode = (schema.arrays if is_array else schema.maps).decode
    events: list[EngineEvent] = []
    unknown_kinds: list[str] = []
    removals_lost = False
    for i, raw in enumerate(batch.events):
        try:
            events.append(meaning(decode(raw)))
        except READ_ERRORS:
            pass
        else:
            continue
        event, kind, reason = decode_event(raw, schema)
        if event is not None:
            events.append(event)
        elif reason:
            malformed.append(f"event {i} ({kind or 'no kind'}): {reason}")
            removals_lost |= kind != "BlockStored"
        else:
            unknown_kinds.append((kind or "")[:UNKNOWN_KIND_CHARS])
    return EngineBatch(
        time_s,
        dp_rank,
        tuple(events),
        tuple(unknown_kinds),
        removals_lost=removals_lost,
        malformed=tuple(malformed),
    )


def decode_event(
    raw: bytes | Raw, schema: Schema[Any]
) -> tuple[EngineEvent | None, str | None, str]:
    """(event, None, ""), or (None, the event's kind if it has one, why the event can't be read).

    The reason is empty for a kind that kvroute doesn't know. Never raises.
    """
    is_array = _is_array(raw)
    try:
        return schema.meaning((schema.arrays if is_array else schema.maps).decode(raw)), None, ""
    except READ_ERRORS as error:
        kind = _kind(raw, is_array)
        unknown = kind is not None and kind not in KINDS
        return None, kind, "" if unknown else _because(error)


def read_hash(value: int | bytes) -> EngineHash:
    """A block hash as bytes, or as an unsigned 64-bit number, since -1 and 2^64-1 are the same 8
    bytes. Raises Unreadable."""
    if isinstance(value, int):
        return value & U64_MASK
    if HASH_BYTES_MIN <= len(value) <= HASH_BYTES_MAX:
        return value
    raise Unreadable(
        f"a hash of {len(value)} bytes, where {HASH_BYTES_MIN} to {HASH_BYTES_MAX} are usual"
    )


def read_hashes(values: list[int | bytes]) -> tuple[EngineHash, ...]:
    """All hashes of an event, each as by read_hash."""
    return tuple(
        [value & U64_MASK if isinstance(value, int) else read_hash(value) for value in values]
    )


def read_token_ids(raw: Raw) -> "array[int]":
    """Token ids as an array of u32; empty for none.

    Models with an EAGLE draft cache under SGLang send bigrams: (token, the token after it) at each
    position. The first of each pair is the token of that position, so the firsts are the tokens of
    the blocks, with the same hashes as a plain model's. Such a block also depends on the token
    after it, so the overlap may be a block too long where prompts differ exactly from a block's end
    on.
    """
    try:
        token_ids = _TOKENS.decode(raw)
    except READ_ERRORS as error:
        token_ids = _read_pairs(raw, error)
    if not token_ids:
        return NO_TOKENS
    try:
        return array("I", token_ids)
    except OverflowError:
        pass
    i, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < U32_LIMIT)
    raise Unreadable(f"token_ids[{i}] is {token_id}, which no u32 can hold")


def _read_pairs(raw: Raw, not_plain: Exception) -> list[int]:
    try:
        return [first for first, _ in _TOKEN_PAIRS.decode(raw)]
    except READ_ERRORS:
        raise Unreadable(f"token_ids: {_because(not_plain)}") from None


def read_block_size(value: int | None) -> int:
    """Tokens of a block, by an event's field; 0: absent in the event. Raises Unreadable."""
    if value is None:
        return 0
    if 0 <= value <= BLOCK_SIZE_MAX:
        return value
    raise Unreadable(f"block_size is {value}, where 0 to {BLOCK_SIZE_MAX} are possible")


def check_lengths(token_count: int, block_count: int, block_size: int) -> None:
    """Raises Unreadable unless the tokens fill the blocks exactly, or there are no tokens."""
    if token_count and token_count != block_count * block_size:
        raise Unreadable(
            f"{token_count} tokens do not fill {block_count} blocks of {block_size} exactly"
        )


def _is_array(encoded: bytes | Raw) -> bool:
    """Whether MessagePack's first byte begins an array."""
    view = memoryview(encoded)
    return len(view) > 0 and (0x90 <= view[0] <= 0x9F or view[0] in (0xDC, 0xDD))


def _kind(raw: bytes | Raw, is_array: bool) -> str | None:
    """An event's kind, unchecked; None if it has none."""
    try:
        return _ARRAY_KIND.decode(raw).kind if is_array else _MAP_KIND.decode(raw).kind
    except READ_ERRORS:
        return None


def read_time_s(raw: Raw, malformed: list[str]) -> float:
    """A batch's time (Unix); 0.0, and a sentence added to `malformed`, if it is unreadable."""
    try:
        time_s = _TIME.decode(raw)
    except READ_ERRORS as error:
        malformed.append(f"the batch's time: {_because(error)}")
        return 0.0
    if math.isfinite(time_s) and time_s >= 0:
        return time_s
    malformed.append(f"the batch's time: {time_s} is no Unix time")
    return 0.0


def _rank_of(batch: _ArrayBatch | _MapBatch) -> Raw:
    if isinstance(batch, _ArrayBatch):
        return batch.rank
    return batch.data_parallel_rank if len(batch.data_parallel_rank) else batch.attn_dp_rank


def read_dp_rank(raw: Raw, malformed: list[str]) -> int | None:
    """A batch's rank; None if absent; None and a sentence in `malformed` if unreadable."""
    if not len(raw):
        return None
    try:
        dp_rank = _RANK.decode(raw)
    except READ_ERRORS as error:
        malformed.append(f"the batch's rank: {_because(error)}")
        return None
    if dp_rank is None or 0 <= dp_rank <= RANK_MAX:
        return dp_rank
    malformed.append(f"the batch's rank: {dp_rank} is outside 0 to {RANK_MAX}")
    return None


def batch_time_s(payload: bytes) -> float:
    """Unix time at which the engine made a batch; 0.0 if it can't be read."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        return 0.0
    try:
        reading = _ARRAY_TIME if _is_array(payload) else _MAP_TIME
        return read_time_s(reading.decode(payload).ts, [])
    except READ_ERRORS:
        return 0.0


def _unreadable(reason: str) -> EngineBatch:
    return EngineBatch(0.0, None, (), removals_lost=True, malformed=(f"the batch: {reason}",))


def _because(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:REASON_CHARS]
