"""Bytes of Dynamo's publishers, whole and broken, into events."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.engines.dynamo import (
    DynamoMessage,
    HashesRemoved,
    HashesStored,
    LeftOut,
    Origin,
    RankCleared,
    WorkerEvent,
    WorkerLoad,
    decode_dynamo,
)
from events.engines.wire import RANK_MAX
from indexer.hashing import block_hashes, hash_seed, pack_tokens
from indexer.identity import Tier

U64_MAX = (1 << 64) - 1
GOLDEN = Path(__file__).parents[2] / "golden"

# What ai-dynamo-runtime 1.6.1 published on NATS (event plane "nats", discovery "mem") for endpoint
# dyn.backend.generate. First a KvEventPublisher(worker_id=77, kv_block_size=16, dp_rank=0):
#   publish_batch([{stored, token_ids 0..63, block_hashes [-1, 2, 3, 4]},
#                  {removed, block_hashes [4]},
#                  {stored, token_ids 64..79, block_hashes [5], parent_hash 3}])
BATCH = bytes.fromhex(
    "85ac7075626c69736865725f6964cf001a59d63988c7efa873657175656e636500ac7075626c69736865645f6174cf"
    "000001a1fc88a258a5746f706963a96b762d6576656e7473a77061796c6f6164c502789384a9776f726b65725f6964"
    "4dac73746f726167655f74696572a6646576696365b07265736964656e63795f646f6d61696ea6776f726b6572a565"
    "76656e7483a86576656e745f696401a46461746181a673746f72656483ab706172656e745f68617368c0ae73746172"
    "745f706f736974696f6ec0a6626c6f636b739483aa626c6f636b5f68617368cfffffffffffffffffab746f6b656e73"
    "5f68617368cfd47a8f41c833328aad6d6d5f65787472615f696e666fc083aa626c6f636b5f6861736802ab746f6b65"
    "6e735f68617368cfd43939178abd00dbad6d6d5f65787472615f696e666fc083aa626c6f636b5f6861736803ab746f"
    "6b656e735f68617368cf4cc8f942aaf401a2ad6d6d5f65787472615f696e666fc083aa626c6f636b5f6861736804ab"
    "746f6b656e735f68617368cfcf2d99a33cc42682ad6d6d5f65787472615f696e666fc0a764705f72616e6b0084a977"
    "6f726b65725f69644dac73746f726167655f74696572a6646576696365b07265736964656e63795f646f6d61696ea6"
    "776f726b6572a56576656e7483a86576656e745f696402a46461746181a772656d6f76656481ac626c6f636b5f6861"
    "736865739104a764705f72616e6b0084a9776f726b65725f69644dac73746f726167655f74696572a6646576696365"
    "b07265736964656e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f696403a46461746181"
    "a673746f72656483ab706172656e745f6861736803ae73746172745f706f736974696f6ec0a6626c6f636b739183aa"
    "626c6f636b5f6861736805ab746f6b656e735f68617368cfdf0abbbd07c1601cad6d6d5f65787472615f696e666fc0"
    "a764705f72616e6b00"
)
# Then one with dp_rank=1: publish_stored(tokens 1..16, block_hashes [9], lora_name "ad",
# cache_salt "tenant").
OF_RANK_1 = bytes.fromhex(
    "85ac7075626c69736865725f6964cf00012b43625afbf6a873657175656e636500ac7075626c69736865645f6174cf"
    "000001a1fc88a258a5746f706963a96b762d6576656e7473a77061796c6f6164c4b79184a9776f726b65725f69644d"
    "ac73746f726167655f74696572a6646576696365b07265736964656e63795f646f6d61696ea6776f726b6572a56576"
    "656e7483a86576656e745f696401a46461746181a673746f72656483ab706172656e745f68617368c0ae7374617274"
    "5f706f736974696f6ec0a6626c6f636b739183aa626c6f636b5f6861736809ab746f6b656e735f68617368cfab01b2"
    "de84ca5f8ead6d6d5f65787472615f696e666fc0a764705f72616e6b01"
)
# And a WorkerMetricsPublisher: publish(0, active_decode_blocks=7, kv_used_blocks=9).
LOAD = bytes.fromhex(
    "85ac7075626c69736865725f6964cf001f41a55937af78a873657175656e636500ac7075626c69736865645f6174cf"
    "000001a1fc88a25ba5746f706963aa6b765f6d657472696373a77061796c6f6164c45a85a9776f726b65725f6964cf"
    "bdc1dd7139c9bf1aa764705f72616e6b00b46163746976655f6465636f64655f626c6f636b7307b56163746976655f"
    "70726566696c6c5f746f6b656e73c0ae6b765f757365645f626c6f636b7309"
)


def envelope(payload: Any, topic: str = "kv-events", **changed: Any) -> bytes:
    """Named MessagePack, as the event plane wraps it. payload: bytes, or what they encode."""
    if not isinstance(payload, bytes):
        payload = msgspec.msgpack.encode(payload)
    fields = {
        "publisher_id": 11,
        "sequence": 4,
        "published_at": 1_795_238_175_320,
        "topic": topic,
        "payload": payload,
    }
    return msgspec.msgpack.encode(fields | changed)


def router_event(data: Any, event_id: int = 5, **changed: Any) -> dict[str, Any]:
    """A RouterEvent, its optional fields left out."""
    return {"worker_id": 7, "event": {"event_id": event_id, "data": data}} | changed


def stored(
    names: list[int], blocks: list[int], parent: int | None = None, **changed: Any
) -> dict[str, Any]:
    told = [
        {"block_hash": name, "tokens_hash": block}
        for name, block in zip(names, blocks, strict=True)
    ]
    return {"stored": {"parent_hash": parent, "blocks": told} | changed}


def only(message: DynamoMessage) -> WorkerEvent:
    assert message.dropped == ()
    (event,) = message.events
    return event


def test_a_batch_of_a_real_publisher() -> None:
    message = decode_dynamo(BATCH)
    assert (message.origin.publisher_id, message.origin.sequence) == (7417126017615855, 0)
    blocks = block_hashes(pack_tokens(range(80)), 16).tolist()
    assert message.events == (
        WorkerEvent(77, 0, 1, HashesStored(Tier.DEVICE, None, [U64_MAX, 2, 3, 4], blocks[:4])),
        WorkerEvent(77, 0, 2, HashesRemoved(Tier.DEVICE, [4])),
        WorkerEvent(77, 0, 3, HashesStored(Tier.DEVICE, 3, [5], blocks[4:])),
    )
    assert (message.load, message.dropped, message.detail) == (None, (), "")


def test_a_real_publishers_lora_and_salt_give_our_block_hash() -> None:
    block = block_hashes(pack_tokens(range(1, 17)), 16, hash_seed("ad", "tenant")).tolist()
    assert block == [12322326724242726798]
    expected = WorkerEvent(77, 1, 1, HashesStored(Tier.DEVICE, None, [9], block))
    assert only(decode_dynamo(OF_RANK_1)) == expected


def test_load_of_a_real_publisher() -> None:
    message = decode_dynamo(LOAD)
    assert message.load == WorkerLoad(13673453422044102426, 0, 9, 7)
    assert (message.events, message.dropped) == ((), ())


@pytest.mark.parametrize("wrap", [lambda event: event, lambda event: [event]])
def test_one_event_alone_or_in_a_list_is_the_same(wrap: Any) -> None:
    event = router_event(stored([1, 2], [10, 20], 3), storage_tier="host_pinned")
    told = only(decode_dynamo(envelope(wrap(event))))
    assert told == WorkerEvent(7, 0, 5, HashesStored(Tier.HOST, 3, [1, 2], [10, 20]))


@pytest.mark.parametrize("blank", [b"", b" \r\n\t"])
def test_a_bare_json_event_of_older_releases(blank: bytes) -> None:
    event = router_event(stored([-1, 2], [10, U64_MAX], -3))
    event["event"]["dp_rank"] = 2
    message = decode_dynamo(blank + msgspec.json.encode(event))
    what = HashesStored(Tier.DEVICE, U64_MAX - 2, [U64_MAX, 2], [10, U64_MAX])
    assert only(message) == WorkerEvent(7, 2, 5, what)
    assert (message.origin.publisher_id, message.origin.sequence) == (None, None)
    (again,) = decode_dynamo(envelope(msgspec.json.encode([event]))).events
    assert again == only(message)


def test_signed_hashes_are_the_same_64_bits() -> None:
    event = router_event(stored([-(1 << 63), -1], [-5, 6], -2))
    what = only(decode_dynamo(envelope(event))).what
    assert what == HashesStored(Tier.DEVICE, U64_MAX - 1, [1 << 63, U64_MAX], [U64_MAX - 4, 6])
    removed = only(decode_dynamo(envelope(router_event({"removed": {"block_hashes": [-1]}}))))
    assert removed.what == HashesRemoved(Tier.DEVICE, [U64_MAX])


@pytest.mark.parametrize("data", ["cleared", {"cleared": None}])
def test_cleared_is_a_name_or_a_map(data: Any) -> None:
    assert only(decode_dynamo(envelope(router_event(data)))).what == RankCleared()
    json = msgspec.json.encode(router_event(data))
    assert only(decode_dynamo(json)).what == RankCleared()


@pytest.mark.parametrize(
    ("tier", "meaning"),
    [
        ("device", HashesRemoved(Tier.DEVICE, [1])),
        ("host_pinned", HashesRemoved(Tier.HOST, [1])),
        ("disk", HashesRemoved(Tier.DISK, [1])),
        ("external", LeftOut("shared")),
        ("tape", LeftOut("unknown_medium")),
    ],
)
def test_each_storage_tier(tier: str, meaning: Any) -> None:
    event = router_event({"removed": {"block_hashes": [1]}}, storage_tier=tier)
    assert only(decode_dynamo(envelope(event))).what == meaning


def test_what_a_cache_owner_holds_is_no_workers() -> None:
    for data in (stored([1], [2]), "cleared"):
        event = router_event(data, residency_domain="cache_owner")
        assert only(decode_dynamo(envelope(event))).what == LeftOut("shared")


def test_a_later_part_of_a_prompt_without_a_parent_does_not_begin_one() -> None:
    event = router_event(stored([1], [2], start_position=4))
    what = only(decode_dynamo(envelope(event))).what
    assert what == HashesStored(Tier.DEVICE, None, [1], [2], begins=False)


def test_unknown_fields_are_ignored_and_unknown_kinds_counted() -> None:
    newer = router_event(stored([1], [2], mood="good"), session_id="s", state_source={"a": 1})
    newer["event"]["colour"] = "red"
    message = decode_dynamo(envelope(newer, published_at_ns=5, extra=[1, 2]))
    assert only(message).what == HashesStored(Tier.DEVICE, None, [1], [2])
    for data in ({"moved": {"to": 1}}, "frozen"):
        event = only(decode_dynamo(envelope(router_event(data))))
        assert event == WorkerEvent(7, 0, 5, LeftOut("unknown_kind"))


@pytest.mark.parametrize(
    ("data", "removals_lost"),
    [
        ({"stored": {"blocks": [{"block_hash": 1}]}}, False),
        ({"stored": {"blocks": [{"block_hash": "x", "tokens_hash": 1}]}}, False),
        ({"removed": {"block_hashes": ["x"]}}, True),
        ({"removed": 1}, True),
        ({"stored": None}, False),
        ({"stored": {"blocks": []}, "removed": {"block_hashes": []}}, True),
        (None, True),
    ],
)
def test_an_unreadable_event_keeps_its_number_and_tells_what_it_may_cost(
    data: Any, removals_lost: bool
) -> None:
    good = router_event("cleared", 6)
    lost = LeftOut("malformed", stores_lost=True, removals_lost=removals_lost)
    for encode in (envelope, msgspec.json.encode):
        message = decode_dynamo(encode([router_event(data), good]))
        assert message.events == (
            WorkerEvent(7, 0, 5, lost),
            WorkerEvent(7, 0, 6, RankCleared()),
        )
        assert message.detail


def test_a_null_residency_domain_is_malformed_not_absent() -> None:
    event = only(decode_dynamo(envelope(router_event(stored([1], [2]), residency_domain=None))))
    assert event.what == LeftOut("malformed", stores_lost=True)


@pytest.mark.parametrize(
    "event",
    [
        {"event": {"event_id": 1, "data": "cleared"}},
        {"worker_id": -1, "event": {"event_id": 1, "data": "cleared"}},
        {"worker_id": 1, "event": {"event_id": 1, "data": "cleared", "dp_rank": 1 << 17}},
        {"worker_id": 1, "event": {"data": "cleared"}},
        {"worker_id": 1},
        [],
        3,
    ],
)
def test_an_event_of_nobody_is_dropped(event: Any) -> None:
    message = decode_dynamo(envelope([event, router_event("cleared")]))
    assert message.dropped == ("malformed",)
    assert len(message.events) == 1


def test_numbers_beyond_64_bits_are_nobodys() -> None:
    huge = 1 << 70
    json = b'{"worker_id": %d, "event": {"event_id": 1, "data": "cleared"}}' % huge
    assert decode_dynamo(json).dropped == ("malformed",)
    json = (
        b'{"worker_id": 1, "event": {"event_id": 1, "data": {"removed": {"block_hashes": [%d]}}}}'
    )
    assert only(decode_dynamo(json % huge)).what == LeftOut(
        "malformed", stores_lost=True, removals_lost=True
    )


def test_other_topics_are_counted_apart() -> None:
    assert decode_dynamo(envelope({"x": 1}, "prefill_events")).dropped == ("other_topic",)
    assert decode_dynamo(envelope([1], "kv_metrics")).dropped == ("malformed_load",)


def test_too_many_hashes_leave_the_numbers_only() -> None:
    events = [
        router_event(stored([1, 2], [3, 4]), 1),
        router_event(stored([5], [6]), 2),
        router_event({"removed": {"block_hashes": [1, 2]}}, 3),
        router_event("cleared", 4),
    ]
    message = decode_dynamo(envelope(events), hashes_max=3)
    first, second, third, fourth = (event.what for event in message.events)
    assert isinstance(first, HashesStored)
    assert isinstance(second, HashesStored)
    assert third == LeftOut("too_many_hashes", stores_lost=True, removals_lost=True)
    assert fourth == RankCleared()
    (cut,) = decode_dynamo(envelope(events[0]), hashes_max=1).events
    assert cut.what == LeftOut("too_many_hashes", stores_lost=True)


def test_a_message_over_the_limit_is_not_read() -> None:
    data = envelope(router_event("cleared"))
    assert decode_dynamo(data, bytes_max=len(data)).events
    over = decode_dynamo(data, bytes_max=len(data) - 1)
    assert (over.events, over.dropped) == ((), ("too_large",))


def test_no_truncation_raises_or_becomes_an_event() -> None:
    json = msgspec.json.encode(router_event(stored([1], [2])))
    for data in (BATCH, OF_RANK_1, LOAD, json):
        whole = decode_dynamo(data)
        assert whole.events or whole.load
        for end in range(len(data)):
            message = decode_dynamo(data[:end])
            assert (message.events, message.load) == ((), None)
            assert message.dropped


# Of ai-dynamo 1.6.1's mocker: idle ranks and busy ones, as it published them.
CAPTURED = [
    msgspec.json.decode(line)
    for line in (GOLDEN / "dynamo-1.6.1" / "load.jsonl").read_bytes().splitlines()
]


@pytest.mark.parametrize("number", range(len(CAPTURED)))
def test_captured_load_is_read_as_it_says(number: int) -> None:
    captured = CAPTURED[number]
    message = decode_dynamo(bytes.fromhex(captured["data"]))
    said = captured["decoded"]["payload"]
    assert (message.events, message.dropped, message.detail) == ((), (), "")
    assert message.load is not None
    assert (message.load.worker_id, message.load.dp_rank) == (
        int(said["worker_id"]),
        said["dp_rank"],
    )
    if captured["decoded"]["topic"] == "kv_metrics":
        assert message.load.used_blocks == said["kv_used_blocks"]
        assert (message.load.running, message.load.from_pass) == (None, False)
        return
    running, waiting = said["scheduled_requests"], said["queued_requests"]
    assert message.load.from_pass
    assert message.load.running == sum(running[f"num_{half}_requests"] for half in HALVES)
    assert message.load.waiting == sum(waiting[f"num_{half}_requests"] for half in HALVES)


HALVES = ("prefill", "decode")


def test_the_capture_has_idle_ranks_and_busy_ones_and_queues() -> None:
    loads = [decode_dynamo(bytes.fromhex(one["data"])).load for one in CAPTURED]
    passes = [load for load in loads if load is not None and load.from_pass]
    assert len(passes) < len(loads)
    idle = {(load.worker_id, load.dp_rank) for load in passes if not load.running}
    assert len(idle) == 4
    assert any(load.waiting for load in passes)


def test_no_truncated_pass_raises_or_proves_a_worker() -> None:
    for captured in CAPTURED:
        data = bytes.fromhex(captured["data"])
        for end in range(len(data)):
            message = decode_dynamo(data[:end])
            assert (message.load, len(message.dropped)) == (None, 1)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), U64_MAX) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
ID = st.integers(0, U64_MAX) | st.integers(0, U64_MAX).map(str) | st.text("0123456789", min_size=19)
COUNTS = st.fixed_dictionaries(
    {}, optional={f"num_{half}_requests": st.integers(0, 1 << 31) | JUNK for half in HALVES}
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "worker_id": ID | JUNK,
            "dp_rank": st.integers(0, 2000) | JUNK,
            "version": st.just(1) | JUNK,
            "scheduled_requests": COUNTS | JUNK,
            "queued_requests": COUNTS | JUNK,
            "later": JUNK,
        },
    ),
    st.booleans(),
)
def test_an_odd_pass_proves_its_worker_as_far_as_it_is_readable(
    said: dict[str, Any], as_json: bool
) -> None:
    if as_json:
        payload = msgspec.json.encode(said)
        said = msgspec.json.decode(payload)  # nan is null there
    else:
        payload = msgspec.msgpack.encode(said)
    message = decode_dynamo(envelope(payload, "forward-pass-metrics"))
    worker, rank = said.get("worker_id"), said.get("dp_rank", 0)
    is_worker = (isinstance(worker, str) and re.fullmatch("[0-9]{1,20}", worker)) or (
        isinstance(worker, int) and not isinstance(worker, bool) and worker >= 0
    )
    is_rank = isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= RANK_MAX
    is_version = type(said.get("version", 1)) is int
    if message.load is None:
        readable = is_worker and int(worker or 0) <= U64_MAX and is_rank and is_version
        assert not readable
        assert message.dropped == ("malformed_load",)
        return
    assert (message.load.worker_id, message.load.dp_rank) == (int(worker or 0), rank)
    numbers = (message.load.running, message.load.waiting)
    assert (None in numbers) == bool(message.dropped)
    for number in numbers:
        assert number is None or 0 <= number < 1 << 31  # as heartbeats may have it


def test_no_truncated_payload_raises() -> None:
    payload = msgspec.msgpack.encode([router_event(stored([1], [2]))])
    for end in range(len(payload)):
        message = decode_dynamo(envelope(payload[:end]))
        assert (message.events, message.dropped) == ((), ("malformed",))


@pytest.mark.parametrize("brackets", [b"\x91", b"[", b'{"a":'])
def test_nesting_without_end_is_malformed(brackets: bytes) -> None:
    for data in (brackets * 100_000, envelope(brackets * 100_000)):
        assert decode_dynamo(data).dropped == ("malformed",)


@given(st.binary(max_size=300))
def test_random_bytes_never_raise(data: bytes) -> None:
    for message in (decode_dynamo(data), decode_dynamo(envelope(data))):
        assert isinstance(message, DynamoMessage)
    for topic in ("kv_metrics", "forward-pass-metrics"):
        assert isinstance(decode_dynamo(envelope(data, topic)), DynamoMessage)


@given(
    st.sampled_from([BATCH, OF_RANK_1, LOAD, *(bytes.fromhex(one["data"]) for one in CAPTURED)]),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_flipped_bytes_never_raise_and_numbers_stay_in_range(
    data: bytes, flips: list[tuple[int, int]]
) -> None:
    broken = bytearray(data)
    for at, value in flips:
        broken[at % len(broken)] = value
    message = decode_dynamo(bytes(broken))
    assert isinstance(message.origin, Origin)
    for event in message.events:
        assert 0 <= event.worker_id <= U64_MAX
        assert 0 <= event.event_id <= U64_MAX
        assert 0 <= event.dp_rank <= 1 << 16
        if isinstance(event.what, HashesStored | HashesRemoved):
            assert all(0 <= name <= U64_MAX for name in event.what.names)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), U64_MAX) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["worker_id", "event", "event_id", "data", "stored", "removed", "blocks", "dp_rank"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON_LIKE)
def test_events_of_any_shape_never_raise(value: Any) -> None:
    for data in (
        msgspec.json.encode(value),
        envelope(value),
        envelope(router_event(value)),
        msgspec.json.encode(router_event(value)),
    ):
        assert isinstance(decode_dynamo(data), DynamoMessage)
