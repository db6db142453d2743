"""Tool calls of stand-in engines: which function a request forces, and arguments that fit. Pure.

As engines under `tool_choice` do, the answer is one call of the function. Its arguments are JSON by
the function's schema: the required properties, with simple values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

DEPTH_MAX = 8
"""Most nested objects and references of a schema that are followed; a deeper value is null."""
READ_MAX = 1 << 16
"""Most characters of a schema's names, references and values that are read for one call, those that
several references share as often as they are read; more is refused."""
_SIMPLE: Mapping[str, Any] = {
    "string": "text", "integer": 0, "number": 0, "boolean": False, "array": [], "null": None,
}  # fmt: skip


class UnfitChoice(Exception):
    """A tool_choice that can't be followed: the message says why."""


class Function(msgspec.Struct):
    """A function as a chat's `tools` have it."""

    name: str
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The call that an answer consists of."""

    name: str
    arguments: str
    """JSON."""
    is_named: bool
    """The request named the function."""


def forced_call(functions: Sequence[Function], name: str | None) -> ForcedCall:
    """A call of the named function; name None: of the first function. Raises UnfitChoice."""
    for function in functions:
        if name in (None, function.name):
            arguments = msgspec.json.encode(_Arguments(function.parameters or {}).made()).decode()
            return ForcedCall(function.name, arguments, name is not None)
    if name is None:
        raise UnfitChoice("tool_choice needs tools, but the request has none")
    raise UnfitChoice(f"tool_choice names {name!r}, which is not in tools")


class _Arguments:
    """Makes arguments of one schema, from READ_MAX characters of it at most."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._left = READ_MAX

    def made(self) -> dict[str, Any]:
        """The arguments. Raises UnfitChoice if the schema makes them too long."""
        return self._object(self._root, 0)

    def _read(self, value: Any) -> Any:
        """The value itself, a part of the schema, counted."""
        self._left -= len(msgspec.json.encode(value))
        if self._left < 0:
            raise UnfitChoice(f"arguments of the schema need more than {READ_MAX} characters of it")
        return value

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        return {
            name: self._value(known.get(name), depth + 1)
            for name in map(self._read, names)
            if isinstance(name, str)
        }

    def _value(self, schema: Any, depth: int) -> Any:
        """A simple value that a JSON schema allows; keywords that are not read here are ignored."""
        if depth > DEPTH_MAX or not isinstance(schema, dict):
            return None
        if "const" in schema:
            return self._read(schema["const"])
        if isinstance(choices := schema.get("enum"), list) and choices:
            return self._read(choices[0])
        if isinstance(reference := schema.get("$ref"), str):
            return self._value(self._referred(self._read(reference)), depth + 1)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(choices := schema.get(keyword), list) and choices:
                return self._value(choices[0], depth + 1)
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = kind[0] if kind else None
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, depth)
        if kind in ("integer", "number"):
            return self._read(schema.get("minimum", 0))
        return _SIMPLE.get(kind) if isinstance(kind, str) else None

    def _referred(self, reference: str) -> Any:
        """What a reference into the schema names, such as #/$defs/Place; None: nothing."""
        place: Any = self._root
        for step in reference.removeprefix("#/").split("/"):
            place = place.get(step) if isinstance(place, dict) else None
        return place
