"""Bytes for readers: valid messages, messages of hostile parts, and mutations of both."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor

NUMBERS = (0, 1, 2, 7, 15, 16, 127, 128, 2047, 536_870_911)
VALUES = (0, 1, 2, 4, 16, 127, 128, 255, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63), (1 << 64) - 1)
TEXTS = (b"", b"a", b"model", "é".encode(), b"\xff", b"\x00", b"x" * 200, b"x" * 1025)
_VARINTS = {
    FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM,
}  # fmt: skip


def varint(value: int, longer: int = 0) -> bytes:
    """longer: bytes more than needed, as no writer makes them."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    for _ in range(longer):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


class Messages:
    """Random messages of a protobuf type, a part of them wrong on purpose."""

    def __init__(self, rng: random.Random, hostile: float = 0.03) -> None:
        """hostile: share of the parts that no writer would make."""
        self._rng = rng
        self._hostile = hostile

    def make(self, kind: Descriptor, depth: int = 0) -> bytes:
        rng = self._rng
        fields = list(kind.fields)
        count = rng.choice((0, 1, 1, 2, 3, 5)) if depth else rng.choice((0, 1, 2, 4, 8, 12))
        parts = []
        for _ in range(count):
            if not fields or rng.random() < self._hostile:
                parts.append(self._odd(depth))
            else:
                parts.append(self._field(rng.choice(fields), depth))
        return b"".join(parts)

    def _field(self, field: FieldDescriptor, depth: int) -> bytes:
        rng, number = self._rng, field.number
        if field.type in _VARINTS:
            if field.is_repeated and rng.random() < 0.7:
                packed = b"".join(self._number() for _ in range(rng.choice((0, 1, 3, 40))))
                return self._bytes(number, packed)
            return self._tag(number, 0) + self._number()
        if field.type == FieldDescriptor.TYPE_FIXED64 and field.is_repeated and rng.random() < 0.7:
            return self._bytes(number, rng.randbytes(8 * rng.choice((0, 1, 2, 9))))
        if field.type in (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_DOUBLE):
            return self._tag(number, 1) + rng.randbytes(8)
        if field.type in (FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_FLOAT):
            return self._tag(number, 5) + rng.randbytes(4)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            return self._bytes(number, self.make(field.message_type, depth + 1))
        if field.type == FieldDescriptor.TYPE_BYTES and rng.random() < 0.7:
            return self._bytes(number, rng.randbytes(4 * rng.choice((0, 1, 16, 40))))
        return self._bytes(number, rng.choice(TEXTS))

    def _number(self) -> bytes:
        rng = self._rng
        value = rng.choice(VALUES) if rng.random() < 0.3 else rng.randrange(300)
        longer = rng.choice((1, 4, 9)) if rng.random() < self._hostile else 0
        return varint(value, longer)

    def _tag(self, number: int, kind: int) -> bytes:
        rng = self._rng
        if rng.random() < self._hostile:
            kind = rng.randrange(8)
        return varint(number << 3 | kind, rng.choice((1, 4)) if rng.random() < 0.01 else 0)

    def _bytes(self, number: int, content: bytes) -> bytes:
        rng, size = self._rng, len(content)
        if rng.random() < self._hostile / 4:
            size = rng.choice((0, max(0, size - 1), size + 1, 1 << 31, (1 << 35) - 1))
        return self._tag(number, 2) + varint(size) + content

    def _odd(self, depth: int) -> bytes:
        """A field that the type doesn't have, a group, or no field at all."""
        rng = self._rng
        number = rng.choice(NUMBERS) if rng.random() < 0.5 else rng.randrange(1, 32)
        match rng.randrange(6):
            case 0:
                return self._tag(number, 0) + self._number()
            case 1:
                return self._bytes(number, rng.choice(TEXTS))
            case 2:
                inner = self._odd(depth + 1) if depth < 6 else b""
                ends = number if rng.random() < 0.9 else number + 1
                return varint(number << 3 | 3) + inner + varint(ends << 3 | 4)
            case 3:
                levels = rng.choice((2, 50, 89, 90, 91, 100, 101))
                return varint(number << 3 | 3) * levels + varint(number << 3 | 4) * levels
            case 4:
                return varint(number << 3 | rng.randrange(8))
            case _:
                return rng.randbytes(rng.choice((1, 2, 5, 11)))


def mutated(content: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """The content after a few changes of bytes, numbers and slices."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xFF))
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 6))
            case 3:
                del data[at : at + rng.choice((1, 2, 8))]
            case 4:
                del data[at:]
            case 5:
                begin = rng.randrange(len(data) + 1)
                data[at:at] = data[begin : begin + rng.randrange(40)]
            case 6 if others:
                other = rng.choice(others)
                begin = rng.randrange(len(other) + 1)
                data[at:at] = other[begin : begin + rng.randrange(200)]
            case _:
                data[at:at] = varint(rng.choice(VALUES))
    return bytes(data[:100_000])


class Packed:
    """Random MessagePack: values of a kind that a reader expects, and any others."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def any(self, depth: int = 0) -> Any:
        rng = self._rng
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            lambda: rng.random() < 0.5,
            lambda: rng.choice((0, -1, 127, 128, -33, 1 << 31, 1 << 63, (1 << 64) - 1)),
            lambda: rng.choice((0.0, -1.5, float("nan"), float("inf"), 1e300)),
            lambda: rng.choice(("", "BlockStored", "gpu", "x" * 40, "x" * 300)),
            lambda: rng.randbytes(rng.choice((0, 1, 8, 32))),
            lambda: msgspec.msgpack.Ext(rng.randrange(-2, 100), rng.randbytes(rng.randrange(20))),
        ]
        if depth < 4 and rng.random() < 0.4:
            size = rng.choice((0, 1, 2, 5, 17))
            if rng.random() < 0.5:
                return [self.any(depth + 1) for _ in range(size)]
            return {rng.choice(("type", "v", "kind", "é", "z")): self.any(depth + 1)}
        return rng.choice(kinds)()

    def changed(self, value: Any) -> Any:
        """A value with one part of it replaced, dropped or given twice."""
        rng = self._rng
        if isinstance(value, dict) and value:
            key = rng.choice(list(value))
            if rng.random() < 0.1:
                return {name: inner for name, inner in value.items() if name != key}
            return value | {key: self.changed(value[key])}
        if isinstance(value, list) and value:
            at = rng.randrange(len(value))
            match rng.randrange(6):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return value[: at + 1] + value[at:]
                case _:
                    return [*value[:at], self.changed(value[at]), *value[at + 1 :]]
        return self.any(3)
