"""Where each value of a configuration came from, for `kvroute check-config`. Pure.

Law: the annotated text is YAML of the same configuration; the sources are in its comments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
"""Path of a value: names of sections and keys, numbers of entries in lists."""
_COMMENT_COLUMN = 48


@dataclass(frozen=True, slots=True)
class Sources:
    """The layers that a configuration was made of."""

    file: str
    """Path of the file; empty: there was none."""
    given: Mapping[str, Any]
    """The configuration of file, environment and flags together."""
    variables: Mapping[KeyPath, str]
    """Key -> name of the variable of the environment that sets the key."""
    flags: Mapping[KeyPath, str]
    """Key -> the flag that sets the key."""
    preset: str
    """The word `preset` and the preset's name, as it is printed."""
    preset_sets: Mapping[str, Any]
    """The values that the preset sets, as a tree from the root on; empty: there is no preset."""

    def of(self, path: KeyPath) -> str:
        """The source of a value: the flag, the variable, the file, the preset, or `default`."""
        if _has(self.given, path):
            prefixes = [path[:length] for length in range(len(path) + 1)]
            for names in (self.flags, self.variables):
                for prefix in prefixes:
                    if prefix in names:
                        return names[prefix]
            return self.file
        return self.preset if _has(self.preset_sets, path) else "default"


def annotated(text: str, sources: Sources) -> str:
    """A configuration's YAML with a comment behind each value: where it came from."""
    lines = text.splitlines()
    for path, line in _values(yaml.compose(text), ()):
        lines[line] = f"{lines[line]:<{_COMMENT_COLUMN}}  # {sources.of(path)}"
    return "\n".join(lines) + "\n"


def _values(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    """The path of each value of YAML in block style, and the number of the line that it ends on; of
    a list of plain values the line of its key."""
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                inner = (*path, key.value)
                if _is_plain(value):
                    yield inner, _line(key, value)
                else:
                    yield from _values(value, inner)
        case yaml.SequenceNode():
            for i, value in enumerate(node.value):
                yield from _values(value, (*path, i))
        case _:
            pass


def _is_plain(value: Any) -> bool:
    """Whether a value gets one comment: a scalar, a list of scalars, or an empty value."""
    if isinstance(value, yaml.ScalarNode) or not value.value:
        return True
    return isinstance(value, yaml.SequenceNode) and isinstance(value.value[0], yaml.ScalarNode)


def _line(key: Any, value: Any) -> int:
    end: int = value.end_mark.line if isinstance(value, yaml.ScalarNode) else key.end_mark.line
    return end


def _has(tree: Any, path: KeyPath) -> bool:
    for name in path:
        match tree:
            case Mapping() if name in tree:
                tree = tree[name]
            case list() | tuple() if isinstance(name, int) and name < len(tree):
                tree = tree[name]
            case _:
                return False
    return True
