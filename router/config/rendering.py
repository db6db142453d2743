"""A configuration as YAML, for people: without its secrets. Pure."""

import re
from typing import Any

import msgspec
import yaml

from events.plane.settings import Settings
from router.config.keys import keys, put_value, value_at


def render(config: Settings) -> str:
    """The configuration as YAML, secrets masked; what `serve` prints at its start."""
    tree = msgspec.to_builtins(config)
    for key in keys(type(config)):
        if key.secret and value_at(tree, key.path) is not None:
            put_value(tree, key.path, "***")
    url = value_at(tree, ("nats", "url"))
    if isinstance(url, str) and "://" not in url:  # NATS takes it without a scheme
        put_value(tree, ("nats", "url"), re.sub(r"^.*@", "***@", url))
    return yaml.safe_dump(_masked(tree), sort_keys=False, default_flow_style=False)


_USER_INFO = re.compile(r"(?<=://)\S*@")


def _masked(tree: Any) -> Any:
    """A tree whose URLs have no user and no password."""
    match tree:
        case str():
            return _USER_INFO.sub("***@", tree)
        case dict():
            return {name: _masked(value) for name, value in tree.items()}
        case list() | tuple():
            return [_masked(value) for value in tree]
        case _:
            return tree
