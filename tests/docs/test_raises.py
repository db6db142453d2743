"""No function raises an error that a name of its own goes on to hold.

A raised error refers to its frames, and these to their names. An error that one of these names has
is a cycle with all that the frames hold, such as a request's body; kvroute's processes look for
cycles among old objects only every few hours (router/app/cli/run.py).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIONS = ("events", "indexer", "proto", "router", "simulator")


def held(
    tree: ast.AST, handlers: tuple[str, ...] = (), dropped: tuple[str, ...] = ()
) -> Iterator[int]:
    """Lines that raise such an error. handlers: names of the `except` clauses around, which Python
    drops by itself. dropped: names that a `finally` around deletes."""
    if isinstance(tree, ast.Raise) and any(
        name not in handlers + dropped for name in raised(tree.exc)
    ):
        yield tree.lineno
    for field, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.ExceptHandler):
                yield from held(child, (*handlers, child.name or ""), dropped)
            elif isinstance(tree, ast.Try) and field == "body":
                yield from held(child, handlers, (*dropped, *deleted(tree.finalbody)))
            else:
                yield from held(child, handlers, dropped)


def raised(error: ast.expr | None) -> list[str]:
    """Names of what is raised: the error's own, or those of errors that a function gives back."""
    if isinstance(error, ast.Name):
        return [error.id] if error.id[0].islower() else []
    if not isinstance(error, ast.Call):
        return []
    given = [name.id for name in error.args if isinstance(name, ast.Name)]
    return [name for name in given if name in ("error", "refusal")]


def deleted(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.Delete):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("station", STATIONS)
def test_no_error_that_is_raised_is_held_by_a_name(station: str) -> None:
    files = sorted((ROOT / station).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(ROOT)): lines
        for file in files
        if (lines := list(held(ast.parse(file.read_text()))))
    }
    assert found == {}


def test_the_rule_sees_what_it_forbids() -> None:
    source = """
def f(error):
    raise error
def g():
    error = ValueError()
    try:
        raise error
    finally:
        del error
def h():
    try:
        raise ValueError
    except ValueError as error:
        raise error
def i():
    refusal = ValueError()
    raise counted(refusal, 1)
"""
    assert list(held(ast.parse(source))) == [3, 17]
