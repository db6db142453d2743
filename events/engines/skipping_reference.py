"""Skips MessagePack values without decoding them: the definition of events.engines.skipping.

The only state is the number of values still to come, at any depth of nesting. So a walk can stop
after any header and go on later, and a bomb of nested arrays costs no stack and no memory.
"""

_BYTES_AFTER = {0xCA: 4, 0xCB: 8}
_BYTES_AFTER |= {0xCC + i: 1 << i for i in range(4)}
_BYTES_AFTER |= {0xD0 + i: 1 << i for i in range(4)}
_BYTES_AFTER |= {0xD4 + i: (1 << i) + 1 for i in range(5)}
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_LENGTH_BYTES |= {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def skip(data: bytes, at: int, left: int, steps: int) -> tuple[int, int]:
    """Skips at most `steps` headers of the `left` values that begin at byte `at`.

    Returns the byte after them, and the number of values still to come: values of `left` that were
    not begun, and values inside those begun. Raises ValueError for bytes that end too soon, or that
    can't hold the number of values in a header before them.
    """
    if left > len(data) - at:
        raise ValueError("MessagePack that ends too soon")
    while left and steps:
        steps -= 1
        if at >= len(data):
            raise ValueError("MessagePack that ends too soon")
        first = data[at]
        at += 1
        size = _BYTES_AFTER.get(first, 0)
        inside = 0
        if first == 0xC1:
            raise ValueError("0xc1, which MessagePack never uses")
        if 0x80 <= first < 0x90:
            inside = 2 * (first & 15)
        elif 0x90 <= first < 0xA0:
            inside = first & 15
        elif 0xA0 <= first < 0xC0:
            size = first & 31
        elif length := _LENGTH_BYTES.get(first):
            if at + length > len(data):
                raise ValueError("MessagePack that ends too soon")
            number = int.from_bytes(data[at : at + length], "big")
            at += length
            if first >= 0xDC:
                inside = 2 * number if first >= 0xDE else number
            else:
                size = number + (0xC7 <= first <= 0xC9)
        at += size
        left += inside - 1
        if left > len(data) - at:  # each value takes a byte at least
            raise ValueError("MessagePack that ends too soon")
    return at, left
