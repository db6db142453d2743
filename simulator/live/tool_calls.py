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
            schema = function.parameters or {}
            arguments = msgspec.json.encode(_object(schema, schema, 0)).decode()
            return ForcedCall(function.name, arguments, name is not None)
    if name is None:
        raise UnfitChoice("tool_choice needs tools, but the request has none")
    raise UnfitChoice(f"tool_choice names {name!r}, which is not in tools")


def _object(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return {
        name: _value(known.get(name), root, depth + 1) for name in names if isinstance(name, str)
    }


def _value(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    """A simple value that a JSON schema allows; keywords that are not read here are ignored."""
    if depth > DEPTH_MAX or not isinstance(schema, dict):
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if isinstance(reference := schema.get("$ref"), str):
        return _value(_referred(reference, root), root, depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(keyword), list) and choices:
            return _value(choices[0], root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, root, depth)
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    return _SIMPLE.get(kind) if isinstance(kind, str) else None


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the same schema names, such as #/$defs/Place; None: nothing."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place
