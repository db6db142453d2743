"""YAML of files and variables, and one readable line for each of its errors. Pure.

Law: an error of the parser, whatever it is, ends in a ConfigError of one line that says where the
text is wrong.
"""

from collections.abc import Hashable
from typing import Any

import yaml
from typing_extensions import override

from router.config.keys import ConfigError


def parse_yaml(text: str, where: str) -> Any:
    """Tree of a YAML text; raises ConfigError for any error of the parser.

    where: beginning of its message. Beside YAMLError the parser raises RecursionError for deep
    nesting, and ValueError, KeyError, IndexError, AttributeError or OverflowError for tags such as
    !!int that don't fit their text.
    """
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # the text is at fault, and never more than this reading
        raise ConfigError(f"{where}{_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the YAML is nested too deep"
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character at position {error.position} can't be in YAML: {error.reason}"
    if isinstance(error, yaml.MarkedYAMLError):
        return _marked(error)
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    return f"a value does not fit its tag: {type(error).__name__} {error}"


def _marked(error: yaml.MarkedYAMLError) -> str:
    """One line for an error of YAML: line, column, problem, the construct that it is in, and what
    to do, where that is known."""
    mark, began = error.problem_mark or error.context_mark, error.context_mark
    problem = error.problem or "unreadable"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    context = f" {error.context}" if error.context else ""
    if context and began is not None and mark is not None and began.line != mark.line:
        context += f" that begins on line {began.line + 1}"
    hints = [hint for words, hint in _REMEDIES.items() if words in problem]
    return f"{where}{problem}{context}{': ' if hints else ''}{''.join(hints[:1])}"


_REMEDIES = {
    "'\\t'": "indent with spaces, not with tabs",
    "mapping values are not allowed": "indent all keys of a section alike, and quote a text with"
    " a colon and a space in it",
    "expected <block end>": "indent all keys of a section, and all entries of a list, alike",
    "cannot start any token": "quote a text that begins with this character",
}
"""Part of a problem's text in PyYAML -> what to do."""


class _Loader(yaml.SafeLoader):
    """Loader that refuses a mapping with the same key twice; PyYAML's own takes the last one."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and name.tag != "tag:yaml.org,2002:merge":
                if name.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name.value!r} is there twice", name.start_mark
                    )
                seen.add(name.value)
        return super().construct_mapping(node, deep)
