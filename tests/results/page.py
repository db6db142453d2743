"""Numbers as a page tells them."""

from collections.abc import Sequence
from math import isnan


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def ms(value: float, digits: int = 0) -> str:
    return "-" if isnan(value) else f"{value:,.{digits}f} ms"


def less(ours: float, theirs: float) -> str:
    """By how much ours differs: -12 % is an eighth less."""
    return f"{100 * (ours / theirs - 1):+.0f} %"
