"""Keys of a configuration: where each value stands, and its names in the three sources.

Every scalar key has three names: `section.key` in the YAML file, `KVROUTE_SECTION_KEY` in the
environment, `--section-key` on the command line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from events.plane.settings import Settings


class ConfigError(ValueError):
    """A mistake in the configuration: one sentence that names the key and its place."""


ENVIRONMENT_PREFIX = "KVROUTE_"


@dataclass(frozen=True)
class Key:
    """A scalar key of the configuration."""

    path: tuple[str, ...]
    type: Any
    default: object
    description: str
    secret: bool
    first_week: bool
    """Whether most operators set the key before others: such keys are in commands' help, and at
    the head of docs/reference-configuration.md."""

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + "_".join(self.path).upper()

    @property
    def flag(self) -> str:
        return flag_of(self.path)


def flag_of(path: tuple[str, ...]) -> str:
    return "--" + "-".join(path).replace("_", "-")


@cache  # there are few classes, and reading their types takes milliseconds, often at each start
def keys(config: type[Settings]) -> tuple[Key, ...]:
    """All keys of a configuration, in order, without those inside entries of its lists."""
    return tuple(_keys(config, ()))


def _keys(config: type[Settings], prefix: tuple[str, ...]) -> Iterator[Key]:
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        hint = hints[field.name]
        meta = Meta()
        while get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            for extra in extras:
                if isinstance(extra, Meta) and (extra.description or extra.extra_json_schema):
                    meta = extra
        if isinstance(hint, type) and issubclass(hint, Settings):
            yield from _keys(hint, (*prefix, field.name))
            continue
        marks = meta.extra_json_schema or {}
        path = (*prefix, field.name)
        secret, first_week = bool(marks.get("secret")), bool(marks.get("first_week"))
        yield Key(path, hint, field.default, meta.description or "", secret, first_week)


def put_value(tree: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def value_at(tree: Any, path: tuple[str, ...]) -> object:
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree
