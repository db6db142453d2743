"""Protobuf's readers: ours beside the library.

A reader takes an input and returns its outcome, a short tuple; it raises Difference.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvroute.v1 import fleet_pb2, router_pb2
from router.api.desk.stream_items import read_batch
from router.request.bodies import WITH_TOKENS
from router.request.refusal import Refusal
from router.request.wire.received import (
    BLOCK_HASHES,
    ESTIMATED_TOKENS,
    TOKEN_BYTES,
    TOKEN_IDS,
    Pieces,
    ReceivedRequest,
    TooMuch,
    check_fields,
    read_request,
    text_form,
)
from tests.fuzz.native import NativeReaders

ITEMS = router_pb2.RouteBatch.DESCRIPTOR.fields_by_name["items"].number
CANCEL = router_pb2.RouteItem.DESCRIPTOR.fields_by_name["cancel"].number
MOST = 1 << 20
"""A bound that no input reaches."""
TEXTS = tuple(
    router_pb2.RouteRequest.DESCRIPTOR.fields_by_name[name].number for name in WITH_TOKENS
)
TEXT_MAX = 1024
Outcome = tuple[Any, ...]
M = TypeVar("M", bound=Message)


class Difference(AssertionError):
    """Two readers came to different results."""


def same(one: object, other: object, of: str) -> None:
    if one != other:
        raise Difference(f"{of}: {one!r:.300} here, {other!r:.300} by the library")


def _with_bytes() -> type[Message]:
    """RouteRequest whose `text` is bytes: a text's UTF-8 is checked later, and only of the prompt
    that counts."""
    pool = descriptor_pool.DescriptorPool()
    for kind in (router_pb2, fleet_pb2):
        _add(pool, kind.DESCRIPTOR)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("kvroute.v1.RouteRequest"))


def _add(pool: descriptor_pool.DescriptorPool, file: Any) -> None:
    for inner in file.dependencies:
        _add(pool, inner)
    copied = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(copied)
    for message in copied.message_type:
        for field in message.field:
            if (message.name, field.name) == ("RouteRequest", "text"):
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    pool.Add(copied)


RouteRequest: Any = _with_bytes()
RouteBatch: Any = message_factory.GetMessageClass(
    RouteRequest.DESCRIPTOR.file.message_types_by_name["RouteBatch"]
)


def by_library(kind: type[M], content: bytes) -> M | None:
    try:
        return kind.FromString(content)
    except DecodeError:
        return None


def canonical(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


FIELDS = (
    *("request_id", "model", "lora_name", "cache_salt", "tenant", "session_id", "policy"),
    *("traceparent", "priority", "phase", "waited_ms", "charged_tokens"),
    *("omit_receipt", "return_tokens", "require_tokens", "queue_progress", "observed"),
)
"""Fields of a RouteRequest that have a value when they are not set."""


class WireReaders:
    """The readers by name."""

    def __init__(self) -> None:
        self._native = NativeReaders()

    def route(self, content: bytes) -> Outcome:
        """RouteRequest: what a router reads of it."""
        self._native.read(content)
        expected = by_library(RouteRequest, content)
        read = _read(content)
        if read is None:
            _may_be_refused(content, expected)
            return ("refused", expected is None)
        form = read.form
        if expected is None:
            items = [by_library(router_pb2.MultimodalItem, one) for one in _list(read)]
            if None not in items and _nested(content) < 80:
                raise Difference(f"protobuf refuses this request, form {form}")
            return ("items refused", form)
        _check_read(read, expected)
        same(text_form(content), form if form in TEXTS else 0, "text_form")
        same(text_form(read), text_form(content), "text_form of what is read")
        for bounds in ((3, 40, 4), (1, 8, 1), (0, 0, 0)):
            try:
                _check_read(read_request(content, *bounds), expected)
            except TooMuch:
                continue
        return ("taken", form, len(content).bit_length())

    def batch(self, content: bytes) -> Outcome:
        """RouteBatch: item by item."""
        counted = self._native.read(content)
        expected = by_library(RouteBatch, content)
        try:
            batch = read_batch(content)
        except Refusal as refusal:
            if "too many" not in str(refusal):
                _may_be_refused(content, expected)
            return ("refused", expected is None)
        items = []
        while batch.next():
            items.append((batch.index, batch.timeout_ms, batch.cancel, batch.request))
        requests = [by_library(RouteRequest, one[3]) for one in items if one[3] is not None]
        if expected is None:
            # The library counts levels from the batch on; each request is read by itself here, and
            # one that a cancel replaces not at all.
            taken = None not in requests and _nested(content) < 80
            if taken and not _has_cancel(content):
                raise Difference("a batch that the library refuses is taken")
            return ("broken items", len(items))
        if None in requests:
            raise Difference("a request of the batch is broken, which the library takes")
        theirs = []
        for item in expected.items:
            is_request = item.WhichOneof("action") == "request"
            request = canonical(item.request) if is_request else None
            is_cancel = item.WhichOneof("action") == "cancel"
            theirs.append((item.index, item.timeout_ms, is_cancel, request))
        ours = [
            (index, ms, cancel, None if raw is None else canonical(RouteRequest.FromString(raw)))
            for index, ms, cancel, raw in items
        ]
        same(ours, theirs, "items")
        return ("taken", len(items), counted >= 0)

    def report(self, content: bytes) -> Outcome:
        """ReportRequest: in pieces."""
        self._native.read(content)
        expected = by_library(router_pb2.ReportRequest, content)
        try:
            pieces = Pieces(content, 1, MOST)
        except ValueError as error:
            if expected is not None and not isinstance(error, TooMuch):
                _may_be_refused(content, expected)
            return ("refused", expected is None)
        raw = list(_in_turns(pieces))
        steps = [by_library(router_pb2.Progress, one) for one in raw]
        if expected is None:
            return ("broken steps", None in steps)
        same(steps, list(expected.progress), "steps")
        return ("taken", len(steps))

    def command(self, content: bytes) -> Outcome:
        """A message that protobuf reads whole, after its fields are counted."""
        self._native.read(content)
        expected = by_library(fleet_pb2.RegisterWorkerRequest, content)
        try:
            check_fields(content, MOST)
        except ValueError:
            _may_be_refused(content, expected)
            return ("refused", expected is None)
        return ("counted", expected is not None)


def _in_turns(pieces: Pieces) -> Iterator[bytes]:
    for count in (1, 3, MOST):
        left = len(pieces)
        taken = pieces.take(count)
        same(len(taken), min(left, count), "pieces")
        yield from taken


def _read(content: bytes) -> ReceivedRequest | None:
    """None: refused."""
    try:
        return read_request(content, MOST, MOST, MOST)
    except ValueError:
        return None


def _list(read: ReceivedRequest) -> list[bytes]:
    return read.multimodal_items or []


def _prompt(message: Any) -> tuple[int, bytes, int, int]:
    """As read_request has it."""
    name = message.WhichOneof("prompt")
    if name is None:
        return 0, b"", 0, 0
    form = message.DESCRIPTOR.fields_by_name[name].number
    if form == TOKEN_IDS:
        return form, b"".join(one.to_bytes(4, "little") for one in message.token_ids.ids), 0, 0
    if form == BLOCK_HASHES:
        hashes = message.block_hashes
        packed = b"".join(one.to_bytes(8, "little") for one in hashes.hashes)
        return form, packed, hashes.block_size, hashes.prompt_tokens
    if form == ESTIMATED_TOKENS:
        return form, b"", 0, message.estimated_tokens
    assert form in (TOKEN_BYTES, *TEXTS)
    return form, getattr(message, name), 0, 0


def _check_read(read: ReceivedRequest, message: Any) -> None:
    """The fields that a router reads are those that the library reads."""
    prompt = read.form, read.data, read.block_size, read.prompt_tokens
    same(prompt, _prompt(message), "the prompt that is read")
    for name in FIELDS:
        same(getattr(read, name), getattr(message, name), name)
    for name in ("expected_output_tokens", "ttft_slo_ms", "tpot_slo_ms", "queue_timeout_ms"):
        value = getattr(message, name) if message.HasField(name) else None
        same(getattr(read, name), value, name)
    for name in ("allowed_worker_ids", "excluded_worker_ids"):
        same(getattr(read, name) or [], list(getattr(message, name)), name)
    for name in ("required_labels", "excluded_labels"):
        same(getattr(read, name) or {}, dict(getattr(message, name)), name)
    items = [router_pb2.MultimodalItem.FromString(one) for one in _list(read)]
    same(_items(items), _items(message.multimodal_items), "multimodal_items")


def _items(items: Iterable[router_pb2.MultimodalItem]) -> list[Outcome]:
    return [
        (item.WhichOneof("content"), item.hash, item.id, item.first_token, item.token_count)
        for item in items
    ]


def _may_be_refused(content: bytes, expected: Message | None) -> None:
    """Bytes that are refused here though the library takes them: groups nested too deep, alone."""
    if expected is None or _nested(content) > 90:
        return
    raise Difference("refused, and the library takes it")


def _has_cancel(batch: bytes) -> bool:
    """Whether an item has a `cancel`, also before or after a request in the same item."""
    items = UnknownFieldSet(Empty.FromString(batch))
    return any(
        field.field_number == CANCEL
        for item in items
        if item.field_number == ITEMS and isinstance(item.data, bytes)
        for field in UnknownFieldSet(Empty.FromString(item.data))
    )


def _nested(content: bytes) -> int:
    """At most how many groups can be open at once: a bound from the bytes alone."""
    return sum(one & 7 == 3 for one in content)
