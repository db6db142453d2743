"""A key exists because a page, an example, a preset or the chart tells an operator to set it."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.reference.configuration import PROGRAMS, rows_of
from tests.stage.pages import files, text_of

TELLING = {".md", ".yaml", ".tpl"}
PRESETS = Path("router/config/settings/presets.py")
NAMES = sorted({row.name for config in PROGRAMS.values() for row in rows_of(config)})


def tells(path: Path) -> bool:
    """Whether a file is written by hand for operators."""
    if path == PRESETS:
        return True
    if path.name.startswith("reference-") or path.suffix not in TELLING:
        return False
    return path.parts[0] in ("docs", "helm") or path == Path("README.md")


@cache
def said() -> tuple[set[str], set[str]]:
    """Dotted words and flags; names before a colon or in backquotes."""
    text = "\n".join(text_of(path) for path in files() if tells(path))
    words = re.findall(r"--[a-z][a-z-]*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", text)
    set_there = re.findall(r"(?m)(?:^ *-? *|[{,] *)([a-z_]+):", text)
    return set(words), {*set_there, *re.findall(r"`([a-z_]+)`", text)}


def is_told(name: str) -> bool:
    """Whether some page or file names a key: by its flag, as `section.key`, or in YAML."""
    words, alone = said()
    *above, last = name.replace("[]", "").split(".")
    if "--" + name.replace(".", "-").replace("_", "-") in words or last in alone:
        return True
    ends = {".".join(word.split(".")[-2:]) for word in words}
    if "_" in last:
        return any(end.rpartition(".")[2] == last for end in ends)
    return bool(above) and f"{above[-1]}.{last}" in ends


@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_told_to_operators(name: str) -> None:
    """A bound that nobody is told to turn is a constant beside its code, with its reason."""
    assert is_told(name)


def test_a_key_that_nobody_names_is_seen() -> None:
    assert not is_told("queue.no_such_key")
    assert not is_told("queue.nosuchkey")
