"""Prints texts of others, such as names of workers and models, safely on a terminal.

Law: nothing in a name is read as markup, and no control character, escape sequence or change of
writing direction reaches the terminal; those show as escapes (`\\x1b`).
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.config.printable import shown

Cell = str | Text


def styled(text: str, style: str) -> Text:
    """A text in a style of rich's (color or weight), with control characters escaped."""
    return Text(shown(text), style)


def line(*parts: Cell) -> Text:
    """A line of parts, joined."""
    whole = Text()
    for part in parts:
        whole.append_text(part if isinstance(part, Text) else Text(shown(part)))
    return whole


def console(width_min: int) -> Console:
    """A console wide enough for every row, which a narrow terminal wraps; reads no markup."""
    width = max(Console().width, width_min)
    return Console(width=width, soft_wrap=True, markup=False, emoji=False, highlight=False)


def table(*left: str, right: Sequence[str]) -> Table:
    """A plain table that never cuts a cell: a narrow terminal wraps its lines instead. left, right:
    names of columns, by alignment."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in left:
        made.add_column(shown(name), no_wrap=True)
    for name in right:
        made.add_column(shown(name), justify="right", no_wrap=True)
    return made


def add_row(to: Table, *cells: Cell) -> None:
    """Adds a row to a table."""
    to.add_row(*(line(cell) for cell in cells))
