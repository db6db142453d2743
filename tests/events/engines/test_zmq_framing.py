"""Live and replayed messages, in both framings and in none."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.engines.table import READINGS
from events.engines.zmq_framing import (
    LiveMessage,
    Malformed,
    ReplayEnd,
    ReplayPart,
    parse_live,
    parse_replay,
    replay_request,
)

GOLDEN = Path(__file__).parents[2] / "golden"
REPLAYS = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("**/replay.jsonl"))
WITHOUT_TOPIC = {
    "sglang-old-wire/0.4.6.post5",
    "sglang-old-wire/0.4.8",
    "sglang-old-wire/0.5.7",
    "sglang-old-wire/0.5.19",
    "sglang-old-wire/0.5.20",
    "vllm-old-wire/0.9.2",
    "vllm-old-wire/0.10.2",
    "vllm-old-wire/0.14.0",
    "vllm-old-wire/0.17.0",
    "vllm-old-wire/0.20.0",
    "vllm-old-wire/0.24.0",
}

SEVEN = (7).to_bytes(8, "big")
END = (-1).to_bytes(8, "big", signed=True)


def test_a_live_message_has_topic_sequence_and_payload() -> None:
    assert parse_live([b"kv-events", SEVEN, b"x"]) == LiveMessage("kv-events", 7, b"x")
    assert parse_live([b"", bytes(8), b""]) == LiveMessage("", 0, b"")


def test_a_strange_topic_costs_nothing() -> None:
    message = parse_live([b"\xff\xfe", SEVEN, b"x"])
    assert isinstance(message, LiveMessage)
    assert (message.sequence, message.payload) == (7, b"x")


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"x"],
        [SEVEN, b"x"],
        [b"", b"t", SEVEN, b"x"],
        [b"t", b"", b"x"],
        [b"t", b"\x07", b"x"],
        [b"t", SEVEN + b"\x00", b"x"],
        [b"t", END, b"x"],
        [b"t", END, b""],
    ],
)
def test_other_live_messages_are_malformed_and_say_why(parts: list[bytes]) -> None:
    message = parse_live(parts)
    assert isinstance(message, Malformed)
    assert message.reason


def test_a_replay_is_asked_for_from_a_sequence_on() -> None:
    assert replay_request(0) == [b"", bytes(8)]
    assert replay_request(258) == [b"", b"\x00\x00\x00\x00\x00\x00\x01\x02"]


@pytest.mark.parametrize("sequence", [-1, 1 << 63, 1 << 64])
def test_a_replay_from_no_sequence_is_our_own_mistake(sequence: int) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 2\^63\)"):
        replay_request(sequence)


@pytest.mark.parametrize(
    "before", [[b""], [b"", b""], [b"", b"kv-events"], []], ids=["old", "new", "topic", "req"]
)
def test_replayed_messages_are_read_from_their_end(before: list[bytes]) -> None:
    assert parse_replay([*before, SEVEN, b"x"]) == ReplayPart(7, b"x")
    assert parse_replay([*before, SEVEN, b""]) == ReplayPart(7, b"")
    assert parse_replay([*before, END, b""]) == ReplayEnd()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"", b"x"],
        [b"", b"short", b"x"],
        [b"", SEVEN + SEVEN, b"x"],
        [b"", END, b"x"],
        [b"", (-2).to_bytes(8, "big", signed=True), b""],
        [b"", b"", b"", SEVEN, b"x"],
    ],
)
def test_other_replay_messages_are_malformed_and_say_why(parts: list[bytes]) -> None:
    message = parse_replay(parts)
    assert isinstance(message, Malformed)
    assert message.reason


@pytest.mark.parametrize("capture", REPLAYS)
def test_captured_replays_are_parts_in_order_and_an_end(capture: str) -> None:
    with (GOLDEN / capture / "replay.jsonl").open() as lines:
        messages = [
            [base64.b64decode(part) for part in json.loads(line)["parts_b64"]] for line in lines
        ]
    assert {len(parts) for parts in messages} == {3 if capture in WITHOUT_TOPIC else 4}
    *parsed, last = [parse_replay(parts) for parts in messages]
    assert last == ReplayEnd()
    sequences = []
    for part in parsed:
        assert isinstance(part, ReplayPart)
        sequences.append(part.sequence)
        batch = READINGS["sglang" if capture.startswith("sglang") else "vllm"].decode(part.payload)
        assert batch.events
        assert not batch.malformed
    assert sequences == sorted(set(sequences))


def test_there_are_captures_of_both_framings() -> None:
    assert set(REPLAYS) > WITHOUT_TOPIC


@settings(derandomize=True, deadline=None, max_examples=300)
@given(parts=st.lists(st.binary(max_size=9) | st.sampled_from([SEVEN, END, b""]), max_size=6))
def test_any_parts_are_answered(parts: list[bytes]) -> None:
    assert isinstance(parse_live(parts), LiveMessage | Malformed)
    assert isinstance(parse_replay(parts), ReplayPart | ReplayEnd | Malformed)
