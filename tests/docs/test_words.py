"""Words that sources do not use, and words of which there must not be more.

`told` and `asked` stand for too many things (a message, a text, a heartbeat, a worker, rows): new
code says which. The bounds are what is left of them; lower them with each that goes.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for station in ("router", "events", "indexer", "simulator", "proto/kvroute/client")
    for suffix in ("*.py", "*.pyx", "*.pyi", "*.h")
    for path in (ROOT / station).rglob(suffix)
]
LEFT = {"told": 449, "asked": 212, "whoever": 21}
"""Lines of sources with a word, at most."""


def lines_with(word: str) -> list[str]:
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", ["anew", "heed"])
def test_a_word_is_not_used(word: str) -> None:
    assert lines_with(word) == []


@pytest.mark.parametrize("word", LEFT)
def test_a_word_is_used_no_more_often(word: str) -> None:
    found = lines_with(word)
    assert len(found) <= LEFT[word], "\n".join(found[-20:])
