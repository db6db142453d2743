"""Sentences about mistakes in settings: what is wrong, and what to write. Pure.

Law: each sentence names the key and its place; an unknown key is followed by the most similar known
key, and a value outside a list by the list.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<name>.*?)`( - at `\$(?P<at>.*)`)?", re.DOTALL
)
_NO_CHOICE = re.compile(r"Invalid enum value (?P<name>.*) - at `\$(?P<at>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(?:\d+|\.\.\.)\]")


def of_value(error: msgspec.ValidationError, settings: type[msgspec.Struct]) -> str:
    """Sentence about a value that `settings` can't have, made of msgspec's error."""
    text = str(error)
    if unknown := _UNKNOWN.fullmatch(text):
        at, name = unknown["at"] or "", unknown["name"]
        hints = [_fields(hint) for hint in _options(_hint_at(settings, at))]
        known = [field for fields in hints for field in fields]
        return f"unknown key `{name}`{nearest(name, known)} - at `${at}`"
    if choice := _NO_CHOICE.fullmatch(text):
        hints = _options(_hint_at(settings, choice["at"]))
        values = [str(value) for hint in hints for value in _choices(hint)]
        name = choice["name"].strip("'")
        hint = nearest(name, values)
        return f"{choice['name']} is none of {', '.join(values)}{hint} - at `${choice['at']}`"
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean ...?` for a name that is near to a known one; else nothing."""
    spelled = {key.lower(): key for key in known}
    near = get_close_matches(name[:100].lower(), spelled, n=1, cutoff=0.6)
    return f", did you mean `{spelled[near[0]]}`?" if near else ""


def _hint_at(settings: type[msgspec.Struct], at: str) -> Any:
    """The type of the value at a path, such as `.workers[0].engine`; None: no such path."""
    hint: Any = settings
    for step in _STEP.finditer(at):
        inner = [_inner(option, step[1]) for option in _options(hint)]
        hint = next((option for option in inner if option is not None), None)
    return hint


def _inner(hint: Any, name: str | None) -> Any:
    """The type of a section's key `name`; name None: of a list's entries, or of a map's values."""
    if name is not None:
        return _fields(hint).get(name)
    items = get_args(hint)
    return items[-1 if get_origin(hint) is dict else 0] if items else None


def _options(hint: Any) -> list[Any]:
    """The types in a type hint, taken out of Annotated and Union; None left out."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        return [inner for option in get_args(hint) for inner in _options(option)]
    return [] if hint in (None, type(None)) else [hint]


def _fields(hint: Any) -> dict[str, Any]:
    is_section = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
    return get_type_hints(hint, include_extras=True) if is_section else {}


def _choices(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return tuple(member.value for member in hint)
    return get_args(hint) if get_origin(hint) is Literal else ()
