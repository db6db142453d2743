"""grpc.testing.TestService, which gRPC's interop clients call, on kvroute's server.

Source: grpc/testing/messages.proto and doc/interop-test-descriptions.md of the grpc-proto and grpc
repositories. Of the messages only what handlers read is described; the rest is skipped as unknown.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message_factory import GetMessageClass

from router.net.http2.calls import Call, Handler
from router.net.http2.server import Http2Server

_FIELDS = {
    "Payload": ("body bytes 2",),
    "EchoStatus": ("code int32 1", "message string 2"),
    "SimpleRequest": ("response_size int32 2", "payload Payload 3", "response_status EchoStatus 7"),
    "SimpleResponse": ("payload Payload 1", "server_id string 4"),
    "StreamingInputCallRequest": ("payload Payload 1",),
    "StreamingInputCallResponse": ("aggregated_payload_size int32 1",),
    "ResponseParameters": ("size int32 1", "interval_us int32 2"),
    "StreamingOutputCallRequest": (
        "response_parameters ResponseParameters* 2",
        "payload Payload 3",
        "response_status EchoStatus 7",
    ),
    "StreamingOutputCallResponse": ("payload Payload 1",),
}
"""Message -> its fields: name, type, number; * is repeated."""
_KINDS = {
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "string": FieldDescriptorProto.TYPE_STRING,
}
INITIAL, TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
"""Metadata that a caller gets back, in front of the answer and behind it."""


def _messages() -> dict[str, Any]:
    file = FileDescriptorProto(
        name="tests/interop/messages.proto", package="grpc.testing", syntax="proto3"
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field_name, kind, number in map(str.split, fields):
            field = message.field.add(name=field_name, number=int(number))
            repeated, kind = kind.endswith("*"), kind.rstrip("*")
            label = FieldDescriptorProto.LABEL_REPEATED
            field.label = label if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            if kind in _KINDS:
                field.type = _KINDS[kind]
            else:
                field.type_name = f".grpc.testing.{kind}"
                field.type = FieldDescriptorProto.TYPE_MESSAGE
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"grpc.testing.{name}"))
        for name in _FIELDS
    }


MESSAGE = _messages()


async def _empty_call(_content: bytes, _context: Call) -> bytes:
    return b""


async def _unary_call(content: bytes, context: Call) -> bytes:
    request = MESSAGE["SimpleRequest"].FromString(content)
    await _echo_status(request, context)
    trailing = await _echo_initial(context)
    answer = MESSAGE["SimpleResponse"](
        payload={"body": bytes(request.response_size)}, server_id="kvroute"
    ).SerializeToString()
    if not trailing:
        return bytes(answer)
    await _write(context, bytes(answer))
    return await context.abort(grpc.StatusCode.OK, "", trailing)


async def _streaming_input_call(requests: AsyncIterator[bytes], _context: Call) -> bytes:
    size = 0
    async for content in requests:
        size += len(MESSAGE["StreamingInputCallRequest"].FromString(content).payload.body)
    answer = MESSAGE["StreamingInputCallResponse"](aggregated_payload_size=size)
    return bytes(answer.SerializeToString())


async def _streaming_output_call(content: bytes, context: Call) -> None:
    await _answers(MESSAGE["StreamingOutputCallRequest"].FromString(content), context)


async def _full_duplex_call(requests: AsyncIterator[bytes], context: Call) -> None:
    trailing = await _echo_initial(context)
    async for content in requests:
        request = MESSAGE["StreamingOutputCallRequest"].FromString(content)
        await _echo_status(request, context)
        await _answers(request, context)
    if trailing:
        await context.abort(grpc.StatusCode.OK, "", trailing)


async def _echo_status(request: Any, context: Call) -> None:
    if request.response_status.code:
        (code,) = (one for one in grpc.StatusCode if one.value[0] == request.response_status.code)
        await context.abort(code, request.response_status.message)


async def _echo_initial(context: Call) -> list[tuple[str, str | bytes]]:
    """Sends what goes in front; returns what goes behind."""
    metadata = context.invocation_metadata()
    if initial := [(name, value) for name, value in metadata if name == INITIAL]:
        await context.send_initial_metadata(initial)
    return [(name, value) for name, value in metadata if name == TRAILING]


async def _write(context: Call, content: bytes) -> None:
    if not context.send(content):
        await context.room()


async def _answers(request: Any, context: Call) -> None:
    for wanted in request.response_parameters:
        await asyncio.sleep(wanted.interval_us / 1e6)  # the client says how long
        answer = MESSAGE["StreamingOutputCallResponse"](payload={"body": bytes(wanted.size)})
        await _write(context, bytes(answer.SerializeToString()))


async def _metadata(_content: bytes, context: Call) -> bytes:
    """JSON of the caller's metadata, in its order; bytes as hexadecimal digits."""
    pairs = [
        (name, value.hex() if isinstance(value, bytes) else value)
        for name, value in context.invocation_metadata()
    ]
    return json.dumps(pairs).encode()


async def _whole(requests: AsyncIterator[bytes], context: Call) -> None:
    """Answers once the request has ended."""
    async for _ in requests:
        pass
    await _write(context, b"whole")


SERVICES: dict[str, dict[str, Handler]] = {
    "grpc.testing.TestService": {
        "EmptyCall": grpc.unary_unary_rpc_method_handler(_empty_call),
        "UnaryCall": grpc.unary_unary_rpc_method_handler(_unary_call),
        "StreamingInputCall": grpc.stream_unary_rpc_method_handler(_streaming_input_call),
        "StreamingOutputCall": grpc.unary_stream_rpc_method_handler(_streaming_output_call),
        "FullDuplexCall": grpc.stream_stream_rpc_method_handler(_full_duplex_call),
    },
    "kvroute.interop.Seen": {
        "Metadata": grpc.unary_unary_rpc_method_handler(_metadata),
        "Whole": grpc.stream_stream_rpc_method_handler(_whole),
    },
}


def add_services(server: Http2Server) -> None:
    """Mounts both services."""
    for service, handlers in SERVICES.items():
        server.add(service, handlers)
