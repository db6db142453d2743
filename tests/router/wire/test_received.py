"""A prompt without tokens is taken out of its message like any other prompt."""

import pytest
from google.protobuf.message import DecodeError

from kvroute.v1 import BlockHashes, RouteBatch, RouteRequest
from router.wire.received import TEXT, TOKEN_BYTES, in_order, take_apart

FORMS = {"text": 21, "chat_completion_body": 22, "completion_body": 23, "messages_body": 24}


@pytest.mark.parametrize("name", FORMS)
def test_a_text_is_taken_out_and_the_rest_stays(name: str) -> None:
    content = "héllo" if name == "text" else b"\xff\x00 any bytes"
    beside = RouteRequest(model="m", return_tokens=True, require_tokens=True)
    message = RouteRequest(**{name: content})
    message.MergeFrom(beside)
    rest, form, data, _, _ = take_apart(message.SerializeToString(), 10, 100, 10)
    assert RouteRequest.FromString(rest) == beside
    assert form == FORMS[name] >= TEXT
    assert data == (content.encode() if isinstance(content, str) else content)


def test_a_long_text_is_not_counted_beside_the_prompt() -> None:
    content = RouteRequest(chat_completion_body=bytes(1 << 20)).SerializeToString()
    rest, _, data, _, _ = take_apart(content, 1, 0, 0)
    assert (rest, len(data)) == (b"", 1 << 20)


def test_the_last_prompt_counts_as_in_any_oneof() -> None:
    tokens = RouteRequest(token_bytes=bytes(8)).SerializeToString()
    text = RouteRequest(text="later").SerializeToString()
    hashes = RouteRequest(block_hashes=BlockHashes(hashes=[1])).SerializeToString()
    assert take_apart(tokens + text, 10, 10, 10)[1:3] == (TEXT, b"later")
    assert take_apart(text + hashes + tokens, 10, 10, 10)[1:3] == (TOKEN_BYTES, bytes(8))


def test_a_replaced_prompt_is_read_like_the_one_that_counts() -> None:
    token = b"\x80" * 10 + b"\x00"  # protobuf takes 10 bytes for a number
    broken = b"\x1a" + bytes([len(token) + 2]) + b"\x0a" + bytes([len(token)]) + token
    later = RouteRequest(chat_completion_body=b"{}").SerializeToString()
    with pytest.raises(DecodeError):
        RouteRequest.FromString(broken + later)
    for message in (broken, broken + later, later + broken + later):
        with pytest.raises(ValueError, match="parsing"):
            take_apart(message, 10, 100, 100)


def test_a_request_in_two_fields_is_whole_in_each() -> None:
    """A field that begins in the first and ends in the second is none."""
    request = RouteRequest(model="model").SerializeToString()

    def batch(*pieces: bytes) -> bytes:
        item = b"".join(b"\x12" + bytes([len(piece)]) + piece for piece in pieces)
        return b"\x0a" + bytes([len(item)]) + item

    assert RouteBatch.FromString(in_order(batch(request, request), 9)).items[0].request.model
    for at in range(1, len(request)):
        torn = batch(request[:at], request[at:])
        with pytest.raises(DecodeError):
            RouteBatch.FromString(torn)
        with pytest.raises(ValueError, match="parsing"):
            in_order(torn, 9)
