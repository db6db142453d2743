"""Reads the bytes of a NATS server. Pure: bytes in, frames out.

    MSG subject sid [reply] bytes CRLF payload CRLF
    HMSG subject sid [reply] header-bytes bytes CRLF headers payload CRLF
    any other line: PING, PONG, INFO {...}, +OK, -ERR '...'

Laws:
- subjects, headers and payloads are bytes of a publisher's choice: nothing in them raises, and
  nothing in them is taken for another field or another frame;
- bytes that no server sends raise WireError, after which the connection can't be read further.
"""

from collections.abc import Iterator

from nats.errors import ProtocolError

LINE_BYTES_MAX = 1 << 20
"""Bytes of a line. An INFO line names every server of a cluster; others are below 8 KiB."""
PAYLOAD_BYTES_MAX = 64 << 20
"""Bytes of a payload: the largest limit that a NATS server can be configured with."""
_END = b"\r\n"


class WireError(ProtocolError):
    """Bytes that no NATS server sends; the message says why."""


Message = tuple[int, bytes, bytes, bytes, bytes]
"""A published message: (number of our subscription, subject, subject to reply on, headers,
payload). A tuple, since no object is cheaper to make."""


class Frames:
    """Cuts the bytes of one NATS connection into frames."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 1
        """Bytes that must have come before the next frame can be whole."""

    def feed(self, data: bytes) -> Iterator[Message | bytes]:
        """The frames that this data completes: messages, and other lines as they are.

        Iterate to the end before the next call. Raises WireError.
        """
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        data = b"".join(self._parts)
        self._parts.clear()
        at = 0
        need = 1
        while at < len(data):
            line_end = data.find(_END, at)
            if line_end < 0:
                if len(data) - at > LINE_BYTES_MAX:
                    raise WireError(
                        f"the NATS server sent a line of more than {LINE_BYTES_MAX} bytes"
                    )
                need = len(data) - at + 1
                break
            line = data[at:line_end]
            start = line_end + 2
            if line[:4] == b"MSG " or line[:5] == b"HMSG ":
                sid, subject, reply, header_bytes, size = _head(line)
                stop = start + size
                if len(data) < stop + 2:
                    need = stop + 2 - at
                    break
                if data[stop : stop + 2] != _END:
                    raise WireError(
                        "the NATS server sent a message that is longer than its head says"
                    )
                middle = start + header_bytes
                yield sid, subject, reply, data[start:middle], data[middle:stop]
                at = stop + 2
            else:
                yield line
                at = start
        rest = data[at:]
        if rest:
            self._parts.append(rest)
        self._have = len(rest)
        self._need = need


def _head(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """Fields of a MSG or HMSG line: (sid, subject, reply, bytes of headers, bytes of headers and
    payload). Raises WireError."""
    # A server separates fields with one space, and no field has a space in it.
    fields = line.split(b" ")
    try:
        header_bytes = int(fields.pop(-2)) if fields[0] == b"HMSG" else 0
        size = int(fields[-1])
        sid = int(fields[2])
    except (ValueError, IndexError):
        raise WireError(f"the NATS server sent no valid message head: {line[:80]!r}") from None
    if not 4 <= len(fields) <= 5 or not 0 <= header_bytes <= size <= PAYLOAD_BYTES_MAX:
        raise WireError(f"the NATS server sent no valid message head: {line[:80]!r}")
    return sid, fields[1], fields[3] if len(fields) == 5 else b"", header_bytes, size
