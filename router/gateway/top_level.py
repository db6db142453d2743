"""The top level of a JSON object, as bytes: its values by name, and changes to it. Pure.

Laws:
- a name counts however it is escaped, and of a name that occurs twice the last value counts, as in
  the parsers of engines;
- a change parses the bytes REPEATS_MAX + 1 times at most, however many fields they have.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from router.gateway.refusals import GatewayRefusal

REPEATS_MAX = 2
"""Most times that a body may repeat a field which is replaced."""
_SPACE = b" \t\r\n"
_NO_SPACE = re.compile(rb"[^ \t\r\n]")

Fields = TypeVar("Fields", bound=msgspec.Struct)


def decoded(decoder: msgspec.json.Decoder[Fields], body: bytes) -> tuple[Fields, bytes]:
    """The fields of a body, each a Raw, and the bytes that they are slices of: the body, or a copy
    of the same length with numbers for NaN and Infinity, which engines accept as Python's parser
    does. Raises GatewayRefusal for a body that is no JSON object."""
    try:
        return decoder.decode(body), body
    except msgspec.ValidationError as error:
        raise GatewayRefusal("INVALID_BODY", f"the body can't be read: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        sentence = f"the body is no JSON: {error}"
    read = body.replace(b"NaN", b"0e0").replace(b"Infinity", b"0.000000")
    try:
        return decoder.decode(read), read
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise GatewayRefusal("INVALID_BODY", sentence) from None


def span(value: Raw, within: bytes) -> tuple[int, int]:
    """Start and end of a decoded value in `within`, the bytes that it was decoded from."""
    start = _address(value) - _address(within)
    return start, start + len(memoryview(value))


def changed(
    body: bytes,
    fields: Mapping[str, Any],
    *,
    known: Mapping[str, tuple[int, int]] | None = None,
    absent: bool = False,
) -> bytes:
    """The body with `fields` set at its top level, in place of its own of the same names; UNSET
    removes a field. All other bytes stay. known: field -> start and end of its last value, for some
    of the fields. absent: the body has none of them. Raises GatewayRefusal, see REPEATS_MAX."""
    if not fields:
        return body
    rest = body
    if not absent:
        names = tuple(fields)
        if spans := sorted(place for name in names if (place := (known or {}).get(name))):
            rest = _cut(body, spans)
        rest = _without(rest, names) if not spans or _may_have(rest, names) else rest
    added = {name: value for name, value in fields.items() if value is not UNSET}
    if not added:
        return rest
    start = rest.index(b"{") + 1
    at = _after_space(rest, start)
    separator = b"" if rest[at : at + 1] == b"}" else b","
    view = memoryview(rest)  # whose slices are no copies
    return b"".join((view[:start], msgspec.json.encode(added)[1:-1], separator, view[start:]))


def _without(body: bytes, names: tuple[str, ...]) -> bytes:
    decoder = _decoder(names)
    for more in range(REPEATS_MAX, -1, -1):
        fields, read = decoded(decoder, body)
        values = [value for name in names if (value := getattr(fields, name)) is not UNSET]
        if not values:
            return body
        if not more:
            break
        body = _cut(body, sorted(span(value, read) for value in values))
        if not _may_have(body, names):
            return body
    message = f"the body has one of the fields {', '.join(names)} more than {REPEATS_MAX} times"
    raise GatewayRefusal("INVALID_BODY", message)


def _may_have(body: bytes, names: tuple[str, ...]) -> bool:
    """Whether a body may have a field with one of the names; True: only parsing it can tell."""
    # Searches for one byte, and for a name without its quotes, are fast.
    if len(names) > 4 or (b"\\" in body and b"\\u" in body):
        return True
    return any(name.encode() in body for name in names)


def _cut(body: bytes, values: list[tuple[int, int]]) -> bytes:
    """Removes the members with values at these places from a body, and the commas behind them."""
    view, at = memoryview(body), 0
    kept: list[bytes | memoryview] = []
    for start, end in values:
        # Nothing but space and a colon is between a name and its value, and no name that is cut has
        # a quote in it, escaped or not.
        closing = body.rfind(b'"', 0, body.rfind(b":", 0, start))
        kept.append(view[at : body.rfind(b'"', 0, closing)])
        at = _after_space(body, end)
        if body[at : at + 1] == b",":
            at += 1
        else:  # the last member: what is before it has no comma any more
            kept = [b"".join(kept).rstrip(_SPACE).removesuffix(b",")]
    kept.append(view[at:])
    return b"".join(kept)


def _after_space(body: bytes, at: int) -> int:
    match = _NO_SPACE.search(body, at)
    return match.start() if match else len(body)


@lru_cache(maxsize=64)
def _decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    fields = [(name, Raw | UnsetType, UNSET) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Some", fields))


def _address(view: Raw | bytes) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
