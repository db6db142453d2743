"""Requests are read as protobuf reads them."""

import random
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kvroute.v1 import BlockHashes, RouteBatch, RouteRequest, router_pb2
from router.request.wire.batches import Batch
from router.request.wire.received import (
    ESTIMATED_TOKENS,
    TOKEN_BYTES,
    ReceivedRequest,
    TooMuch,
    read_request,
    request_of,
    text_form,
)

FORMS = {
    "text": 21,
    "chat_completion_body": 22,
    "completion_body": 23,
    "messages_body": 24,
    "responses_body": 35,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_text_is_read_beside_what_is_wanted_of_it(name: str) -> None:
    content = "héllo" if name == "text" else b"\xff\x00 any bytes"
    message = RouteRequest(model="m", return_tokens=True, require_tokens=True, **{name: content})
    for read in (read_request(message.SerializeToString(), 10, 100, 10), in_process(message)):
        assert (read.model, read.return_tokens, read.require_tokens) == ("m", True, True)
        assert read.form == FORMS[name] == text_form(read)
        assert read.data == (content.encode() if isinstance(content, str) else content)
    assert text_form(message.SerializeToString()) == FORMS[name]


def test_a_long_text_is_not_counted_beside_the_prompt() -> None:
    content = RouteRequest(chat_completion_body=bytes(1 << 20)).SerializeToString()
    assert len(read_request(content, 1, 0, 0).data) == 1 << 20


def test_the_last_prompt_counts_as_in_any_oneof() -> None:
    tokens = RouteRequest(token_bytes=bytes(8)).SerializeToString()
    text = RouteRequest(text="later").SerializeToString()
    hashes = RouteRequest(block_hashes=BlockHashes(hashes=[1])).SerializeToString()
    length = RouteRequest(estimated_tokens=300).SerializeToString()
    assert read_prompt(tokens + text) == (FORMS["text"], b"later", 0, 0)
    assert read_prompt(text + hashes + tokens) == (TOKEN_BYTES, bytes(8), 0, 0)
    assert read_prompt(tokens + hashes + length) == (ESTIMATED_TOKENS, b"", 0, 300)
    assert read_prompt(length + tokens) == (TOKEN_BYTES, bytes(8), 0, 0)
    assert text_form(text + length) == 0 != text_form(length + text)


def test_a_replaced_prompt_is_read_like_the_one_that_counts() -> None:
    token = b"\x80" * 10 + b"\x00"  # protobuf takes 10 bytes for a number
    broken = b"\x1a" + bytes([len(token) + 2]) + b"\x0a" + bytes([len(token)]) + token
    body = RouteRequest(chat_completion_body=b"{}").SerializeToString()
    length = RouteRequest(estimated_tokens=7).SerializeToString()
    with pytest.raises(DecodeError):
        RouteRequest.FromString(broken + length)
    for later in (body, length):
        for message in (broken, broken + later, later + broken + later):
            with pytest.raises(ValueError, match="parsing"):
                read_prompt(message)


def test_a_length_of_another_type_is_no_prompt() -> None:
    """Such a field is unknown, as for protobuf."""
    tokens = RouteRequest(token_bytes=bytes(8)).SerializeToString()
    odd = b"\xfa\x01\x01x"  # field 31 as bytes
    assert RouteRequest.FromString(tokens + odd).token_bytes == bytes(8)
    assert read_prompt(tokens + odd) == (TOKEN_BYTES, bytes(8), 0, 0)


def test_lengths_in_a_row_are_counted_as_fields() -> None:
    many = RouteRequest(estimated_tokens=7).SerializeToString() * 11
    with pytest.raises(TooMuch, match="fields"):
        read_request(many, 10, 100, 100)
    assert read_request(many, 11, 0, 0).prompt_tokens == 7


def test_a_request_in_two_fields_is_whole_in_each() -> None:
    """A field that begins in the first and ends in the second is none."""
    request = RouteRequest(model="model").SerializeToString()

    def batch(*pieces: bytes) -> bytes:
        item = b"".join(b"\x12" + bytes([len(piece)]) + piece for piece in pieces)
        return b"\x0a" + bytes([len(item)]) + item

    whole = Batch(batch(request, request))
    assert (len(whole), whole.next()) == (1, True)
    assert RouteRequest.FromString(whole.request or b"").model == "model"
    for at in range(1, len(request)):
        torn = batch(request[:at], request[at:])
        with pytest.raises(DecodeError):
            RouteBatch.FromString(torn)
        with pytest.raises(ValueError, match="parsing"):
            Batch(torn)


NAMES = ("request_id", "model", "lora_name", "cache_salt", "tenant", "session_id", "policy")
LISTS = ("allowed_worker_ids", "excluded_worker_ids")
MAPS = ("required_labels", "excluded_labels")
OPTIONAL = ("expected_output_tokens", "ttft_slo_ms", "tpot_slo_ms", "queue_timeout_ms")
FLAGS = ("omit_receipt", "return_tokens", "require_tokens", "queue_progress", "observed")
PLAIN = ("priority", "phase", "waited_ms", "charged_tokens", *FLAGS)
WORDS = ("", "m", "ünïcödé", "w" * 200)
WHOLE = (0, 1, 127, 128, (1 << 31) - 1)


def a_request(rng: random.Random) -> router_pb2.RouteRequest:
    message = router_pb2.RouteRequest(
        **rng.choice(
            [
                {"token_bytes": bytes(4 * rng.randint(0, 3))},
                {"estimated_tokens": rng.choice(WHOLE)},
                {"block_hashes": BlockHashes(hashes=[1, 2], block_size=16, prompt_tokens=33)},
                {"chat_completion_body": b"{}"},
            ]
        )
    )
    for name in (*NAMES, "traceparent"):
        if rng.random() < 0.4:
            setattr(message, name, rng.choice(WORDS))
    for name in (*OPTIONAL, *PLAIN):
        if rng.random() < 0.4:
            value = rng.choice(WHOLE) * (rng.choice((1, -1)) if name == "priority" else 1)
            setattr(message, name, value > 0 if name in FLAGS else value)
    for name in LISTS:
        getattr(message, name).extend(rng.choices(WORDS, k=rng.choice((0, 0, 1, 3))))
    for name in MAPS:
        for word in rng.choices(WORDS, k=rng.choice((0, 0, 1, 3))):
            getattr(message, name)[word] = rng.choice(WORDS)
    for _ in range(rng.choice((0, 0, 2))):
        message.multimodal_items.add(id="picture", token_count=rng.randint(0, 9))
    return message


def fields_of(message: router_pb2.RouteRequest | ReceivedRequest) -> dict[str, Any]:
    """A message's fields, each as Python has it; of both kinds alike."""
    fields = {name: getattr(message, name) for name in (*NAMES, *PLAIN, "traceparent")}
    fields["prompt"] = prompt_of(message)
    for name in OPTIONAL:
        is_unset = isinstance(message, router_pb2.RouteRequest) and not message.HasField(name)
        fields[name] = None if is_unset else getattr(message, name)
    fields |= {name: list(getattr(message, name) or ()) for name in LISTS}
    fields |= {name: dict(getattr(message, name) or {}) for name in MAPS}
    fields["multimodal_items"] = [
        item if isinstance(item, bytes) else item.SerializeToString()
        for item in message.multimodal_items or ()
    ]
    return fields


def prompt_of(message: router_pb2.RouteRequest | ReceivedRequest) -> tuple[int, bytes, int, int]:
    """As a ReceivedRequest has it."""
    if isinstance(message, ReceivedRequest):
        return message.form, message.data, message.block_size, message.prompt_tokens
    name = message.WhichOneof("prompt")
    form = 0 if name is None else message.DESCRIPTOR.fields_by_name[name].number
    match name:
        case None:
            return form, b"", 0, 0
        case "estimated_tokens":
            return form, b"", 0, message.estimated_tokens
        case "token_ids":
            ids = message.token_ids.ids
            return form, b"".join(one.to_bytes(4, "little") for one in ids), 0, 0
        case "block_hashes":
            hashes = message.block_hashes
            data = b"".join(one.to_bytes(8, "little") for one in hashes.hashes)
            return form, data, hashes.block_size, hashes.prompt_tokens
        case "text":
            return form, message.text.encode(), 0, 0
    return form, getattr(message, name), 0, 0


def read_prompt(content: bytes) -> tuple[int, bytes, int, int]:
    return prompt_of(read_request(content, 10, 100, 100))


def in_process(message: router_pb2.RouteRequest) -> ReceivedRequest:
    """The same request as a port of the router's own process makes it."""
    form, data, block_size, prompt_tokens = prompt_of(message)
    fields: dict[str, Any] = {"block_size": block_size, "prompt_tokens": prompt_tokens}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in MAPS:
            fields[name] = dict(value)
        elif name == "multimodal_items":
            fields[name] = [item.SerializeToString() for item in value]
        elif name in LISTS:
            fields[name] = list(value)
        elif descriptor.containing_oneof is None or name in OPTIONAL + PLAIN:
            fields[name] = value
    return request_of(form, data, fields)


def both(content: bytes) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The fields as they are read here, and by protobuf; None: refused."""
    ours = theirs = None
    with suppress(ValueError):
        ours = fields_of(read_request(content, 1000, 1 << 16, 1000))
    with suppress(DecodeError):
        theirs = fields_of(router_pb2.RouteRequest.FromString(content))
    return ours, theirs


@pytest.mark.parametrize("seed", range(20))
def test_a_request_is_read_as_protobuf_reads_it(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        message = a_request(rng)
        content = message.SerializeToString()
        ours, theirs = both(content)
        assert ours == theirs == fields_of(message) == fields_of(in_process(message))
        merged = content + a_request(rng).SerializeToString()  # later fields replace, lists grow
        ours, theirs = both(merged)
        assert ours is not None
        assert ours == theirs


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_request_is_read_or_refused_as_by_protobuf(seed: int) -> None:
    rng, read = random.Random(seed), 0
    for _ in range(200):
        message = a_request(rng)
        message.ClearField("multimodal_items")  # whose inside is read later
        content = bytearray(message.SerializeToString() or b"\n\x01r")
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        ours, theirs = both(bytes(content))
        if any(fields and fields["multimodal_items"] for fields in (ours, theirs)):
            continue
        assert ours == theirs, bytes(content)
        read += ours is not None
    assert 0 < read < 200


def test_the_longest_field_the_entries_and_all_bytes_are_counted() -> None:
    message = router_pb2.RouteRequest(model="ü" * 600, token_bytes=bytes(4000))
    message.allowed_worker_ids.extend(["a", "b"])
    message.required_labels["zone"] = "a"
    content = message.SerializeToString()
    request, made = read_request(content, 10, 10_000, 1000), in_process(message)
    assert (request.longest, request.entries, len(request)) == (1200, 3, len(content))
    assert (made.longest, made.entries, len(made)) == (1200, 3, 4000 + 1200 + 2 + 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 3),
        ("model", "\ud800"),
        ("priority", 1 << 31),
        ("charged_tokens", -1),
        ("allowed_worker_ids", ("a",)),
        ("allowed_worker_ids", [3]),
    ],
)
def test_a_value_that_fits_no_field_makes_no_request(name: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        request_of(TOKEN_BYTES, bytes(8), {name: value})
