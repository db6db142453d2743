"""Every key of every program's configuration."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec import inspect

from router.config.keys import keys
from router.config.settings.configurations import (
    GatewayConfig,
    PickerConfig,
    RelayConfig,
    ServeConfig,
)
from tests.docs.reference.markdown import cell, code

HEAD = """# Configuration

Every key of the programs' YAML files with its type, bounds and default in brackets, made by
`python -m tests.docs.reference`. A key without a default is required; `null` means unset. A default
without a type is a text, `true` or `false`.

A key such as `grpc.listen` is also the variable `KVROUTE_GRPC_LISTEN` and the flag
`--grpc-listen`. Flags win over variables, and variables over the file. Keys of lists
(`workers[].id`) and of maps (`routing.parameters`) stand in the file alone.

*To set in the first week*, as `kvroute serve --help` lists them: {first}.
"""
PROGRAMS = {
    "kvroute serve": ServeConfig,
    "kvroute relay": RelayConfig,
    "kvroute gateway": GatewayConfig,
    "kvroute picker": PickerConfig,
}
DEFAULT_CHARS = 60
"""A longer default is left to check-config."""
SECTION_KEYS = 6
"""Keys from which on a section has a list of its own."""


class Row(NamedTuple):
    """A key."""

    name: str
    kind: str
    default: str
    """As JSON; empty: the key is required, or its default is too long."""
    meaning: str


def page() -> str:
    first = ", ".join(code(key.dotted) for key in keys(ServeConfig) if key.first_week)
    lines = [HEAD.format(first=first)]
    above: set[Row] = set()
    for program, config in PROGRAMS.items():
        rows = list(rows_of(config))
        lines += [f"## {program}", ""]
        shared = sorted({row.name.split(".")[0] for row in rows if row in above})
        if shared:
            lines += [f"Keys that stand above: {', '.join(map(code, shared))}.", ""]
        fresh = [row for row in rows if row not in above]
        above |= set(rows)
        for section, own in _sections(_without_twins(fresh)).items():
            if section:
                lines += [f"### {program.split()[1]}: {section}", ""]
            lines += [*map(_line, own), ""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    kind = "" if row.default and row.kind in ("text", "bool") else row.kind
    about = "; ".join(filter(None, (kind, code(row.default))))
    return f"- {code(row.name)} ({about}): {cell(row.meaning)}"


def _without_twins(rows: list[Row]) -> list[Row]:
    """Without keys of a map's entries whose section stands beside it, such as `default`."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for row in rows:
        twin = (row.name.rpartition(".")[2], *row[1:])
        if "[]." not in row.name or twin not in seen:
            kept.append(row)
        seen.add(twin)
    return kept


def _sections(rows: list[Row]) -> Mapping[str, list[Row]]:
    """By the first part of the names; keys of no section, and of small ones, first."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        first, dot, _ = row.name.partition(".")
        sections.setdefault(first if dot else "", []).append(row)
    small = [own for name, own in sections.items() if not name or len(own) < SECTION_KEYS]
    large = {name: own for name, own in sections.items() if name and len(own) >= SECTION_KEYS}
    together = [row for own in small for row in own]
    return {"": together, **large} if together else large


def rows_of(config: type) -> Iterator[Row]:
    """Keys in their order, those of lists too."""
    kind = inspect.type_info(config)
    if not isinstance(kind, inspect.StructType):
        raise TypeError(f"{config} is no configuration")
    return _rows(kind, "")


def _rows(struct: inspect.StructType, above: str) -> Iterator[Row]:
    for field in struct.fields:
        name, meaning, kind = f"{above}{field.name}", "", field.type
        while isinstance(kind, inspect.Metadata):
            meaning = (kind.extra_json_schema or {}).get("description", meaning)
            kind = kind.type
        if isinstance(kind, inspect.StructType):
            yield from _rows(kind, f"{name}.")
            continue
        default = _default(field)
        words = _kind(kind)
        if default == "null":
            words = words.removesuffix(" or null")
        yield Row(name, words, default, meaning)
        item = _item(kind)
        if item is not None:
            yield from _rows(item, f"{name}[].")


def _item(kind: inspect.Type) -> inspect.StructType | None:
    """The structure that a list or a map holds."""
    inner: inspect.Type | None = None
    if isinstance(kind, inspect.VarTupleType):
        inner = kind.item_type
    elif isinstance(kind, inspect.DictType):
        inner = kind.value_type
    elif isinstance(kind, inspect.UnionType):
        return next(filter(None, map(_item, kind.types)), None)
    while isinstance(inner, inspect.Metadata):
        inner = inner.type
    return inner if isinstance(inner, inspect.StructType) else None


def _default(field: inspect.Field) -> str:
    value = field.default
    if value is inspect.NODEFAULT and field.default_factory is not inspect.NODEFAULT:
        value = field.default_factory()
    if value is inspect.NODEFAULT:
        return ""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= DEFAULT_CHARS else ""


def _kind(kind: inspect.Type) -> str:
    """A type in words, with its bounds."""
    match kind:
        case inspect.Metadata():
            return _kind(kind.type)
        case inspect.BoolType():
            return "bool"
        case inspect.IntType() | inspect.FloatType():
            name = "integer" if isinstance(kind, inspect.IntType) else "number"
            return name + _bounds(kind)
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case inspect.EnumType():
            return ", ".join(code(str(member.value)) for member in kind.cls)
        case inspect.LiteralType():
            return ", ".join(code(str(value)) for value in kind.values)
        case inspect.UnionType():
            return " or ".join(map(_kind, kind.types))
        case inspect.VarTupleType() | inspect.TupleType():
            inner = kind.item_type if isinstance(kind, inspect.VarTupleType) else None
            return "list" if inner is None or _item(kind) else f"list of: {_kind(inner)}"
        case inspect.DictType():
            return "map" if _item(kind) else f"map to: {_kind(kind.value_type)}"
        case inspect.StructType():
            return "keys"
        case inspect.AnyType():
            return "any"
    raise TypeError(f"a type without words: {kind}")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    least = kind.ge if kind.ge is not None else kind.gt
    most = kind.le if kind.le is not None else kind.lt
    parts = []
    if least is not None:
        word = "over " if kind.ge is None else "" if most is not None else "from "
        parts.append(f"{word}{_number(least)}")
    if most is not None:
        parts.append(f"{'below' if kind.le is None else 'to'} {_number(most)}")
    return f" {' '.join(parts)}" if parts else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
