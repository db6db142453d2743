"""Engine messages read in slices: that nothing changes by it, and that every slice is bounded."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from events.engines import batch_reader as module
from events.engines.batch_reader import (
    EVENT_BYTES,
    FIELDS_BYTES_MAX,
    PART_BLOCKS,
    SLICE_UNITS,
    WHOLE_BYTES,
    BatchReader,
    batch_time_s,
)
from events.engines.decoding import DECODERS, SCHEMAS
from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored, EngineEvent
from events.engines.wire import EVENTS_MAX, PAYLOAD_BYTES_MAX, TOKENS_MAX
from events.relay.ledger import Ledger
from tests.events.engines.encoded import CAPTURES, encode, engine_of, frames, payload_of

laws = settings(max_examples=60, deadline=None)
ITEM = "0123456789abcdef" * 4


class Read:
    """All that reads of one payload bring."""

    def __init__(self, payload: bytes, engine: str = "vllm", room: int = SLICE_UNITS) -> None:
        self.counts: Counter[str] = Counter()
        self.reader = BatchReader(payload, SCHEMAS[engine], self.counts)
        self.slices: list[list[EngineEvent]] = []
        while not self.reader.ended:
            self.slices.append(self.reader.read(room))
            assert self.reader.room > -2 * SLICE_UNITS

    @property
    def events(self) -> list[EngineEvent]:
        return [event for one in self.slices for event in one]


def held(events: list[EngineEvent], block_size: int | None = None) -> Any:
    """What a ledger holds after these, and how often each block."""
    ledger = Ledger(block_size)
    for event in events:
        ledger.apply(event)
    copies = {name: block.copies for name, block in ledger.blocks()}
    placed = [sorted(prefixes) for _, prefixes in ledger.placements()]
    return copies, placed, ledger.digest(), ledger._other_groups, set(ledger.dropped)


def assert_same(payload: bytes, engine: str, room: int = SLICE_UNITS) -> Read:
    """A sliced reading says what the whole one does."""
    batch = DECODERS[engine](payload)
    read = Read(payload, engine, room)
    reader = read.reader
    assert (reader.time_s, reader.dp_rank) == (batch.time_s, batch.dp_rank)
    assert (reader.malformed, reader.removals_lost) == (len(batch.malformed), batch.removals_lost)
    assert reader.digest == xxh3_64_intdigest(payload)
    kinds = Counter(type(event).__name__ for event in batch.events)
    kinds |= {"malformed": len(batch.malformed), "unknown": len(batch.unknown_kinds)}
    assert +read.counts == +kinds
    whole = held(list(batch.events))
    # Of a cut chain more may be known than of the whole: what goes on after a known block, though
    # the parent is not known, and what comes before a block that can't be hashed.
    if not reader.removals_lost and not whole[-1] & _PARTLY:
        assert held(read.events) == whole
    return read


_PARTLY = {"unknown_parent", "unhashable", "item_place_unknown"}


@pytest.fixture(params=["as it is", "tiny bounds"])
def bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """The bounds of a step; and such that nearly everything is cut."""
    if request.param == "as it is":
        yield
        return
    with mock.patch.multiple(
        module, WHOLE_BYTES=0, EVENT_BYTES=0, PART_BLOCKS=2, SKIP_STEPS=1, PART_BYTES=32
    ):
        yield


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("capture", CAPTURES)
def test_what_real_engines_sent_says_the_same_in_slices(capture: str) -> None:
    for frame in frames(capture):
        for room in (1, SLICE_UNITS):
            assert_same(payload_of(frame), engine_of(capture), room)


def stores(draw: st.DrawFn, engine: str) -> dict[str, Any]:
    blocks = draw(st.integers(0, 5))
    size = draw(st.sampled_from([1, 4, 16]))
    tokens = draw(st.sampled_from([blocks * size] * 6 + [0, 1]))
    event: dict[str, Any] = {
        "block_hashes": draw(st.lists(st.integers(-9, 9), min_size=blocks, max_size=blocks)),
        "parent_block_hash": draw(st.none() | st.integers(-9, 9)),
        "token_ids": [[7, 8]] * tokens if draw(st.booleans()) else list(range(tokens)),
        "block_size": size,
        "lora_id": draw(st.sampled_from([None, None, 3])),
        "medium": draw(st.sampled_from(["GPU", "CPU", "EXTERNAL", "tape", None])),
    }
    if engine == "sglang":
        return event | {"cache_salt": draw(st.sampled_from([None, "salt"]))}
    keys = st.none() | st.sampled_from([["salt"], [], ["ad"], [[ITEM, 3]], ["ad", [ITEM, 0], "s"]])
    return event | {
        "lora_name": draw(st.sampled_from([None, "ad"])),
        "extra_keys": draw(st.none() | st.lists(keys, min_size=blocks, max_size=blocks)),
        "group_idx": draw(st.sampled_from([None, 0, 1])),
        "kv_cache_spec_kind": draw(st.sampled_from(["full_attention", "mamba", None])),
    }


@st.composite
def events_of(draw: st.DrawFn, engine: str) -> Any:
    kind = draw(st.sampled_from(["BlockStored"] * 4 + ["BlockRemoved"] * 2 + ["AllBlocksCleared"]))
    if draw(st.integers(0, 19)) == 0:
        kind = draw(st.sampled_from(["BlockMoved", 7, "x" * 99]))
    fields: dict[str, Any] = {}
    if kind == "BlockStored":
        fields = stores(draw, engine)
    elif kind == "BlockRemoved":
        fields = {"block_hashes": draw(st.lists(st.integers(-9, 9))), "medium": "GPU"}
    if fields and draw(st.integers(0, 19)) == 0:
        fields[draw(st.sampled_from(list(fields)))] = draw(
            st.sampled_from([None, [], {}, "x", -1, 1 << 40, [[]], [None], {"a": 1}])
        )
    return [kind, *fields.values()] if draw(st.booleans()) else {"type": kind, "new": [1]} | fields


@st.composite
def batches(draw: st.DrawFn, engine: str) -> bytes:
    events = draw(st.lists(events_of(engine), max_size=6))
    time_s = draw(st.sampled_from([1.5, 3, "now", -1.0]))
    rank = draw(st.sampled_from([0, 3, None, -1, "x"]))
    if draw(st.booleans()):
        return msgspec.msgpack.encode([time_s, events, rank])
    return msgspec.msgpack.encode(
        {"ts": time_s, "more": [{}], "events": events, "data_parallel_rank": rank}
    )


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("engine", DECODERS)
@laws
@given(data=st.data(), room=st.sampled_from([1, 3, SLICE_UNITS]))
def test_any_batch_says_the_same_in_slices(data: st.DataObject, room: int, engine: str) -> None:
    payload = data.draw(batches(engine))
    batch = DECODERS[engine](payload)
    if any("BlockStored" in reason for reason in batch.malformed):
        Read(payload, engine, room)  # its blocks may be known up to what can't be read
        return
    assert_same(payload, engine, room)


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("engine", DECODERS)
@laws
@given(data=st.data())
def test_a_batch_that_is_cut_or_changed_is_never_more_than_left_out(
    data: st.DataObject, engine: str
) -> None:
    payload = data.draw(batches(engine))
    at = data.draw(st.integers(0, len(payload) - 1))
    changed = bytes([data.draw(st.integers(0, 255))])
    for bad in (payload[:at], payload + b"\x00", payload[:at] + changed + payload[at + 1 :]):
        read = Read(bad, engine, 3)
        if DECODERS[engine](bad).removals_lost:
            assert read.reader.removals_lost
        batch_time_s(bad)


@pytest.mark.usefixtures("bounds")
@laws
@given(st.binary(max_size=200))
def test_any_bytes_are_read_to_their_end(payload: bytes) -> None:
    Read(payload)
    batch_time_s(payload)


# Units of work, at the limits


def work_of(event: EngineEvent) -> int:
    """Units that applying an event takes."""
    if isinstance(event, BlocksCleared) or (
        isinstance(event, BlocksStored) and not event.full_attention
    ):
        return 1
    size = event.block_size if isinstance(event, BlocksStored) and event.token_ids else 0
    return len(event.hashes) * (1 + size // module.UNIT_TOKENS)


class Copied(bytes):
    """Notes how many bytes each slice of it copies."""

    noted: list[int]

    @override
    def __getitem__(self, place: Any) -> Any:
        part = super().__getitem__(place)
        if isinstance(part, bytes):
            self.noted.append(len(part))
        return part


def assert_bounded(payload: bytes, engine: str = "vllm") -> Read:
    """No slice is more than its units, nor decodes, copies or goes over more bytes than they stand
    for."""
    decoded: list[int] = []
    skipped: list[int] = []
    noting = Copied(payload)
    copied = noting.noted = []
    counts: Counter[str] = Counter()
    reader = BatchReader(noting, SCHEMAS[engine], counts)
    of_events, of_skipping = module.decode_event, module.skip

    def decode_event(raw: bytes, schema: Any) -> Any:
        decoded.append(len(raw))
        return of_events(raw, schema)

    def skip(data: bytes, at: int, left: int, steps: int) -> tuple[int, int]:
        skipped.append(min(left, steps) if steps < 1 << 15 else steps)
        return of_skipping(payload if data is noting else data, at, left, steps)

    read = Read.__new__(Read)
    read.counts, read.reader, read.slices = counts, reader, []
    with mock.patch.multiple(module, decode_event=decode_event, skip=skip):
        while not reader.ended:
            decoded.clear()
            skipped.clear()
            copied.clear()
            events = reader.read(SLICE_UNITS)
            read.slices.append(events)
            assert sum(map(work_of, events)) <= SLICE_UNITS
            assert len(events) <= SLICE_UNITS
            assert len(decoded) <= SLICE_UNITS + 1
            bytes_max = SLICE_UNITS * module.UNIT_BYTES + 2 * module.PART_BYTES
            assert sum(decoded) <= bytes_max
            assert sum(copied) <= 2 * bytes_max
    return read


def array(values: int) -> bytes:
    return b"\xdd" + values.to_bytes(4, "big")


def test_a_million_removals_in_a_batch_are_a_bounded_work_each() -> None:
    count = 20_000  # the same slices as of a million, fifty times faster
    payload = encode(*(["BlockRemoved", [(1 << 40) + i], "GPU"] for i in range(count)))
    read = assert_bounded(payload)
    assert [event.hashes[0] - (1 << 40) for event in read.events] == list(range(count))  # type: ignore[union-attr]
    assert len(read.slices) >= count // SLICE_UNITS


@pytest.mark.parametrize("page", [1, 16])
def test_a_store_of_many_blocks_in_one_event_is_cut_into_a_chain(page: int) -> None:
    count = 20_000
    payload = encode(
        {
            "type": "BlockStored",
            "block_hashes": list(range(1, count + 1)),
            "parent_block_hash": None,
            "token_ids": [i % 1000 for i in range(count * page)],
            "block_size": page,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["salt"]] + [None] * (count - 1),
        }
    )
    read = assert_bounded(payload)
    assert len(read.events) >= count // PART_BLOCKS
    assert read.counts == {"BlocksStored": 1}
    assert held(read.events, 16) == held(list(DECODERS["vllm"](payload).events), 16)


def test_a_removal_of_many_blocks_in_one_event_is_cut() -> None:
    hashes = list(range(1 << 40, (1 << 40) + 20_000))
    read = assert_bounded(encode(["BlockRemoved", hashes, "CPU", 3]))
    parts = [event for event in read.events if isinstance(event, BlocksRemoved)]
    assert [name for part in parts for name in part.hashes] == hashes
    assert {replace(part, hashes=()) for part in parts} == {BlocksRemoved((), "CPU", 3)}
    assert read.counts == {"BlocksRemoved": 1}


def test_blocks_that_say_much_are_cut_by_their_bytes() -> None:
    items = [[[f"{i:064x}", 0] for i in range(50)]] * 500
    payload = encode(
        {
            "type": "BlockStored",
            "block_hashes": list(range(500)),
            "parent_block_hash": 7,
            "token_ids": list(range(2000)),
            "block_size": 4,
            "extra_keys": items,
        }
    )
    read = assert_bounded(payload)
    assert held(read.events) == held(list(DECODERS["vllm"](payload).events))
    assert max(len(event.hashes) for event in read.events) < 20  # type: ignore[union-attr]


def test_groups_that_skip_blocks_make_no_work_whatever_they_say() -> None:
    payload = encode(
        {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": None,
            "token_ids": list(range(100_000)),
            "block_size": 1 << 20,
            "group_idx": 1,
            "kv_cache_spec_kind": "mamba",
        }
    )
    read = assert_bounded(payload)
    (event,) = read.events
    assert isinstance(event, BlocksStored)
    assert (event.full_attention, event.group) == (False, 1)
    assert not read.reader.malformed


@pytest.mark.parametrize(
    ("changes", "removals_lost"),
    [
        ({"token_ids": list(range(20_000))}, False),
        ({"block_size": 1 << 17, "token_ids": [1] * (1 << 17), "block_hashes": [1]}, False),
        ({"lora_name": "x" * (FIELDS_BYTES_MAX + 1)}, False),
        ({"extra_keys": [None] * 5_000}, False),
        ({"block_hashes": {str(i): i for i in range(9_000)}}, False),
        ({"block_hashes": ["x" * 70_000, 1]}, False),
        ({"type": "BlockRemoved", "block_hashes": [["x"]] * 9_000}, True),
        ({"type": 7}, True),
    ],
)
def test_a_long_event_that_makes_no_sense_is_left_out(
    changes: dict[str, Any], removals_lost: bool
) -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(6_000)),
        "parent_block_hash": None,
        "token_ids": [1] * 24_000,
        "block_size": 4,
    }
    payload = encode(event | changes, {"type": "AllBlocksCleared"})
    assert len(payload) > EVENT_BYTES
    read = assert_bounded(payload)
    assert (read.reader.malformed, read.reader.removals_lost) == (1, removals_lost)
    assert [type(event) for event in read.events] == [BlocksCleared]
    batch = DECODERS["vllm"](payload)
    assert batch.removals_lost == removals_lost


@pytest.mark.parametrize(
    "payload",
    [
        bytes(PAYLOAD_BYTES_MAX + 1),
        b"\x92\x01" + array(EVENTS_MAX + 1) + bytes(EVENTS_MAX + 1),
        b"\x92\x01" + array(1 << 31) + bytes(WHOLE_BYTES),
        b"\x91" * (1 << 20),
        b"\x92\x01\x91\x93\xacBlockRemoved"
        + array(TOKENS_MAX + 1)
        + bytes(TOKENS_MAX + 1)
        + b"\xc0",
        b"\x92\x01\x91\x92\xacBlockRemoved" + b"\x91" * (1 << 20),
        b"\x81\xa6events" + array(1 << 14) + bytes(1 << 14),
        b"\xdf\x00\x01\x00\x00" + b"\xa1a\x00" * (1 << 16),
    ],
    ids=["bytes", "events", "a lie", "a bomb", "hashes", "a bomb inside", "no time", "keys"],
)
def test_what_is_over_a_bound_is_left_out_at_a_bounded_work(payload: bytes) -> None:
    read = assert_bounded(payload)
    assert read.events == []
    assert read.reader.malformed
    assert read.reader.removals_lost


def test_a_batch_tells_its_time_by_its_first_bytes() -> None:
    assert batch_time_s(encode(time_s=12.5)) == 12.5
    assert batch_time_s(msgspec.msgpack.encode({"ts": 12.5, "events": []})) == 12.5
    assert batch_time_s(encode(time_s=12.5)[:12]) == 12.5
    for nothing in (b"", b"\x90", b"\xc0", msgspec.msgpack.encode({"events": [], "ts": 1.0})):
        assert batch_time_s(nothing) == 0.0


@pytest.mark.usefixtures("bounds")
def test_a_long_kind_that_is_no_text_may_have_been_a_removal() -> None:
    event = b"\x82\xa4type\xd9\x63" + b"\x80" * 99 + b"\xa3new\x91\x01"
    payload = b"\x93" + msgspec.msgpack.encode(1.5) + b"\x91" + event + b"\xc0"
    read = Read(payload)
    assert DECODERS["vllm"](payload).removals_lost
    assert read.reader.removals_lost
    assert +read.counts == {"malformed": 1}


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("name", ["ts", "data_parallel_rank"])
def test_a_number_of_the_batch_that_is_none_is_counted_whatever_its_length(name: str) -> None:
    for length in (10, 100, WHOLE_BYTES):
        batch = {"ts": 1.5, "events": [["AllBlocksCleared"]] * 300, name: "x" * length}
        read = assert_same(msgspec.msgpack.encode(batch), "vllm")
        assert (read.reader.malformed, len(read.events)) == (1, 300)
