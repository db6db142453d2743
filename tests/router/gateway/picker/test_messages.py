"""ext_proc's messages as bytes, beside the protobuf library."""

import random
from contextlib import suppress

import pytest

from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.gateway.picker import messages
from router.gateway.picker.held_body import SLICE_BYTES, SMALL_BYTES, HeldBody
from router.gateway.picker.messages import Part, answer_part, streamed
from router.gateway.server.long_bodies import LONG_BYTES

SIZES = (0, 1, 110, 113, 114, 119, 120, 121, 122, 127, 128, 300, 16_370, 16_384, 62_000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("last", [False, True])
def test_a_part_is_read_and_written_as_protobuf_does(size: int, last: bool) -> None:
    body = bytes(size)
    raw = pb.HttpBody(body=body, end_of_stream=last)
    message = pb.ProcessingRequest(response_body=raw).SerializeToString()
    part = answer_part(message)
    assert part == Part(body, last, raw.SerializeToString())
    (echo,) = streamed(part, of_answer=True)
    answer = pb.ProcessingResponse()
    answer.response_body.response.body_mutation.streamed_response.body = body
    answer.response_body.response.body_mutation.streamed_response.end_of_stream = last
    assert pb.ProcessingResponse.FromString(echo) == answer
    (echo,) = streamed(part, of_answer=False)
    parsed = pb.ProcessingResponse.FromString(echo).request_body.response
    assert parsed.body_mutation.streamed_response.body == body


def test_metadata_behind_a_part_is_passed_over() -> None:
    message = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"abc"))
    message.metadata_context.filter_metadata["envoy.lb"].update({"a": "b"})
    part = answer_part(message.SerializeToString())
    assert part is not None
    assert part.body == b"abc"


def test_a_long_part_is_cut() -> None:
    body = random.Random(1).randbytes(200_000)
    raw = pb.HttpBody(body=body, end_of_stream=True).SerializeToString()
    cut = [
        pb.ProcessingResponse.FromString(each).response_body.response.body_mutation
        for each in streamed(Part(body, True, raw), of_answer=True)
    ]
    assert b"".join(each.streamed_response.body for each in cut) == body
    assert [each.streamed_response.end_of_stream for each in cut] == [False] * 3 + [True]


@pytest.mark.parametrize("seed", range(10))
def test_hostile_bytes_are_left_to_protobuf(seed: int) -> None:
    rng = random.Random(seed)
    valid = pb.ProcessingRequest(
        response_body=pb.HttpBody(body=b"x" * 200, end_of_stream=True)
    ).SerializeToString()
    for _ in range(2000):
        data = bytearray(valid)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(min(12, len(data)))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        part = answer_part(bytes(data))
        if part is None:
            continue
        try:
            parsed = pb.ProcessingRequest.FromString(bytes(data))
        except Exception:  # then the look at the part alone may say anything
            continue
        if parsed.WhichOneof("request") == "response_body":
            assert parsed.response_body.body == part.body


def test_subsets_come_as_lists_and_as_text() -> None:
    message = pb.ProcessingRequest()
    assert messages.subset_of(message) is None
    hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    assert messages.subset_of(message) is None
    hint.update({messages.SUBSET: ["10.0.0.1:80", "10.0.0.2:80"]})
    assert messages.subset_of(message) == {"10.0.0.1:80", "10.0.0.2:80"}
    hint.update({messages.SUBSET: "10.0.0.1:80, 10.0.0.3"})
    assert messages.subset_of(message) == {"10.0.0.1:80", "10.0.0.3"}
    hint.update({messages.SUBSET: ""})
    assert messages.subset_of(message) == frozenset()


def test_headers_of_one_name_are_joined_and_bytes_survive() -> None:
    headers = pb.HttpHeaders()
    headers.headers.headers.add(key="A", raw_value=b"1")
    headers.headers.headers.add(key="a", value="2")
    headers.headers.headers.add(key="b", raw_value=b"\xff")
    assert messages.headers_of(headers) == {"a": "1, 2", "b": "\udcff"}


def _field(number: int, content: bytes) -> bytes:
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((number << 3 | 2,)) + bytes((*length, size)) + content


@pytest.mark.parametrize("seed", range(12))
def test_what_is_beside_a_body_is_bounded_before_objects_are_made_of_it(seed: int) -> None:
    rng = random.Random(seed)
    filler = rng.choice((b"\x0a\x00", b"\xa2\x06\x00", _field(1, b"\x1a\x01a"), b"\x10\x01"))
    count = messages.ASIDE_BYTES_MAX // len(filler)
    inner, few = filler * (count + rng.randrange(1, 9000)), filler * rng.randrange(count // 2)
    number = rng.choice((2, 3, 4, 5, 6, 7, 8, 11))
    body = _field(4, _field(1, bytes(rng.randrange(1 << 21))))
    for content in (_field(number, inner), body + _field(number, inner)):
        with pytest.raises(ValueError, match="beside a body"):
            messages.read(content)
    messages.read(_field(8, b""))
    assert messages.read(body)[0].WhichOneof("request") == "request_body"
    with suppress(ValueError):  # a filler that is nothing of this field's
        messages.read(_field(number, few))


def test_more_headers_than_a_message_may_have_are_not_looked_at() -> None:
    headers = pb.HttpHeaders()
    for i in range(messages.HEADERS_MAX):
        headers.headers.headers.add(key="a", raw_value=b"%d" % i)
    assert messages.headers_of(headers)["a"].endswith(f", {messages.HEADERS_MAX - 1}")
    headers.headers.headers.add(key="b")
    with pytest.raises(ValueError, match="headers"):
        messages.headers_of(headers)


@pytest.mark.parametrize("size", [LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 1])
@pytest.mark.parametrize("last", [False, True])
def test_a_long_body_is_taken_out_before_protobuf_reads_the_rest(size: int, last: bool) -> None:
    body = random.Random(size).randbytes(size)
    whole = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=last))
    whole.metadata_context.filter_metadata["envoy.lb"].update({"a": "b"})
    message, long = messages.read(whole.SerializeToString())
    assert (long is not None) == (size >= LONG_BYTES)
    part = messages.part_of(message.request_body, long)
    assert (bytes(part.body), part.is_last) == (body, last)
    assert message.metadata_context == whole.metadata_context
    back = [
        pb.ProcessingResponse.FromString(each).request_body.response.body_mutation
        for each in streamed(part, of_answer=False)
    ]
    assert b"".join(each.streamed_response.body for each in back) == body
    assert [each.streamed_response.end_of_stream for each in back][-1] == last


def test_a_long_body_and_another_one_are_no_message() -> None:
    body = _field(1, bytes(LONG_BYTES))
    for content in (
        _field(4, body + _field(1, b"more")),
        _field(4, body) + _field(4, _field(1, b"more")),
        _field(4, body) + _field(5, _field(1, b"more")),
        _field(4, body + b"\x0a\x7f"),
    ):
        with pytest.raises(ValueError, match=r"two bodies|can't be read"):
            messages.read(content)


def test_small_parts_of_a_body_are_bounded_by_their_number() -> None:
    held = HeldBody()
    for _ in range(2 * SLICE_BYTES // SMALL_BYTES):
        held.append(Part(b"", False, b""))
    assert len(held.take()) == SLICE_BYTES // SMALL_BYTES
    assert len(held.take()) == SLICE_BYTES // SMALL_BYTES
    assert not held


def test_slices_are_bounded_and_make_the_body() -> None:
    rng = random.Random(3)
    held, body = HeldBody(), b""
    for _ in range(60):
        content = rng.randbytes(rng.choice((1, 900, 61_000, 62_001, 300_000)))
        raw = pb.HttpBody(body=content).SerializeToString() if len(content) <= 62_000 else None
        held.append(Part(content, False, raw))
        body += content
    back = b""
    while held:
        messages_of_slice = held.take()
        assert sum(map(len, messages_of_slice)) <= SLICE_BYTES * 1.02
        for each in messages_of_slice:
            response = pb.ProcessingResponse.FromString(each).request_body.response
            back += response.body_mutation.streamed_response.body
    assert back == body
