"""Protobuf's wire format: what it takes to put a message around bytes that are there already."""

from operator import index

VARINT = 0
BYTES = 2
_ONE = tuple(bytes((number,)) for number in range(0x80))


def varint(number: int) -> bytes:
    """A number, seven bits a byte, the lowest first."""
    if number < 0x80:
        return _ONE[number]
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
    """What stands before the bytes of a field; fields up to 15."""
    return _ONE[field << 3 | BYTES] + varint(size)


def uint(field: int, number: int) -> bytes:
    """A field of type uint32; fields up to 15. Raises TypeError, ValueError for no such number."""
    number = index(number)
    if not 0 <= number < 1 << 32:
        raise ValueError(f"{number} is outside 0 .. 2^32 - 1")
    return _ONE[field << 3 | VARINT] + varint(number)
