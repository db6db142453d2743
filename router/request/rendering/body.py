"""Reads a request's body, once. Pure.

Law: bytes that are no readable body raise PromptError with a sentence, and nothing else.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from router.request.bodies import BodyFormat
from router.request.prompt_error import malformed, type_name

_DECODER = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Body:
    """A decoded body. Its values are as the client sent them; nothing in it is checked yet."""

    kind: BodyFormat
    fields: dict[str, Any]


def read_body(kind: BodyFormat, data: bytes) -> Body:
    """The body in these bytes; a text is read as the prompt of its format."""
    if kind.text_of is not None:
        return Body(kind.text_of, {"prompt": _text_of(data)})
    fields = _json_of(data)
    if not isinstance(fields, dict):
        raise malformed(f"the body is {type_name(fields)}, not an object")
    return Body(kind, fields)


def _text_of(data: bytes) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"the text is not UTF-8: {error.reason} at byte {error.start}") from error


def _json_of(data: bytes) -> Any:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise malformed(f"the body is not JSON that can be read: {error}") from error
    except UnicodeDecodeError as error:
        raise malformed(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise malformed("the body's arrays and objects are nested too deep") from error
