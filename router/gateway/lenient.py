"""Values of JSON, read as vLLM and SGLang read them: by pydantic's lax rules. Pure.

Law: a JSON value that pydantic accepts has the same value here, and every other one is None. The
engine judges a value that is None here.
"""

import re

import msgspec
from msgspec import Raw

_TEXT_MAX = 64
"""Most characters of a text that is read as a number or a flag."""
_DIGITS_MAX = 40
"""Most digits of a whole number; a longer one is over every bound of the callers, and is None."""
_WHOLE = re.compile(r"[+-]?(?:\d+_)*\d+(?:\.0+)?", re.ASCII)
_FLAGS = {
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
}
_text = msgspec.json.Decoder(str)


def text(raw: Raw | bytes) -> str | None:
    """Reads a JSON value as text; None: it is no text, or not valid Unicode."""
    if bytes(memoryview(raw)[:1]) != b'"':
        return None
    try:
        return _text.decode(raw)
    except (msgspec.DecodeError, UnicodeError):
        return None


def whole(raw: Raw | bytes) -> int | None:
    """Reads a JSON value as a whole number, such as 16, 16.0, 1.6e1, "16" or true (1); None: it is
    no whole number.
    """
    written = _scalar(raw)
    if written is None:
        return None
    if written in _LITERALS:
        value = _LITERALS[written]
        return None if value is None else int(value)
    if isinstance(written, str):
        written = written.strip()
        if not _WHOLE.fullmatch(written):
            return None
        return int(written.partition(".")[0])
    return _whole_number(written)


def flag(raw: Raw | bytes) -> bool | None:
    """Reads a JSON value as a boolean, such as true, 1, 1.0, "true", "on", "yes", and their
    opposites; None: it is no boolean.
    """
    written = _scalar(raw)
    if written is None:
        return None
    if written in _LITERALS:
        return _LITERALS[written]
    if isinstance(written, str):
        return _FLAGS.get(written.lower())
    number = _whole_number(written)
    return bool(number) if number in (0, 1) else None


_LITERALS: dict[bytes | str, bool | None] = {b"true": True, b"false": False, b"null": None}


def _scalar(raw: Raw | bytes) -> bytes | str | None:
    """A short JSON scalar, of at most _TEXT_MAX characters: a text as str, another as bytes; None:
    the value is longer, an object or a list."""
    view = memoryview(raw)
    first = bytes(view[:1])
    if first == b'"':
        # An escape has six bytes at most.
        value = text(raw) if len(view) <= 6 * _TEXT_MAX + 2 else None
        return value if value is not None and len(value) <= _TEXT_MAX else None
    return None if first in (b"[", b"{") or len(view) > _TEXT_MAX else bytes(view)


def _whole_number(written: bytes) -> int | None:
    if len(written) <= _DIGITS_MAX and written.lstrip(b"-").isdigit():
        return int(written)
    try:
        number = float(written)
    except ValueError:
        return None
    return int(number) if number.is_integer() and abs(number) < 1 << 63 else None
