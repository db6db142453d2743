"""The fields of ext_proc.proto have the numbers, names and kinds that Envoy's own messages have.

A C++ program carries the serialized FileDescriptorProto of each of its .proto files: found by the
file's name, it is read field by field until something follows that is no field of a descriptor.
"""

import os
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.message import DecodeError

from kvroute.ext_proc.v3 import ext_proc_pb2

FILES = (
    "envoy/service/ext_proc/v3/external_processor.proto",
    "envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto",
    "envoy/config/core/v3/base.proto",
    "envoy/type/v3/http_status.proto",
)
SLACK = 64
"""Bytes behind a descriptor that may look like one more field."""
ENUMS = {FieldDescriptorProto.TYPE_ENUM, FieldDescriptorProto.TYPE_INT32}
"""Alike on the wire."""


def descriptor(binary: bytes, name: str) -> FileDescriptorProto:
    raw = name.encode()
    start = binary.index(b"\x0a" + bytes((len(raw),)) + raw + b"\x12")
    known = {field.number for field in FileDescriptorProto.DESCRIPTOR.fields}
    end = start
    while True:
        tag, at = varint(binary, end)
        number, kind = tag >> 3, tag & 7
        if number not in known or kind not in (0, 2) or (number == 1 and end != start):
            break
        size, at = varint(binary, at)
        end = at + size if kind == 2 else at
    for shorter in range(SLACK):
        try:
            return FileDescriptorProto.FromString(binary[start : end - shorter])
        except DecodeError:
            continue
    raise AssertionError(f"no descriptor of {name}")


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def messages(file: FileDescriptorProto) -> dict[str, DescriptorProto]:
    found: dict[str, DescriptorProto] = {}
    left = list(file.message_type)
    while left:
        message = left.pop()
        if not message.options.map_entry:
            found[message.name] = message
        left.extend(message.nested_type)
    return found


def test_every_field_is_envoys() -> None:
    binary = Path(os.environ["KVROUTE_ENVOY"]).read_bytes()
    theirs: dict[str, DescriptorProto] = {}
    for name in FILES:
        theirs |= messages(descriptor(binary, name))
    ours = FileDescriptorProto()
    ext_proc_pb2.DESCRIPTOR.CopyToProto(ours)
    compared = 0
    for name, message in messages(ours).items():
        by_number = {field.number: field for field in theirs[name].field}
        for field in message.field:
            other = by_number[field.number]
            assert (other.name, other.label) == (field.name, field.label), f"{name}.{field.name}"
            assert other.type == field.type or {other.type, field.type} == ENUMS
            compared += 1
    assert compared > 40
