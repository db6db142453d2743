"""Reads one message of an engine in slices of bounded work, whatever its size. Pure.

    payload ─> read(room), read(room), ... ─> events in order, until `ended`

Engines don't bound a message: it may have a prompt of a million tokens, or a million evictions. So
sizes and counts are read from the bytes (events/engines/skipping.pyx) before objects are made, and
an event longer than a slice is cut into equivalent events: a chain of stores, each after the last
block of its predecessor; or several removals.

Laws:
- the events of all reads of a readable batch are equivalent to those of decode_batch;
- a read does about `room` units of work at most, and at least one step;
- unreadable parts are left out and counted, as by decode_batch.
"""

from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64

from events.engines.events import BlocksRemoved, BlocksStored, EngineEvent
from events.engines.skipping import skip
from events.engines.wire import (
    EVENTS_MAX,
    PAYLOAD_BYTES_MAX,
    READ_ERRORS,
    TOKENS_MAX,
    Schema,
    Unreadable,
    decode_batch,
    decode_event,
    read_dp_rank,
    read_time_s,
)

SLICE_UNITS = 128
"""Work in a turn of the event loop: 2 to 3 ms if a unit takes 10 us. A unit is an event, a block
that is stored or removed, UNIT_BYTES to decode, or UNIT_TOKENS to hash."""
UNIT_BYTES = 512
UNIT_TOKENS = 256
WHOLE_BYTES = 4096
"""A batch of at most so many bytes is decoded in one step: 250 of the smallest events take 2 ms."""
EVENT_BYTES = 16 * 1024
"""An event of at most so many bytes is decoded in one step: 16,000 one-byte numbers take 2 ms."""
PART_BLOCKS = 256
"""Most blocks in a part of a longer event; fewer if they have many tokens or items."""
PART_TOKENS = 4096
PART_BLOCK_TOKENS_MAX = 1 << 16
"""Most tokens of a block, as in the configuration, so that one block is one step."""
PART_BYTES = 64 * 1024
BLOCK_BYTES_MAX = 1 << 20
"""Most bytes about a block of a longer event: its tokens, and the ids of its items."""
FIELDS_BYTES_MAX = 16 * 1024
"""Most bytes of a longer event's fields besides its hashes, tokens and items: names of 1,024
characters."""
SKIP_STEPS = 1 << 15
"""MessagePack headers skipped in one step: 0.1 ms."""
_SKIP_UNITS = 16
_DIGEST_BYTES = 1 << 19
"""Bytes hashed in one step: 0.1 ms."""
_DIGEST_UNITS = 16
_NAME_BYTES_MAX = 64
"""Most bytes of a map's key that can be a known field."""
_LONG_FIELDS = ("block_hashes", "token_ids", "extra_keys")
_NIL = b"\xc0"
_MISFIT = {"block_hashes": b"\x90", "token_ids": b"\x91\x00", "extra_keys": _NIL}
"""A token for no block, which makes every decoder refuse the event if its tokens matter."""

_NAME = msgspec.msgpack.Decoder(str)
_END = object()

_Span = tuple[int, int]
"""First byte, and the byte after the last."""
_Step = Generator[None, None, Any]


class BatchReader:
    """One payload, read slice by slice."""

    def __init__(self, payload: bytes, schema: Schema[Any], counts: Counter[str]) -> None:
        """counts: events by kind, and `unknown` and `malformed` events."""
        self.ended = False
        self.digest = 0
        """XXH3-64 of the payload, once all its bytes are hashed."""
        self.time_s = 0.0
        self.dp_rank: int | None = None
        self.malformed = 0
        """Unreadable events so far; an unreadable batch, time or rank counts, too."""
        self.removals_lost = False
        """Whether an unreadable event may have been a removal."""
        self._payload = payload
        self._schema = schema
        self._known = {"type"}.union(*schema.fields.values())
        self._counts = counts
        self._room = 0
        self._events: list[EngineEvent] = []
        self._steps = self._walk()

    def read(self, room: int) -> list[EngineEvent]:
        """The next events. Call until `ended`."""
        self._room = room
        self._events = []
        self.ended = next(self._steps, _END) is _END
        return self._events

    @property
    def room(self) -> int:
        """Units that the last read left of its room; below 0 if a step took more."""
        return self._room

    # The other methods are steps: each yields when the room of a read is used up.

    def _walk(self) -> _Step:
        payload = self._payload
        hasher = xxh3_64()
        view = memoryview(payload)
        for at in range(0, len(payload), _DIGEST_BYTES):
            if at:
                yield from self._spend(_DIGEST_UNITS)
            hasher.update(view[at : at + _DIGEST_BYTES])
        self.digest = hasher.intdigest()
        try:
            if len(payload) <= WHOLE_BYTES:
                yield from self._read_whole()
            else:
                yield from self._read_batch()
        except READ_ERRORS:
            self._leave_out(removals_too=True)

    def _read_whole(self) -> _Step:
        batch = decode_batch(self._payload, self._schema)
        self.time_s, self.dp_rank = batch.time_s, batch.dp_rank
        self._counts["unknown"] += len(batch.unknown_kinds)
        self._counts["malformed"] += len(batch.malformed)
        self.malformed = len(batch.malformed)
        self.removals_lost = batch.removals_lost
        self._room -= len(self._payload) // UNIT_BYTES
        for event in batch.events:
            self._counts[type(event).__name__] += 1
            yield from self._give(event)

    def _read_batch(self) -> _Step:
        payload = self._payload
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise Unreadable(f"{len(payload)} bytes are more than {PAYLOAD_BYTES_MAX}")
        count, at, is_map = _header(payload, 0)
        spans: dict[str, _Span] = {}
        names = iter(("ts", "events", "rank"))
        seen_events = False
        for _ in range(count):
            yield from self._spend(1)
            name = next(names, "")
            if is_map:
                name = yield from self._key(at)
                at = yield from self._skip(at)
            begin = at
            if name == "events":
                if seen_events:
                    raise Unreadable("a batch with two lists of events")
                seen_events = True
                at = yield from self._read_events(at)
            else:
                at = yield from self._skip(at)
                if name:  # a longer value is no number, cut or whole
                    spans[name] = begin, min(at, begin + _NAME_BYTES_MAX)
            if name == "ts":
                self.time_s = self._read_small(read_time_s, spans.get("ts")) or 0.0
        if not seen_events or (not is_map and count < 2) or "ts" not in spans:
            raise Unreadable("a batch without a time, or without events")
        if at != len(payload):
            raise Unreadable("bytes after the batch")
        rank = spans.get("rank") or spans.get("data_parallel_rank") or spans.get("attn_dp_rank")
        if rank is not None:
            self.dp_rank = self._read_small(read_dp_rank, rank)

    def _read_small(self, reading: Any, span: _Span | None) -> Any:
        """A number of the batch; if it is unreadable, it is counted, and no event is lost."""
        errors: list[str] = []
        value = reading(msgspec.Raw(self._payload[slice(*span)] if span else b""), errors)
        if errors:
            self._counts["malformed"] += 1
            self.malformed += 1
        return value

    def _read_events(self, at: int) -> _Step:
        payload = self._payload
        count, at, is_map = _header(payload, at)
        if is_map or count > EVENTS_MAX:
            raise Unreadable(f"{count} events, or no list of events")
        for _ in range(count):
            end, left = skip(payload, at, 1, SKIP_STEPS)
            if left:
                end = yield from self._skip_on(end, left)
            if end - at <= EVENT_BYTES:
                yield from self._spend((end - at) // UNIT_BYTES)
                event = self._decode(payload[at:end])
                if event is not None:
                    self._counts[type(event).__name__] += 1
                    yield from self._give(event)
            else:
                try:
                    yield from self._cut(at)
                except READ_ERRORS:
                    self._leave_out(removals_too=True)
            at = end
        return at

    def _decode(self, raw: bytes) -> EngineEvent | None:
        """An event of a bounded size; None: left out, and counted."""
        self._room -= 1
        event, kind, reason = decode_event(raw, self._schema)
        if event is not None:
            return event
        if reason:
            self._leave_out(removals_too=kind != "BlockStored")
        else:
            self._counts["unknown"] += 1
        return None

    def _give(self, event: EngineEvent) -> _Step:
        """Adds an event to the results, in parts if it has more blocks than the room allows."""
        if self._room <= 0:
            yield
        if isinstance(event, BlocksRemoved) or (
            isinstance(event, BlocksStored) and event.full_attention
        ):
            units = 1
            if isinstance(event, BlocksStored) and event.token_ids:
                units += event.block_size // UNIT_TOKENS
            while len(event.hashes) * units > self._room > 0:
                count = max(1, self._room // units)
                if count >= len(event.hashes):
                    break
                first, event = _split(event, count)
                self._events.append(first)
                self._room = 0
                yield
            self._room -= len(event.hashes) * units
        self._events.append(event)

    def _leave_out(self, *, removals_too: bool) -> None:
        self._counts["malformed"] += 1
        self.malformed += 1
        self.removals_lost |= removals_too

    def _spend(self, units: int) -> _Step:
        if self._room <= 0:
            yield
        self._room -= units

    def _skip(self, at: int, values: int = 1) -> _Step:
        end, left = skip(self._payload, at, values, SKIP_STEPS)
        if left:
            end = yield from self._skip_on(end, left)
        return end

    def _skip_on(self, at: int, left: int) -> _Step:
        while left:
            yield from self._spend(_SKIP_UNITS)
            at, left = skip(self._payload, at, left, SKIP_STEPS)
        return at

    def _key(self, at: int) -> _Step:
        """A map's key; empty: too long for a known field. Raises Unreadable for no string."""
        yield from self._spend(1)
        end = yield from self._skip(at)
        if not _is_text(self._payload[at]):
            raise Unreadable("a map whose keys are no strings")
        return _text(self._payload[at:end]) if end - at <= _NAME_BYTES_MAX else ""

    def _cut(self, at: int) -> _Step:
        """An event of more than EVENT_BYTES, in parts."""
        payload = self._payload
        count, at, is_map = _header(payload, at)
        spans: dict[str, _Span] = {}
        if is_map:
            for _ in range(count):
                name = yield from self._key(at)
                at = yield from self._skip(at)
                end = yield from self._skip(at)
                if name in self._known:
                    spans[name] = at, end
                at = end
            kind = _kind(payload, spans.get("type"))
        else:
            end = yield from self._skip(at)
            kind = _kind(payload, (at, end))
            at = end
            for name in self._schema.fields.get(kind, ())[: count - 1]:
                end = yield from self._skip(at)
                spans[name] = at, end
                at = end
        if kind not in self._schema.fields:
            self._counts["unknown"] += 1
            return
        fields = {name: spans[name] for name in self._schema.fields[kind] if name in spans}
        if sum(end - at for name, (at, end) in fields.items() if name not in _LONG_FIELDS) > (
            FIELDS_BYTES_MAX
        ):
            self._leave_out(removals_too=kind != "BlockStored")
            return
        try:
            yield from self._read_parts(_LongEvent(payload, kind, fields, is_map=is_map))
        except READ_ERRORS:
            self._leave_out(removals_too=kind != "BlockStored")

    def _read_parts(self, event: "_LongEvent") -> _Step:
        """The event as several events, decoded one after the other."""
        if not event.fits:
            # Groups that skip blocks send such events; the tokens of such groups are not used.
            yield from self._hand_on(event.part(_MISFIT), is_first=True)
            return
        parent: bytes | None = None
        is_first = True
        places = event.places
        while places.blocks or is_first:
            count = min(places.blocks, PART_BLOCKS, max(1, PART_TOKENS // (event.size or 1)))
            last, ends = yield from self._ends(event, places, count)
            while ends.bytes_after(places) > PART_BYTES and count > 1:
                count //= 2
                last, ends = yield from self._ends(event, places, count)
            if (size := ends.bytes_after(places)) > BLOCK_BYTES_MAX:
                raise Unreadable(f"{size} bytes about one block")
            yield from self._spend(size // UNIT_BYTES)
            part = event.part(event.lists(places, ends) | _parent(parent))
            if not (yield from self._hand_on(part, is_first=is_first)):
                return
            parent = self._payload[last : ends.hash]
            places = ends
            is_first = False

    def _hand_on(self, raw: bytes, *, is_first: bool) -> _Step:
        """Whether a part could be read; an event is counted with its first part."""
        part = self._decode(raw)
        if part is None:
            return False
        self._counts[type(part).__name__] += is_first
        yield from self._give(part)
        return True

    def _ends(self, event: "_LongEvent", places: "_Places", count: int) -> _Step:
        """Offset of the hash of the last of the next blocks, and the places after all of them."""
        last = hash_end = places.hash
        if count:
            last = yield from self._skip(last, count - 1)
            hash_end = yield from self._skip(last)
        token_end = yield from self._skip(places.token, count * event.size if event.tokens else 0)
        key_end = yield from self._skip(places.key, count if event.keys else 0)
        return last, _Places(places.blocks - count, hash_end, token_end, key_end)


class _Places(NamedTuple):
    """The number of blocks of an event still to come, and the offsets of their values."""

    blocks: int
    hash: int
    token: int
    key: int

    def bytes_after(self, before: "_Places") -> int:
        return sum(self[1:]) - sum(before[1:])


class _LongEvent:
    """An event with the offsets of its fields, from which parts of it are made.

    Raises Unreadable if the hashes are no list, or over TOKENS_MAX.
    """

    def __init__(
        self, payload: bytes, kind: str, fields: dict[str, _Span], *, is_map: bool
    ) -> None:
        self._payload = payload
        self._fields = fields
        self._kind = msgspec.msgpack.encode(kind)
        self._is_map = is_map
        blocks, hash_at, fits_hashes = self._list("block_hashes")
        self.tokens, token_at, fits_tokens = self._list("token_ids")
        self.keys, key_at, fits_keys = self._list("extra_keys")
        self.size = self._number("block_size")
        if not fits_hashes or max(blocks, self.tokens) > TOKENS_MAX:
            raise Unreadable(f"{blocks} blocks and {self.tokens} tokens in one event")
        self.places = _Places(blocks, hash_at, token_at, key_at)
        fits_tokens &= self.tokens in (0, blocks * self.size)
        fits_keys &= self.keys in (0, blocks)
        self.fits = fits_tokens and fits_keys and self.size <= PART_BLOCK_TOKENS_MAX
        """Whether each block has its tokens, and its items if there are any."""

    def lists(self, places: _Places, ends: _Places) -> dict[str, bytes]:
        """The fields about the blocks between two places."""
        payload, count = self._payload, places.blocks - ends.blocks
        lists = {"block_hashes": _list(count, payload[places.hash : ends.hash])}
        if self.tokens:
            lists["token_ids"] = _list(count * self.size, payload[places.token : ends.token])
        if self.keys:
            lists["extra_keys"] = _list(count, payload[places.key : ends.key])
        return lists

    def _list(self, name: str) -> tuple[int, int, bool]:
        """Number of values in a field's list, their offset, and whether it is a list (or nil)."""
        at, end = self._fields.get(name, (0, 0))
        if at == end or self._payload.startswith(_NIL, at, end):  # without a copy of the list
            return 0, 0, at == end or name != "block_hashes"
        try:
            count, at, is_map = _header(self._payload, at)
        except Unreadable:
            return 0, 0, False
        return (0, 0, False) if is_map else (count, at, True)

    def _number(self, name: str) -> int:
        """A field's number; 0 if it has none: the decoder decides about that."""
        raw = self._payload[slice(*self._fields.get(name, (0, 0)))]
        value = msgspec.msgpack.decode(raw) if raw else None
        return value if isinstance(value, int) and value >= 0 else 0

    def part(self, changes: dict[str, bytes]) -> bytes:
        """The same event, encoded, with these values in the fields that it has."""
        payload = self._payload
        values = [
            (name, changes[name] if name in changes else payload[at:end])
            for name, (at, end) in self._fields.items()
        ]
        if not self._is_map:
            encoded = (value for _, value in values)
            return _list(1 + len(values), b"".join((self._kind, *encoded)))
        pairs = (msgspec.msgpack.encode(name) + value for name, value in values)
        head = bytes([0x80 | 1 + len(values)])
        return b"".join((head, b"\xa4type", self._kind, *pairs))


def _split(
    event: BlocksStored | BlocksRemoved, count: int
) -> tuple[BlocksStored | BlocksRemoved, BlocksStored | BlocksRemoved]:
    """The first blocks of an event, and the others: applied in order, equivalent to the whole."""
    first, others = event.hashes[:count], event.hashes[count:]
    if isinstance(event, BlocksRemoved):
        return replace(event, hashes=first), replace(event, hashes=others)
    tokens = count * event.block_size if event.token_ids else 0
    items = event.item_ids
    return (
        replace(
            event,
            hashes=first,
            token_ids=event.token_ids[:tokens],
            item_ids=items and items[:count],
        ),
        replace(
            event,
            hashes=others,
            parent=first[-1],
            token_ids=event.token_ids[tokens:],
            item_ids=items and items[count:],
        ),
    )


def batch_time_s(payload: bytes) -> float:
    """When the engine made a batch; 0.0 if its first bytes don't have the time."""
    try:
        _, at, is_map = _header(payload, 0)
        if is_map:
            end, left = skip(payload, at, 1, 1)
            if left or _text(payload[at:end]) != "ts":
                return 0.0
            at = end
        end, left = skip(payload, at, 1, 1)
        return 0.0 if left else read_time_s(msgspec.Raw(payload[at:end]), [])
    except READ_ERRORS:
        return 0.0


def _parent(encoded: bytes | None) -> dict[str, bytes]:
    return {} if encoded is None else {"parent_block_hash": encoded}


def _header(data: bytes, at: int) -> tuple[int, int, bool]:
    """Number of values, or pairs, of an array or map; their offset; whether it is a map.

    Raises Unreadable for anything else, and ValueError for more values than the bytes can hold.
    """
    first = data[at] if at < len(data) else 0
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        is_map = False
    elif 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        is_map = True
    else:
        raise Unreadable("neither an array nor a map")
    end, left = skip(data, at, 1, 1)
    return left // 2 if is_map else left, end, is_map


def _list(count: int, values: bytes) -> bytes:
    if count < 16:
        return bytes([0x90 | count]) + values
    return (
        b"\xdc" + count.to_bytes(2, "big")
        if count < 1 << 16
        else (b"\xdd" + count.to_bytes(4, "big"))
    ) + values


def _kind(data: bytes, span: _Span | None) -> str:
    """An event's kind; a substitute for more than FIELDS_BYTES_MAX. Raises one of READ_ERRORS if it
    has none."""
    at, end = span or (0, 0)
    if at == end or not _is_text(data[at]):
        raise Unreadable("an event without a kind")
    return _NAME.decode(data[at:end]) if end - at <= FIELDS_BYTES_MAX else "too long a kind"


def _is_text(first: int) -> bool:
    """Whether MessagePack's first byte begins a string."""
    return 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB


def _text(encoded: bytes) -> str:
    """A short string; empty if it is no string."""
    try:
        return _NAME.decode(encoded)
    except READ_ERRORS:
        return ""
