"""Pieces of Markdown that the references are made of."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; the cells are Markdown already."""
    lines = [_row(head), _row(["---"] * len(head))]
    return [*lines, *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """Prose in a cell of a table."""
    return plain(" ".join(text.split()).replace("|", "\\|"))


def code(text: str) -> str:
    """Code in a cell of a table; empty for no text."""
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line}`" if line else ""


def plain(text: str) -> str:
    """Prose whose `<`, `*` and `[` are characters, outside its own code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)
