"""Payloads that must be refused, in part or whole, and counted."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.engines.events import BlocksCleared, BlocksRemoved, EngineBatch
from events.engines.table import READINGS
from events.engines.wire import EVENTS_MAX, PAYLOAD_BYTES_MAX, UNKNOWN_KIND_CHARS
from tests.events.engines.encoded import (
    CAPTURES,
    ENGINE_FIELDS,
    U64,
    Decode,
    complaint,
    encode,
    engine_of,
    frames,
    only,
    payload_of,
    removed,
    stored,
)
from tests.events.engines.test_versions import FULL, encodings

CLEARED = {"type": "AllBlocksCleared"}

# What must be refused, and counted


def test_one_bad_event_leaves_the_others_in_their_order(decode: Decode) -> None:
    batch = decode(
        encode(
            removed(block_hashes=[1]),
            stored(token_ids=[1]),
            {"type": "BlockMigrated", "block_hashes": [1]},
            {"type": "AllBlocksCleared"},
            ["BlockSwapped", 1],
            17,
            {"no": "kind"},
            removed(block_hashes=[2]),
        )
    )
    assert batch.events == (
        BlocksRemoved((1,), "GPU"),
        BlocksCleared(),
        BlocksRemoved((2,), "GPU"),
    )
    assert batch.unknown_kinds == ("BlockMigrated", "BlockSwapped")
    assert [reason.split(":")[0] for reason in batch.malformed] == [
        "event 1 (BlockStored)",
        "event 5 (no kind)",
        "event 6 (no kind)",
    ]


def test_an_unknown_kind_is_cut(decode: Decode) -> None:
    batch = decode(encode(["x" * 1000], {"type": "y" * 1000}))
    assert batch.unknown_kinds == ("x" * UNKNOWN_KIND_CHARS, "y" * UNKNOWN_KIND_CHARS)
    assert batch.malformed == ()


@pytest.mark.parametrize("kind", [None, 1, True, b"BlockStored", ["BlockStored"], {}, ""])
def test_a_kind_that_is_no_name_is_counted(decode: Decode, kind: Any) -> None:
    for event in ([kind, [1]], {"type": kind, "block_hashes": [1]}):
        batch = decode(encode(event))
        assert batch.events == ()
        assert len(batch.malformed) + len(batch.unknown_kinds) == 1


@pytest.mark.parametrize(
    "batch",
    [
        None,
        1,
        "text",
        [],
        [1.5],
        {},
        {"ts": 1.5},
        [1.5, None],
        [1.5, {}],
        [1.5, "x"],
        {"ts": 1.5, "events": 3},
        {1: 2},
    ],
)
def test_a_batch_of_another_shape_is_one_complaint(decode: Decode, batch: Any) -> None:
    decoded = decode(msgspec.msgpack.encode(batch))
    assert (decoded.time_s, decoded.dp_rank) == (0.0, None)
    assert complaint(decoded).startswith("the batch: ")


@pytest.mark.parametrize("time_s", ["now", None, [], float("nan"), float("inf"), -1.0, True])
def test_an_unreadable_time_keeps_the_events(decode: Decode, time_s: Any) -> None:
    batch = decode(msgspec.msgpack.encode([time_s, [CLEARED], 1]))
    assert batch.time_s == 0.0
    assert (batch.dp_rank, batch.events) == (1, (BlocksCleared(),))
    assert [reason.split(":")[0] for reason in batch.malformed] == ["the batch's time"]


@pytest.mark.parametrize("rank", ["0", 1.0, True, -1, 1 << 40, []])
def test_an_unreadable_rank_keeps_the_events(decode: Decode, rank: Any) -> None:
    batch = decode(msgspec.msgpack.encode([1.5, [CLEARED], rank]))
    assert batch.dp_rank is None
    assert batch.events == (BlocksCleared(),)
    assert [reason.split(":")[0] for reason in batch.malformed] == ["the batch's rank"]


WRONG: list[Any] = [None, True, -1, 1 << 63, 1.5, "text", b"bytes", [], [[]], [None], {}, {"a": 1}]


@pytest.mark.parametrize("engine", READINGS)
def test_every_field_of_every_wrong_type_is_kept_or_counted(engine: str) -> None:
    full = FULL[engine]
    for kind, fields in ENGINE_FIELDS[engine].items():
        for name, _ in fields:
            for wrong in WRONG:
                values = {field: full[field] for field, _ in fields} | {name: wrong}
                for event in encodings(kind, values):
                    batch = READINGS[engine].decode(encode(event))
                    assert len(batch.events) + len(batch.malformed) == 1, (kind, name, wrong)


def some_payloads() -> Iterator[tuple[str, bytes]]:
    """Real payloads of both encodings, the longest aside: every offset of them is tried."""
    for capture in CAPTURES:
        payloads = sorted((payload_of(frame) for frame in frames(capture)), key=len)
        for payload in (payloads[0], payloads[len(payloads) // 2]):
            if len(payload) < 1500:
                yield engine_of(capture), payload


def test_a_payload_cut_anywhere_is_one_complaint() -> None:
    for engine, payload in some_payloads():
        decode = READINGS[engine].decode
        for end in range(len(payload)):
            assert complaint(decode(payload[:end])).startswith("the batch: ")
        assert complaint(decode(payload + b"\xc0")).startswith("the batch: ")


def test_a_payload_with_any_byte_changed_is_answered() -> None:
    for engine, payload in some_payloads():
        decode = READINGS[engine].decode
        for i in range(0, len(payload), 3):
            for byte in (0x00, 0x93, 0xC0, 0xC1, 0xC6, 0xD6, 0xDD, 0xDF, 0xFF):
                changed = bytearray(payload)
                changed[i] = byte
                assert isinstance(decode(bytes(changed)), EngineBatch)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xdd\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xc6\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91\xdb\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\xdd\x00\x0f\xff\xff" * 200_000,
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * 200_000 + b"\xc0\x00",
        b"\x93\xcb" + bytes(8) + b"\x91" + b"\x81\xa1x" * 200_000 + b"\xc0\x00",
        b"\xc1",
        b"",
    ],
)
def test_huge_claims_and_deep_nests_are_one_complaint(decode: Decode, payload: bytes) -> None:
    assert complaint(decode(payload)).startswith("the batch: ")


def test_a_nest_of_ordinary_depth_in_an_unknown_field_is_skipped(decode: Decode) -> None:
    nest: Any = None
    for _ in range(100):
        nest = [nest]
    assert only(decode(encode(stored(newest=nest)))).hashes == (11, 12)


def test_text_that_is_no_utf8_costs_its_event_only(decode: Decode) -> None:
    whole = encode(removed(medium="GPU!"), CLEARED)
    batch = decode(whole.replace(b"GPU!", b"GPU\xff"))
    assert batch.events == (BlocksCleared(),)
    assert len(batch.malformed) == 1


def test_a_payload_beyond_the_limit_is_not_read(decode: Decode) -> None:
    assert "bytes" in complaint(decode(bytes(PAYLOAD_BYTES_MAX + 1)))


def test_more_events_than_the_limit_are_not_read(decode: Decode) -> None:
    payload = b"\x92\xcb" + bytes(8) + b"\xdd" + (EVENTS_MAX + 1).to_bytes(4, "big")
    assert complaint(decode(payload + b"\xc0" * (EVENTS_MAX + 1)))


@pytest.mark.parametrize("engine", READINGS)
@settings(derandomize=True, deadline=None, max_examples=300)
@given(payload=st.binary(max_size=200))
def test_random_bytes_are_answered(engine: str, payload: bytes) -> None:
    assert isinstance(READINGS[engine].decode(payload), EngineBatch)


ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), U64)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@pytest.mark.parametrize("engine", READINGS)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(data=st.data())
def test_events_of_random_values_are_each_kept_or_counted(engine: str, data: Any) -> None:
    full = FULL[engine]
    kind = data.draw(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "New"]))
    fields = {name: data.draw(st.just(full[name]) | ANY_VALUE) for name in full}
    events = encodings(kind, fields)
    batch = READINGS[engine].decode(encode(*events))
    assert len(batch.events) + len(batch.malformed) + len(batch.unknown_kinds) == len(events)
