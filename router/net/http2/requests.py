"""Reads decoded header fields as a gRPC request (RFC 9113, 8.1 to 8.3; gRPC over HTTP2). Pure.

Laws:
- a request is POST with one :path and one :scheme, pseudo-headers before all other fields, names in
  lower case, values without line breaks, no connection-specific fields; all else is malformed;
- metadata has an entry for each value: a name that comes twice has two, `-bin` values are split at
  commas and decoded.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Sequence

Field = tuple[str, str]

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BROKEN = re.compile("[\0\r\n]").search
_OF_A_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
)
_PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))
_RESERVED = frozenset(
    ("te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")
)
_GRPC = "application/grpc"
_UNITS_S = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "S": 1.0, "M": 60.0, "H": 3600.0}
PASSED = "the call's deadline passed before its answer"
"""Status message of a call whose grpc-timeout is over, with DEADLINE_EXCEEDED."""


class Head:
    """The fields of a header block, read as the headers of a request."""

    __slots__ = (
        "content_length", "encoding", "fault", "fields", "is_grpc", "metadata", "path",
        "size", "timeout_fault", "timeout_s",
    )  # fmt: skip

    def __init__(self, fields: Sequence[Field], size: int = 0) -> None:
        self.fields = fields
        self.size = size
        """Bytes of the fields, plus 32 for each (RFC 9113, 6.5.2); each value of a `-bin` name
        counts as a field."""
        self.fault = _fault(fields)
        """Why the fields are no valid request; empty: they are."""
        values = dict(fields)
        self.path = values.get(":path", "")
        content_type = values.get("content-type", "")
        self.is_grpc = content_type == _GRPC or content_type.startswith((_GRPC + "+", _GRPC + ";"))
        self.encoding = values.get("grpc-encoding", "identity")
        timeout = values.get("grpc-timeout")
        self.timeout_s = None if timeout is None else timeout_s(timeout)
        """Seconds from these headers to the call's deadline; None: it has none."""
        self.timeout_fault = ""
        """What is wrong with the call's timeout; empty: nothing."""
        if timeout is not None and self.timeout_s is None:
            self.timeout_fault = f"the header grpc-timeout has no valid value: {timeout[:32]!r}"
        self.content_length = int(values["content-length"]) if _length(values) else None
        self.metadata = _metadata(fields)
        """(name, value) of each value: text, or bytes for a `-bin` name; None: a value of a `-bin`
        name is no base64."""


def timeout_s(text: str) -> float | None:
    """Seconds of a `grpc-timeout` value, up to 8 digits and one of n, u, m, S, M, H; None: it is
    invalid."""
    unit = _UNITS_S.get(text[-1:])
    digits = text[:-1]
    if unit is None or not digits.isascii() or not digits.isdigit() or len(digits) > 8:
        return None
    return int(digits) * unit


def trailers_fault(fields: Iterable[Field]) -> str:
    """Why these fields are no valid trailers of a request; empty: they are."""
    for name, value in fields:
        if name.startswith(":"):
            return "a pseudo-header in trailers"
        if trouble := _field_fault(name, value):
            return trouble
    return ""


def _fault(fields: Iterable[Field]) -> str:
    pseudo: dict[str, str] = {}
    lengths = set()
    regular = False
    for name, value in fields:
        if not name.startswith(":"):
            regular = True
            if trouble := _field_fault(name, value):
                return trouble
            if name == "content-length":
                lengths.add(value)
        elif regular:
            return "a pseudo-header behind other fields"
        elif name in pseudo:
            return f"{name} twice"
        elif name not in _PSEUDO:
            return "an unknown pseudo-header"
        elif _BROKEN(value):
            return "a line break in a value"
        else:
            pseudo[name] = value
    if pseudo.get(":method") != "POST":
        return "a :method that is not POST"
    if not pseudo.get(":scheme"):
        return "no :scheme"
    if not pseudo.get(":path", "").startswith("/"):
        return "a :path that does not begin with /"
    if len(lengths) > 1 or not all(_digits(length) for length in lengths):
        return "several values of content-length, or an invalid one"
    return ""


def _field_fault(name: str, value: str) -> str:
    if not _NAME(name):
        return "an invalid name of a field"
    if _BROKEN(value):
        return "a line break in a value"
    if name in _OF_A_CONNECTION or (name == "te" and value != "trailers"):
        return f"the connection-specific field {name}"
    return ""


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _length(values: dict[str, str]) -> bool:
    return _digits(values.get("content-length", ""))


def _metadata(fields: Iterable[Field]) -> tuple[tuple[str, str | bytes], ...] | None:
    entries: list[tuple[str, str | bytes]] = []
    try:
        for name, value in fields:
            if name.startswith(":") or name in _RESERVED:
                continue
            if name.endswith("-bin"):
                entries += [(name, _binary(part)) for part in value.split(",")]
            else:
                entries.append((name, value))
    except (binascii.Error, ValueError):
        return None
    return tuple(entries)


def _binary(value: str) -> bytes:
    value = value.strip(" \t").rstrip("=")
    return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
