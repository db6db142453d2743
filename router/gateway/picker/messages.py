"""Reads and writes messages of ext_proc as bytes. Pure.

A part of a body is never parsed twice: StreamedBodyResponse has the fields of HttpBody, so that the
bytes that came are sent back inside four more messages.

Laws:
- protobuf parses a message only if it has at most ASIDE_BYTES_MAX bytes beside a body; one with
  more than HEADERS_MAX headers is refused;
- a body of LONG_BYTES or more is not copied here, and protobuf never parses it.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from kvroute.client.messages.wire import varint
from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.gateway.refusals import Answer
from router.gateway.server.long_bodies import LONG_BYTES

ENDPOINT = "x-gateway-destination-endpoint"
"""Request header, and key of the metadata `envoy.lb`, that names the endpoint (endpoint picker
protocol v1.0.0)."""
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
"""Namespaces of Envoy's dynamic metadata."""
PART_BYTES_MAX = 62_000
"""Most bytes of a part of a body in full duplex: Envoy asks for 64 KiB at most, and some proxies
refuse more."""
ASIDE_BYTES_MAX = 1 << 18
"""Most bytes of a message beside a body: headers, metadata and all else."""
HEADERS_MAX = 1024
REQUEST_BODY_TAG = 0x22
RESPONSE_BODY_TAG = 0x2A
"""First byte of a ProcessingRequest with a response_body, if its fields are in order."""

_OVERWRITE = pb.HeaderValueOption.APPEND_ACTION_OVERWRITE_OR_ADD


class Part(NamedTuple):
    """A part of a request's or an answer's body."""

    body: bytes | memoryview
    """The part's bytes; a memoryview of the message if they are LONG_BYTES or more."""
    is_last: bool
    """Whether neither more of the body nor trailers follow."""
    raw: bytes | None
    """The HttpBody as it came; None: it is too long to go back in one message."""


def read(message: bytes) -> tuple[pb.ProcessingRequest, memoryview | None]:
    """Reads a message of Envoy. Returns the message and, taken out of it, a body of LONG_BYTES or
    more; None: it has no such body. Raises ValueError.
    """
    long = None
    if len(message) > ASIDE_BYTES_MAX:
        start, body, after = _body_place(message)
        if len(message) - len(body) > ASIDE_BYTES_MAX:
            raise ValueError(f"a message has over {ASIDE_BYTES_MAX} bytes beside a body")
        if len(body) >= LONG_BYTES:
            long, message = body, _without_body(message, start, after)
    try:
        parsed = pb.ProcessingRequest.FromString(message)
    except DecodeError as error:
        raise ValueError(f"a message can't be read: {error}") from None
    if long is not None and (parsed.request_body.body or parsed.response_body.body):
        raise ValueError("a message has two bodies")
    return parsed, long


def _body_place(message: bytes) -> tuple[range, memoryview, int]:
    """The body that a message begins with: place of its HttpBody's fields, the body's bytes, and
    the place of their end; empty and 0: the message begins with no body."""
    view = memoryview(message)
    if message[0] in (REQUEST_BODY_TAG, RESPONSE_BODY_TAG):
        size, at = _varint(message, 1)
        if message[at : at + 1] == b"\x0a":
            body_size, begin = _varint(message, at + 1)
            if begin + body_size <= min(at + size, len(message)):
                return range(at, at + size), view[begin : begin + body_size], begin + body_size
    return range(0), view[:0], 0


def _without_body(message: bytes, fields: range, after: int) -> bytes:
    """The message without the body that it begins with. fields, after: from _body_place."""
    rest = message[after : fields.stop]
    return message[:1] + varint(len(rest)) + rest + message[fields.stop :]


def answer_part(message: bytes) -> Part | None:
    """The part of an answer's body in a message; None: the message holds something else, or has to
    be read whole.
    """
    return _part(message, RESPONSE_BODY_TAG)


def request_part(message: bytes) -> Part | None:
    """The part of a request's body in a message; None as for `answer_part`."""
    return _part(message, REQUEST_BODY_TAG)


def _part(message: bytes, tag: int) -> Part | None:
    if not message or message[0] != tag or len(message) > LONG_BYTES:
        return None
    size, at = _varint(message, 1)
    raw = message[at : at + size]
    if len(raw) != size:
        return None
    if not raw:
        return Part(b"", False, raw)
    if raw[0] == 0x10:
        return Part(b"", True, raw) if raw == b"\x10\x01" else None
    if raw[0] != 0x0A:
        return None
    size, at = _varint(raw, 1)
    body, rest = raw[at : at + size], raw[at + size :]
    if len(body) != size or rest not in (b"", b"\x10\x01", b"\x10\x00"):
        return None
    return Part(body, rest == b"\x10\x01", raw)


def part_of(body: pb.HttpBody, long: memoryview | None) -> Part:
    """The part of a body in a message that was read whole. long: the body that was taken out, if
    any.
    """
    if long is not None:
        return Part(long, body.end_of_stream, None)
    return Part(body.body, body.end_of_stream, body.SerializeToString())


def streamed(part: Part, *, of_answer: bool) -> list[bytes]:
    """Messages that send a part of a body unchanged, as many as its length needs."""
    tag = b"\x22" if of_answer else b"\x1a"
    if part.raw is not None and len(part.body) <= PART_BYTES_MAX:
        return [_wrapped(part.raw, tag)]
    messages = []
    for start in range(0, len(part.body), PART_BYTES_MAX):
        piece = bytes(part.body[start : start + PART_BYTES_MAX])
        is_last = part.is_last and start + PART_BYTES_MAX >= len(part.body)
        raw = pb.HttpBody(body=piece, end_of_stream=is_last).SerializeToString()
        messages.append(_wrapped(raw, tag))
    return messages


def headers_of(headers: pb.HttpHeaders) -> dict[str, str]:
    """Headers by name in lower case; values of one name are joined. Bytes that are no UTF-8 are
    read as lone surrogates, as aiohttp reads them. Raises ValueError for more than HEADERS_MAX."""
    fields = headers.headers.headers
    if len(fields) > HEADERS_MAX:
        raise ValueError(f"a message has over {HEADERS_MAX} headers")
    values: dict[str, list[str]] = {}
    for header in fields:
        raw = header.raw_value or header.value.encode()
        values.setdefault(header.key.lower(), []).append(raw.decode(errors="surrogateescape"))
    return {name: ", ".join(each) for name, each in values.items()}


def subset_of(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints among which Envoy wants the pick; None: the message names no subset."""
    space = message.metadata_context.filter_metadata
    if SUBSET_HINT not in space or SUBSET not in space[SUBSET_HINT].fields:
        return None
    value = space[SUBSET_HINT].fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        named = [each.string_value for each in value.list_value.values]
    else:
        named = value.string_value.split(",")
    return frozenset(name.strip() for name in named if name.strip())


def served_of(message: pb.ProcessingRequest) -> str:
    """The endpoint that served the request, as Envoy reports; empty: it reports none."""
    space = message.metadata_context.filter_metadata
    if LB not in space or SERVED not in space[LB].fields:
        return ""
    return space[LB].fields[SERVED].string_value


def picked(
    endpoints: str,
    headers: Mapping[str, str],
    taken_out: Iterable[str] = (),
    *,
    with_body: bool = False,
) -> bytes:
    """A message that names the endpoints. headers: to add for the worker. taken_out: names of
    headers to remove. with_body: the message answers the request's buffered body, not its headers.
    """
    answer = pb.ProcessingResponse()
    kind = answer.request_body if with_body else answer.request_headers
    common = kind.response
    _set(common.header_mutation, {ENDPOINT: endpoints, **headers})
    common.header_mutation.remove_headers.extend(taken_out)
    common.clear_route_cache = True
    metadata = Struct()
    metadata.update({LB: {ENDPOINT: endpoints}})
    answer.dynamic_metadata.CopyFrom(metadata)
    return answer.SerializeToString()


def unpicked(taken_out: Iterable[str] = (), *, with_body: bool = False) -> bytes:
    """A message that names no endpoint; it removes the headers taken_out, and the header ENDPOINT
    that a client set. with_body: see picked.
    """
    answer = pb.ProcessingResponse()
    kind = answer.request_body if with_body else answer.request_headers
    kind.response.header_mutation.remove_headers.extend((ENDPOINT, *taken_out))
    return answer.SerializeToString()


def refused(answer: Answer, reason: str) -> bytes:
    """A message by which the client gets this answer instead of a worker's."""
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=answer.status), body=answer.body, details=f"kvroute_{reason}"
    )
    _set(immediate.headers, {name.lower(): value for name, value in answer.headers.items()})
    return pb.ProcessingResponse(immediate_response=immediate).SerializeToString()


def _set(mutation: pb.HeaderMutation, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        header = pb.HeaderValue(key=name.lower(), raw_value=value.encode(errors="surrogateescape"))
        mutation.set_headers.add(header=header, append_action=_OVERWRITE)


def _passed(**step: Any) -> bytes:
    return pb.ProcessingResponse(**step).SerializeToString()


REQUEST_HEADERS_PASS = _passed(request_headers=pb.HeadersResponse())
REQUEST_BODY_PASS = _passed(request_body=pb.BodyResponse())
REQUEST_TRAILERS_PASS = _passed(request_trailers=pb.TrailersResponse())
RESPONSE_HEADERS_PASS = _passed(response_headers=pb.HeadersResponse())
RESPONSE_BODY_PASS = _passed(response_body=pb.BodyResponse())
RESPONSE_TRAILERS_PASS = _passed(response_trailers=pb.TrailersResponse())


def _wrapped(raw: bytes, tag: bytes) -> bytes:
    """A ProcessingResponse around an HttpBody's bytes: StreamedBodyResponse in field 3 of
    BodyMutation, in 3 of CommonResponse, in 1 of BodyResponse, in the field that `tag` names."""
    return _wrappers(len(raw), tag) + raw


@lru_cache(maxsize=1024)
def _wrappers(size: int, tag: bytes) -> bytes:
    """Bytes of a ProcessingResponse before a part of `size` bytes (_wrapped); cached, since a
    stream's chunks have few lengths."""
    heads = b""
    for outer in (b"\x1a", b"\x1a", b"\x0a", tag):
        heads = outer + varint(size + len(heads)) + heads
    return heads


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at a place of the data, and the place behind it; -1: the varint does not end."""
    value = shift = 0
    while at < len(data) and shift < 35:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return -1, at
