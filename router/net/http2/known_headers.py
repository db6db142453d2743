"""Decodes HPACK header blocks (RFC 7541), and keeps the fields of those decoded before. Pure.

Calls of one client differ little: their blocks are often the same bytes. A block's bytes mean the
same while no block changes the connection's dynamic table in between, so decoded fields are kept,
and the library decodes only blocks that are not known.

Laws:
- KNOWN_MAX blocks of at most BLOCK_MAX bytes are kept, whose fields have at most DECODED_MAX;
- a block that changes the table makes all of them unknown; one that changes the table's size more
  than SIZES_MAX times is not decoded.
"""

from hpack import Decoder, HPACKDecodingError

from router.net.http2.requests import Head

KNOWN_MAX = 64
BLOCK_MAX = 1024
"""Most bytes of a block whose fields are kept."""
DECODED_MAX = 4096
"""Most bytes of a block's fields that are kept, as Head.size counts them: a block may name fields
of the dynamic table again and again, which has so many bytes."""

INTEGER_MAX = 16
"""Most bytes of an HPACK integer behind its first byte; the library reads fewer."""
SIZES_MAX = 2
"""Most changes of the table's size in a block: to the least size and the last (RFC 7541, 4.2)."""
DECODED_WORK_SHIFT = 3
"""Decoding 2 to this power bytes of a block is 1 unit of work: see frames.TURN_WORK."""
FIELDS_WORK_SHIFT = 4
"""Reading 2 to this power bytes of decoded fields is 1 unit of work."""


class KnownHeaders:
    """The HPACK decoder of one connection, with a cache of decoded blocks."""

    def __init__(self, list_bytes_max: int, hard_max: int) -> None:
        """list_bytes_max: bytes of a block's fields, as Head.size counts them. hard_max: bytes of
        its fields, plus 32 for each, past which the block is not decoded to its end.
        """
        self._bytes_max = list_bytes_max
        self._decoder = Decoder(max_header_list_size=hard_max)
        self._known: dict[bytes, Head] = {}
        self.work = 0
        """Work of decoding the last block; 0: it was known. See frames.TURN_WORK."""

    def read(self, block: bytes) -> Head | None:
        """Decoded fields of a block, in their order. None: they exceed list_bytes_max. Raises
        HPACKError, also past hard_max: then no further block can be decoded.
        """
        known = self._known.get(block)
        if known is not None:
            self.work = 0
            return known
        self.work = len(block) >> DECODED_WORK_SHIFT
        _check_sizes(block)
        keeps = keeps_table(block)
        if not keeps:
            self._known.clear()
        fields = []
        size = 0
        for name, value in self._decoder.decode(block, raw=True):
            size += len(name) + len(value) + 32
            if name.endswith(b"-bin"):
                size += (len(name) + 32) * value.count(b",")
            fields.append((_text(name), _text(value).strip(" \t")))
        self.work += size >> FIELDS_WORK_SHIFT
        if size > self._bytes_max:
            return None
        head = Head(fields, size)
        if keeps and len(block) <= BLOCK_MAX and size <= DECODED_MAX:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[block] = head
        return head


def _check_sizes(block: bytes) -> None:
    """Raises HPACKDecodingError for a block that begins with too many sizes of the table."""
    at = count = 0
    while at < len(block) and block[at] & 0xE0 == 0x20:
        count += 1
        if count > SIZES_MAX:
            raise HPACKDecodingError("a header block changes the size of the table too often")
        at = _after_integer(block, at, 0x1F)


def keeps_table(block: bytes) -> bool:
    """Whether a block leaves the dynamic table as it is. False for a block that is cut off."""
    at, end = 0, len(block)
    while at < end:
        first = block[at]
        if first & 0x80:  # indexed field
            at = _after_integer(block, at, 0x7F)
        elif first & 0x60:  # literal field that is added to the table, or the table's new size
            return False
        else:
            indexed = first & 0x0F
            at = _after_integer(block, at, 0x0F)
            if not indexed:
                at = _after_string(block, at)
            at = _after_string(block, at)
    return at == end


def _after_integer(block: bytes, at: int, most: int) -> int:
    """Offset behind the HPACK integer at offset `at`; past the block's end if it is cut off. most:
    the integer's prefix with all bits set."""
    if at >= len(block):
        return len(block) + 1
    at += 1
    if block[at - 1] & most != most:
        return at
    last = at + INTEGER_MAX
    while at < len(block) and block[at] & 0x80:
        if at == last:
            return len(block) + 1
        at += 1
    return at + 1


def _after_string(block: bytes, at: int) -> int:
    """Offset behind the HPACK string at offset `at`, Huffman-coded or not; past the block's end if
    it is cut off."""
    after = _after_integer(block, at, 0x7F)
    if after > len(block):
        return after
    size = block[at] & 0x7F
    if size == 0x7F:
        for i, byte in enumerate(block[at + 1 : after]):
            size += (byte & 0x7F) << 7 * min(i, 5)
    return after + size


def _text(value: bytes) -> str:
    return str(value, errors="replace")
