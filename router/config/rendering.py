"""A configuration as YAML, for people: without its secrets. Pure."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from events.plane.settings import Settings
from router.config.keys import keys, put_value, value_at

LISTED_MAX = 8
"""Most entries of a list that a log line names."""
_VALUE_CHARS_MAX = 120


def render(config: Settings) -> str:
    """The configuration as YAML, secrets masked; what `check-config` prints."""
    return yaml.safe_dump(_tree(config), sort_keys=False, default_flow_style=False)


def brief(config: Settings) -> str:
    """The keys that are not at their defaults, with their values, in one line for a log; secrets
    are masked. A list of workers or models is shown by its length and its first names.
    """
    return ", ".join(_differing(_tree(config), _tree(type(config)()), "")) or "all defaults"


def _differing(tree: Any, default: Any, where: str) -> Iterator[str]:
    if tree == default:
        return
    if isinstance(tree, dict) and isinstance(default, dict) and tree.keys() == default.keys():
        for name, value in tree.items():
            yield from _differing(value, default[name], f"{where}.{name}" if where else name)
        return
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        names = [str(entry.get("id", entry.get("name", "?"))) for entry in tree[:LISTED_MAX]]
        more = ", ..." if len(tree) > LISTED_MAX else ""
        yield f"{where}={len(tree)} ({', '.join(names)}{more})"
        return
    text = msgspec.json.encode(tree).decode()
    cut = "..." if len(text) > _VALUE_CHARS_MAX else ""
    yield f"{where}={text[:_VALUE_CHARS_MAX]}{cut}"


def _tree(config: Settings) -> Any:
    """The configuration as plain values, secrets masked."""
    tree = msgspec.to_builtins(config)
    for key in keys(type(config)):
        if key.secret and value_at(tree, key.path) is not None:
            put_value(tree, key.path, "***")
    url = value_at(tree, ("nats", "url"))
    if isinstance(url, str) and "://" not in url:  # NATS takes it without a scheme
        put_value(tree, ("nats", "url"), re.sub(r"^.*@", "***@", url))
    return _masked(tree)


_USER_INFO = re.compile(r"(?<=://)\S*@")


def _masked(tree: Any) -> Any:
    """The tree of values, with *** for the user and password of each URL."""
    match tree:
        case str():
            return _USER_INFO.sub("***@", tree)
        case dict():
            return {name: _masked(value) for name, value in tree.items()}
        case list() | tuple():
            return [_masked(value) for value in tree]
        case _:
            return tree
