"""The contract over NATS: what goes in comes out, and nothing that comes can break us."""

from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.plane import facts as module
from events.plane import subjects
from events.plane.facts import (
    FACTS_BYTES_MAX,
    FACTS_IN_MESSAGE_MAX,
    FACTS_MAX,
    HEARTBEAT_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    REQUEST_BYTES_MAX,
    RING_MESSAGES_MAX,
    VERSION,
    Beat,
    Cleared,
    Control,
    Epoch,
    FactsMessage,
    Heartbeat,
    Hello,
    Removed,
    SnapshotChunk,
    SnapshotRequest,
    Stored,
    Unreadable,
    decode,
    decode_stream,
    encode,
    encode_heartbeat,
    pack_hashes,
    unpack_hashes,
)
from events.relay.ledger import Ledger
from events.relay.outbox import Outbox
from events.relay.snapshot import SnapshotServer
from indexer.identity import WorkerKey

EPOCH = Epoch(1_700_000_000_000_000_000, 42)
HASHES = pack_hashes([0, 1, (1 << 64) - 1])
FACTS = FactsMessage(
    VERSION,
    EPOCH,
    7,
    [Stored(HASHES, "device", 9), Stored(HASHES, "host"), Removed(HASHES, "disk"), Cleared()],
    12.5,
)
BEAT = Beat(VERSION, EPOCH, 7, 3, (1 << 64) - 1, True, 12.5)
HEARTBEAT = Heartbeat(
    epoch=EPOCH,
    address="http://engine:8000",
    engine="vllm",
    engine_version="0.32.0",
    model="tiny",
    model_aliases=("small",),
    lora_names=("ad",),
    max_model_len=4096,
    block_size=16,
    engine_block_size=64,
    labels={"zone": "a"},
    running=3,
    used_blocks=7.5,
    total_blocks=64,
    sampled_at_s=12.0,
    sent_at_s=12.5,
    warnings=("one",),
)
CHUNK = SnapshotChunk(VERSION, EPOCH, 7, 0, 2, [Stored(HASHES, "device")], [b"x"], False)

laws = settings(derandomize=True, deadline=None, max_examples=300, database=None)


def raw(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def facts_with(*facts: Any, **changes: Any) -> bytes:
    message = {"kind": "facts", "v": 1, "epoch": [1, 2], "seq": 7, "time_s": 1.0}
    return msgspec.msgpack.encode(message | {"facts": list(facts)} | changes)


def changed(message: Any, changes: dict[str, Any]) -> bytes:
    """A message with other fields than the encoder would give it."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)) | changes)


def refused(kind: Any, payload: bytes) -> str:
    """Why these bytes are no such message."""
    found = decode(kind, payload)
    assert isinstance(found, Unreadable)
    return found.reason


def dropped_by(payload: bytes) -> list[str]:
    message, dropped = decode_stream(payload)
    assert message is None
    return [one.reason for one in dropped]


# --- round trips ---


@pytest.mark.parametrize("message", [FACTS, BEAT])
def test_a_stream_message_comes_out_as_it_went_in(message: FactsMessage | Beat) -> None:
    assert decode_stream(encode(message)) == (message, ())


def test_a_heartbeat_and_a_chunk_come_out_as_they_went_in() -> None:
    assert decode(Heartbeat, encode(HEARTBEAT)) == HEARTBEAT
    assert decode(SnapshotChunk, encode(CHUNK)) == CHUNK


@pytest.mark.parametrize(
    "message",
    [
        Hello(VERSION, "replica"),
        Control(VERSION, "1", "drain", "w", 3.0),
        SnapshotRequest(chunk=3, epoch=EPOCH, as_of=9),
        SnapshotRequest(from_seq=4),
    ],
)
def test_the_small_messages_come_out_as_they_went_in(message: Any) -> None:
    assert msgspec.msgpack.decode(encode(message), type=type(message)) == message


def test_messages_are_maps_with_a_version() -> None:
    for message in (FACTS, BEAT, HEARTBEAT, CHUNK, SnapshotRequest(), Hello(1, "r")):
        fields = msgspec.msgpack.decode(encode(message))
        assert isinstance(fields, dict)
        assert fields.get("v", VERSION) == VERSION


@laws
@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_hashes_travel_as_little_endian_u64(hashes: list[int]) -> None:
    packed = pack_hashes(hashes)
    assert packed == b"".join(one.to_bytes(8, "little") for one in hashes)
    assert unpack_hashes(packed).tolist() == hashes
    assert pack_hashes(np.array(hashes, np.uint64)) == packed


@pytest.mark.parametrize("hash_", [-1, 1 << 64])
def test_a_hash_outside_u64_is_our_own_mistake(hash_: int) -> None:
    with pytest.raises(OverflowError):
        pack_hashes([hash_])


def test_epochs_order_by_start_then_nonce() -> None:
    assert Epoch(1, 9) < Epoch(2, 0) < Epoch(2, 1)


# --- newer relays ---


def test_unknown_fields_are_ignored_everywhere() -> None:
    for message in (FACTS, BEAT):
        fields = msgspec.msgpack.decode(encode(message)) | {"new": [1, {"x": 2}]}
        if "facts" in fields:
            fields["facts"][0]["new"] = "field"
        assert decode_stream(msgspec.msgpack.encode(fields)) == (message, ())
    assert decode(Heartbeat, changed(HEARTBEAT, {"new": 1})) == HEARTBEAT
    assert decode(SnapshotChunk, changed(CHUNK, {"new": 1})) == CHUNK


def test_an_unknown_kind_of_message_is_counted() -> None:
    assert dropped_by(raw(kind="weather", v=2)) == ["unknown_kind"]
    assert dropped_by(raw(kind="weather" * 1000)) == ["unknown_kind"]


def test_an_unknown_kind_of_fact_is_left_out_and_the_others_stay_in_order() -> None:
    known = {"kind": "stored", "hashes": HASHES, "tier": "device"}
    payload = facts_with(
        {"kind": "moved", "to": "x"}, known, {"kind": "frozen"}, {"kind": "cleared"}
    )
    message, dropped = decode_stream(payload)
    assert isinstance(message, FactsMessage)
    assert message.facts == [Stored(HASHES, "device"), Cleared()]
    assert (message.seq, message.epoch, message.time_s) == (7, Epoch(1, 2), 1.0)
    assert [(one.reason, one.detail) for one in dropped] == [
        ("unknown_kind", "moved"),
        ("unknown_kind", "frozen"),
    ]


def test_an_unknown_kind_of_fact_beside_a_broken_one_saves_nothing() -> None:
    assert dropped_by(facts_with({"kind": "moved"}, {"kind": "stored", "tier": 3})) == ["malformed"]
    assert dropped_by(facts_with({"kind": "moved"}, 5)) == ["malformed"]
    assert dropped_by(facts_with({"kind": "moved"}, {"kind": "cleared", "tier": "tape"})) == [
        "malformed"
    ]


@pytest.mark.parametrize("missing", ["epoch", "seq"])
def test_an_unknown_kind_of_fact_excuses_no_missing_number(missing: str) -> None:
    fields = msgspec.msgpack.decode(facts_with({"kind": "moved"}))
    del fields[missing]
    assert dropped_by(msgspec.msgpack.encode(fields)) == ["malformed"]


# --- hostile bytes ---


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xff" * 100,
        raw(),
        raw(kind=7),
        raw(kind="facts"),
        raw(kind="beat"),
        facts_with(seq=-1),
        facts_with(seq="7"),
        facts_with(seq=1 << 63, epoch=[1]),
        facts_with(epoch=None),
        facts_with(epoch=[1, 2, 3]),
        facts_with(time_s=float("nan")),
        facts_with(time_s=float("inf")),
        facts_with({"kind": "stored", "hashes": b"1234567", "tier": "device"}),
        facts_with({"kind": "removed", "hashes": b"123456789", "tier": "device"}),
        facts_with({"kind": "stored", "hashes": HASHES, "tier": "tape"}),
        facts_with({"kind": "stored", "hashes": HASHES, "tier": None}),
        facts_with({"kind": "stored", "hashes": [1, 2], "tier": "device"}),
        facts_with(seq=(1 << 62) + 1),
        facts_with({"kind": "cleared", "tier": "T" * 10_000}),
        facts_with({"kind": "stored"}),
        facts_with(7),
        raw(kind="beat", v=1, epoch=[1, 2], seq=-1, blocks=0, digest=0, complete=True, time_s=1.0),
        raw(kind="beat", v=1, epoch=[1, 2], seq=1, blocks=-1, digest=0, complete=True, time_s=1.0),
        raw(kind="beat", v=1, epoch=[1, 2], seq=1, blocks=0, digest=0, complete=1, time_s=1.0),
        b"\x82\xa4kind\xa5facts\xa5facts\xdd\xff\xff\xff\xff",
        b"\x82\xa4kind\xa5facts\xa5facts" + b"\x91" * 100_000,
        b"\x81\xa4kind\xa2\xff\xfe",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_what_is_no_stream_message_is_dropped_with_a_reason(payload: bytes) -> None:
    assert dropped_by(payload) == ["malformed"]


# --- bounds ---


def test_a_stream_message_has_a_size_that_a_relay_never_comes_near() -> None:
    kind = {"kind": "stored", "tier": "disk"}
    hashes = bytes((FACTS_BYTES_MAX - 200) // 8 * 8)
    message, dropped = decode_stream(facts_with(kind | {"hashes": hashes}))
    assert message is not None
    assert dropped == ()
    payload = facts_with(kind | {"hashes": bytes(FACTS_BYTES_MAX)})
    assert len(payload) > FACTS_BYTES_MAX
    assert dropped_by(payload) == ["too_large"]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_message_has_a_number_of_facts(extra: int) -> None:
    cleared = [{"kind": "cleared"}] * (FACTS_IN_MESSAGE_MAX - 1 + extra)
    for last in ({"kind": "cleared"}, {"kind": "moved"}):
        message, dropped = decode_stream(facts_with(*cleared, last))
        assert (message is None) == bool(extra)
        assert [one.reason for one in dropped][-1:] == (
            ["malformed"] if extra else [] if last in cleared else ["unknown_kind"]
        )


@pytest.mark.parametrize(
    ("longest", "too_long"),
    [
        ({"address": "a" * 4096}, {"address": "a" * 4097}),
        ({"model": "m" * 1024}, {"model": "m" * 1025}),
        ({"engine": "e" * 1024}, {"engine": "e" * 1025}),
        ({"role": "r" * 1024}, {"role": "r" * 1025}),
        ({"model_aliases": ["a"] * 256}, {"model_aliases": ["a"] * 257}),
        ({"lora_names": ["a"] * 4096}, {"lora_names": ["a"] * 4097}),
        ({"lora_names": ["a" * 1024]}, {"lora_names": ["a" * 1025]}),
        (
            {"labels": {str(i): "" for i in range(256)}},
            {"labels": {str(i): "" for i in range(257)}},
        ),
        ({"labels": {"k" * 1024: "v" * 1024}}, {"labels": {"k": "v" * 1025}}),
        ({"labels": {}}, {"labels": {"k" * 1025: "v"}}),
        (
            {"own_numbers": {"n" * 1024: -1e18} | dict.fromkeys("abcdefg", 1e18)},
            {"own_numbers": dict.fromkeys("abcdefghi", 1.0)},
        ),
        ({"warnings": ["w" * 512] * 64}, {"warnings": ["w"] * 65}),
        ({"warnings": ["w" * 4096]}, {"warnings": ["w" * 4097]}),
    ],
)
def test_a_heartbeat_has_bounds_to_each_text_and_list(
    longest: dict[str, Any], too_long: dict[str, Any]
) -> None:
    assert isinstance(decode(Heartbeat, changed(HEARTBEAT, longest)), Heartbeat)
    assert refused(Heartbeat, changed(HEARTBEAT, too_long)) == "malformed"


def test_a_heartbeat_has_a_size() -> None:
    fits = changed(HEARTBEAT, {"lora_names": ["a" * 1000] * 125})
    assert HEARTBEAT_BYTES_MAX - 6000 < len(fits) <= HEARTBEAT_BYTES_MAX
    assert isinstance(decode(Heartbeat, fits), Heartbeat)
    more = changed(HEARTBEAT, {"lora_names": ["a" * 1000] * 135})
    assert refused(Heartbeat, more) == "too_large"


def test_an_answer_has_a_size_and_numbers_of_facts_and_messages() -> None:
    fact = Stored(HASHES, "device")
    for facts, messages in (([fact] * FACTS_MAX, []), ([], [b""] * RING_MESSAGES_MAX)):
        fits = SnapshotChunk(VERSION, EPOCH, 7, 0, 2, facts, messages)
        assert decode(SnapshotChunk, encode(fits)) == fits
        more = SnapshotChunk(VERSION, EPOCH, 7, 0, 2, facts + facts[:1], messages + messages[:1])
        assert refused(SnapshotChunk, encode(more)) == "malformed"
    large = SnapshotChunk(VERSION, EPOCH, 7, 0, 2, [], [bytes(MESSAGE_BYTES_MAX)])
    assert refused(SnapshotChunk, encode(large)) == "too_large"


def test_a_command_has_bounds_too() -> None:
    fits = Control(VERSION, "i" * 1024, "drain", "w" * 1024)
    assert decode(Control, encode(fits)) == fits
    for more in (
        Control(VERSION, "i" * 1025, "drain", "w"),
        Control(VERSION, "i", "drain", "w" * 1025),
        Control(VERSION, "i", "d" * 1025, "w"),
    ):
        assert refused(Control, encode(more)) == "malformed"
    found = decode(Control, bytes(MESSAGE_BYTES_MAX + 1))
    assert found == Unreadable("too_large", f"{MESSAGE_BYTES_MAX + 1} bytes")
    assert refused(Control, b"\xc1") == "malformed"


def test_a_heartbeat_that_routers_could_not_read_is_not_encoded() -> None:
    assert decode(Heartbeat, encode_heartbeat(HEARTBEAT)) == HEARTBEAT
    for changes in ({"running": 1 << 31}, {"labels": {"x": "y" * 2000}}, {"running": 1 << 70}):
        with pytest.raises((ValueError, OverflowError)):
            encode_heartbeat(msgspec.structs.replace(HEARTBEAT, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": -16},
        {"block_size": 1 << 40},
        {"running": -1},
        {"total_blocks": -1},
        {"used_blocks": float("nan")},
        {"used_blocks": -1.0},
        {"used_blocks": float("inf")},
        {"sent_at_s": float("nan")},
        {"sampled_at_s": 1e300},
        {"epoch": [1]},
        {"address": None},
        {"labels": {"a": 1}},
        {"own_numbers": {"a": float("nan")}},
        {"own_numbers": {"a": float("-inf")}},
        {"own_numbers": {"a\n": 1.0}},
        {"model_aliases": "tiny"},
    ],
)
def test_an_implausible_heartbeat_is_dropped(changes: dict[str, Any]) -> None:
    assert refused(Heartbeat, changed(HEARTBEAT, changes)) == "malformed"


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": [{"kind": "stored", "hashes": HASHES, "tier": "tape"}]},
        {"facts": [{"kind": "stored", "hashes": HASHES[:-1], "tier": "host"}]},
        {"facts": [{"kind": "removed", "hashes": HASHES, "tier": "host"}]},
        {"as_of": -1},
        {"chunk": -1},
        {"chunks": -1},
        {"messages": [1]},
        {"epoch": None},
    ],
)
def test_an_implausible_chunk_is_dropped(changes: dict[str, Any]) -> None:
    assert refused(SnapshotChunk, changed(CHUNK, changes)) == "malformed"


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk": -1},
        {"chunk": -5},
        {"chunk": 1 << 31},
        {"chunk": 1.5},
        {"as_of": -1},
        {"as_of": (1 << 62) + 1},
        {"from_seq": -1},
        {"from_seq": (1 << 62) + 1},
        {"epoch": [1]},
        {"epoch": "now"},
        {"v": "one"},
        {"padding": "x" * REQUEST_BYTES_MAX},
    ],
)
def test_an_implausible_snapshot_request_is_dropped(changes: dict[str, Any]) -> None:
    assert refused(SnapshotRequest, changed(SnapshotRequest(), changes)) in (
        "malformed",
        "too_large",
    )


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
REQUEST_FIELDS = ["v", "chunk", "epoch", "as_of", "from_seq", "more"]


@laws
@given(st.dictionaries(st.sampled_from(REQUEST_FIELDS), anything))
def test_any_snapshot_request_is_answered_or_dropped(fields: dict[str, Any]) -> None:
    outbox = Outbox(EPOCH)
    server = SnapshotServer(Ledger(4), outbox)
    request = decode(SnapshotRequest, msgspec.msgpack.encode(fields))
    if not isinstance(request, Unreadable):
        encode(server.answer(request, True, 1.0))


@pytest.mark.parametrize("message", [FACTS, BEAT, HEARTBEAT, CHUNK])
def test_a_message_cut_anywhere_is_dropped(message: Any) -> None:
    whole = encode(message)
    for length in range(len(whole)):
        cut = whole[:length]
        assert dropped_by(cut) == ["malformed"]
        assert refused(Heartbeat, cut) == refused(SnapshotChunk, cut) == "malformed"


@pytest.mark.parametrize("message", [FACTS, BEAT, HEARTBEAT, CHUNK])
def test_a_message_with_any_byte_changed_never_raises(message: Any) -> None:
    whole = encode(message)
    for at in range(len(whole)):
        for value in (0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xCF, 0xD9, 0xDD, 0xFF):
            decode_all(whole[:at] + bytes([value]) + whole[at + 1 :])


@laws
@given(st.binary(max_size=200))
def test_random_bytes_never_raise(payload: bytes) -> None:
    decode_all(payload)


FIELDS = ["kind", "v", "epoch", "seq", "facts", "time_s", "blocks", "digest", "complete"]


@laws
@given(
    base=st.sampled_from([FACTS, BEAT, HEARTBEAT, CHUNK]),
    changes=st.dictionaries(st.sampled_from([*FIELDS, "as_of", "messages", "running"]), anything),
)
def test_fields_of_any_type_never_raise(base: Any, changes: dict[str, Any]) -> None:
    decode_all(changed(base, changes))


def decode_all(payload: bytes) -> None:
    """All decoders; what gets through can be applied without a further look."""
    message, dropped = decode_stream(payload)
    assert message is not None or dropped
    chunk = decode(SnapshotChunk, payload)
    facts = message.facts if isinstance(message, FactsMessage) else []
    stored = [] if isinstance(chunk, Unreadable) else chunk.facts
    for fact in (*facts, *stored):
        if not isinstance(fact, Cleared):
            unpack_hashes(fact.hashes)
    decode(Heartbeat, payload)


# --- subjects ---


@laws
@given(
    worker_id=st.text(min_size=1, max_size=256).filter(str.isprintable),
    rank=st.integers(0, 99_999),
)
def test_a_subject_names_its_worker(worker_id: str, rank: int) -> None:
    worker = WorkerKey(worker_id, rank)
    for subject in (
        subjects.facts("fleet", worker),
        subjects.load("fleet", worker),
        subjects.snapshot("fleet", worker),
    ):
        assert subjects.worker_of(subject) == worker
        assert set(subject) <= set(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-%."
        )
        assert subject.count(".") == 5


def test_subjects_are_those_of_the_contract() -> None:
    worker = WorkerKey("pod/vllm.1 ä", 3)
    assert subjects.facts("f", worker) == "kvroute.v1.f.facts.pod%2Fvllm%2E1%20%C3%A4.3"
    assert subjects.load("f", worker) == "kvroute.v1.f.load.pod%2Fvllm%2E1%20%C3%A4.3"
    assert subjects.snapshot("f", worker) == "kvroute.v1.f.snapshot.pod%2Fvllm%2E1%20%C3%A4.3"
    assert subjects.all_of("f", "facts") == "kvroute.v1.f.facts.*.*"
    assert subjects.hello("f") == "kvroute.v1.f.hello"
    assert subjects.control("f") == "kvroute.v1.f.control"


@pytest.mark.parametrize(
    "spelling", ["%41", "%2e", "%2E%2e", "a%", "a%2", "%zz", "a+b ", "ä", "%FF", "%C3", "a~b"]
)
def test_an_id_has_one_spelling(spelling: str) -> None:
    assert subjects.worker_of(f"kvroute.v1.f.facts.{spelling}.0") is None


@pytest.mark.parametrize(
    "tail",
    [
        "",
        "w",
        "w.",
        ".0",
        "w.-1",
        "w.01",
        "w.+1",
        "w.1.2",
        "w.x",
        "w.1e3",
        "w.\u00b2",
        "w.\u0661",
        "w.1 ",
    ]
    + ["w." + "9" * digits for digits in (6, 40, 5000)],
)
def test_a_bad_subject_names_nobody(tail: str) -> None:
    assert subjects.worker_of(f"kvroute.v1.f.facts.{tail}") is None


def test_a_worker_id_is_as_long_as_a_relay_may_be_told_at_most() -> None:
    for letter in "w\u00e4":
        told = subjects.escape(letter * 257)
        assert subjects.worker_of(f"kvroute.v1.f.facts.{told}.0") is None
        told = subjects.escape(letter * 256)
        assert subjects.worker_of(f"kvroute.v1.f.facts.{told}.0") == WorkerKey(letter * 256, 0)


def test_facts_of_unknown_kinds_cost_no_exception_each(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [{"kind": "frozen", "n": i} for i in range(FACTS_IN_MESSAGE_MAX - 1)]
    facts.append({"kind": "cleared"})
    payload = facts_with(*facts, v=9)
    decoder = mock.Mock(wraps=module._fact_decoder)
    monkeypatch.setattr(module, "_fact_decoder", decoder)
    message, dropped = decode_stream(payload)
    assert isinstance(message, FactsMessage)
    assert message.facts == [Cleared()]
    assert [one.reason for one in dropped] == ["unknown_kind"] * (len(facts) - 1)
    assert decoder.decode.call_count == 1
