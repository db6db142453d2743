"""The table of engines is whole, and nothing beside it treats engines differently by name."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from events.engines.table import ENGINES, READINGS, EngineName, engine_of

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "events" / "engines"
SOURCES = [
    path
    for folder in ("indexer", "events", "router", "simulator", "proto/kvroute")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(RECORDS)
]


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each constant that is compared, matched, or a key of a table."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                parts = [node.left, *node.comparators]
            case ast.MatchValue():
                parts = [node.value]
            case ast.Dict():
                parts = [key for key in node.keys if key is not None]
            case _:
                continue
        for part in parts:
            for each in ast.walk(part):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.lineno, each.value


def test_settings_name_the_engines_that_are_read() -> None:
    assert set(get_args(EngineName)) == set(READINGS)


@pytest.mark.parametrize("name", READINGS)
def test_a_record_is_whole(name: str) -> None:
    engine, reading = ENGINES[name], READINGS[name]
    assert (engine.name, engine.reading) == (name, reading)
    assert engine.title
    assert engine.first_version
    others = {other.owned_by for other in ENGINES.values() if other is not engine}
    assert engine.owned_by
    assert engine.owned_by not in others
    required = [page.required for page in reading.identity_pages]
    assert required == sorted(required, reverse=True)
    assert any(page.changes for page in reading.identity_pages)
    assert reading.load_pages
    assert reading.decode(b"\xc1").malformed


def test_an_engine_of_a_later_release_is_served_and_never_paired() -> None:
    unknown = engine_of("of-tomorrow")
    assert unknown.hand_over is None
    assert unknown.chat_tokens is None
    assert unknown.tells_salts("0.1")
    assert not unknown.is_untried("0.1")


def test_no_other_module_compares_an_engines_name() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), text)
        for path in SOURCES
        for _, text in compared(ast.parse(path.read_text(encoding="utf-8")))
        if text in ENGINES
    }
    assert found == {
        # What each makes of a body is a table of its own, of the same names.
        ("router/request/dialects/table.py", "vllm"),
        ("router/request/dialects/table.py", "sglang"),
        # The flags of a relay for Dynamo's event plane are others than those for an engine.
        ("router/app/programs/relay.py", "dynamo"),
    }
