"""Functions have 60 lines at most and classes 300, or a reason in their docstrings.

The reason is a sentence that begins with `Over 60 lines:` or `Over 300 lines:`. A function's
docstring and signature don't count, so that explanations and options cost nothing.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.stage.pages import ROOT

STATIONS = ("indexer", "events", "router", "simulator", "proto/kvroute/client")
FUNCTION_LINES_MAX = 60
CLASS_LINES_MAX = 300
LONG_MAX = 18
"""Functions and classes with a reason: a bound that goes down with each that is cut."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(station: str) -> Iterator[tuple[str, Definition]]:
    for path in sorted((ROOT / station).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Definition):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def is_long(node: Definition) -> bool:
    assert node.end_lineno is not None
    if isinstance(node, ast.ClassDef):
        return node.end_lineno - node.lineno + 1 > CLASS_LINES_MAX
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return bool(body) and node.end_lineno - body[0].lineno + 1 > FUNCTION_LINES_MAX


def has_reason(node: Definition) -> bool:
    most = CLASS_LINES_MAX if isinstance(node, ast.ClassDef) else FUNCTION_LINES_MAX
    return f"Over {most} lines: " in (ast.get_docstring(node) or "")


@pytest.mark.parametrize("station", STATIONS)
def test_what_is_long_has_a_reason_and_nothing_else_has(station: str) -> None:
    wrong = [name for name, node in definitions(station) if is_long(node) != has_reason(node)]
    assert wrong == []


def test_few_functions_and_classes_are_long() -> None:
    names = [name for station in STATIONS for name, node in definitions(station) if is_long(node)]
    assert len(names) <= LONG_MAX, names
