"""Replaces types of databases and programming languages in a tool's parameters, such as varchar, by
types of JSON Schema, as SGLang does before its template prints them. Pure.

The names are those of SGLang 0.5.23 (sglang/srt/function_call/utils.py, read 2026-11-22).
"""

from typing import Any

STANDARD = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_NAMES = {
    **dict.fromkeys(
        (
            *("str", "text", "varchar", "char", "enum", "uuid", "date", "datetime", "time"),
            *("timestamp", "binary", "blob", "bytea", "bytes", "varbinary"),
        ),
        "string",
    ),
    "bool": "boolean",
    **dict.fromkeys(("bigint", "smallint", "tinyint"), "integer"),
    **dict.fromkeys(("double", "decimal", "real", "numeric"), "number"),
    **dict.fromkeys(("arr", "tuple", "set"), "array"),
    "map": "object",
}
_BEGINNINGS = {
    **dict.fromkeys(("int", "uint", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("num", "float"), "number"),
    "list": "array",
    "dict": "object",
}
"""Standard types by names that a size or an element type may follow, as in int32 and list[str]."""
_ENDS = frozenset("0123456789[<( \t")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = frozenset(
    {
        *("items", "additionalProperties", "not", "if", "then", "else", "contains"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    }
)


def with_standard_types(schema: Any) -> Any:
    """A copy of a JSON Schema with its types replaced by standard ones."""
    if isinstance(schema, list):
        return [with_standard_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _value(key, value) for key, value in schema.items()}


def _value(key: str, value: Any) -> Any:
    if key == "type":
        return _types(value) if isinstance(value, list) else _type(value)
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: with_standard_types(inner) for name, inner in value.items()}
    if key in _OF_LISTS and isinstance(value, list):
        return [with_standard_types(inner) for inner in value]
    return with_standard_types(value) if key in _OF_ONE else value


def _types(names: list[Any]) -> list[Any]:
    result: list[Any] = []
    for name in map(_type, names):
        if name not in result:
            result.append(name)
    return result


def _type(name: Any) -> Any:
    if not isinstance(name, str) or name in STANDARD:
        return name
    base = name.split("(", 1)[0].strip().lower()
    if base in STANDARD:
        return base
    if base in _NAMES:
        return _NAMES[base]
    for beginning, standard in _BEGINNINGS.items():
        rest = base.removeprefix(beginning)
        if rest != base and (not rest or rest[0] in _ENDS):
            return standard
    return name
