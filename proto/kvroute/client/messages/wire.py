"""The part of protobuf's wire format that puts a message around existing bytes."""

VARINT = 0
BYTES = 2
_BYTE = tuple(bytes((number,)) for number in range(0x80))


def varint(number: int) -> bytes:
    """A number in protobuf's varint form: seven bits a byte, the lowest first."""
    if number < 0x80:
        return _BYTE[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if number < 0x200000:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*groups, number))


def head(field: int, size: int) -> bytes:
    """The tag and length before the bytes of a field."""
    return varint(field << 3 | BYTES) + varint(size)
