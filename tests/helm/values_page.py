"""helm/kvroute/README.md: every value with its default and its comment in values.yaml.

To write it again after values.yaml changed: python -m tests.helm.values_page
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parents[2] / "helm" / "kvroute"
PAGE = CHART / "README.md"
DEFAULT_CHARS = 60
"""A longer default is left to values.yaml."""
INTRODUCTION = """\
# Values of the chart

Made from the comments of `values.yaml` by `python -m tests.helm.values_page`; change them there.
Installation, examples and choices are in [helm/README.md](../README.md).

    helm install kvroute oci://REGISTRY/kvroute --version VERSION --values values.yaml
"""

_KEY = re.compile(r"^( *)([A-Za-z_][A-Za-z0-9_]*):(?: |$)")
_SECTION = re.compile(r"^# -{3} (.*?) -{3,}$")


class Row(NamedTuple):
    """A value, or a section of values."""

    key: str
    comment: str
    default: str
    """As JSON; empty: a section, or a default that is too long."""


def rows(text: str, values: Mapping[str, Any]) -> Iterator[Row | str]:
    """Headings of sections as texts, and rows, in the order of the file."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    below = -1
    """Indentation of a value whose lines are a part of its default."""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            yield heading[1]
            comment = []
            continue
        if line.lstrip().startswith("#"):
            comment.append(line.strip(" #"))
            continue
        if not line.strip():
            comment = []
            continue
        match = _KEY.match(line)
        indent = len(line) - len(line.lstrip())
        if match is None or (below >= 0 and indent > below):
            continue
        path = [*((depth, name) for depth, name in path if depth < indent), (indent, match[2])]
        names = [name for _, name in path]
        value: Any = values
        for name in names:
            value = value[name]
        is_section = isinstance(value, dict) and bool(value)
        below = -1 if is_section else indent
        if comment or not is_section:
            default = "" if is_section else json.dumps(value, ensure_ascii=False)
            short = default if len(default) <= DEFAULT_CHARS else ""
            yield Row(".".join(names), " ".join(comment), short)
        comment = []


def page() -> str:
    """The whole page."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines, in_table = [INTRODUCTION.rstrip()], False
    for row in rows(text, yaml.safe_load(text)):
        if isinstance(row, str):
            lines += ["", f"## {row}"]
            in_table = False
            continue
        if not in_table:
            lines += ["", "| value | default | meaning |", "| --- | --- | --- |"]
            in_table = True
        default = f"`{row.default}`" if row.default else ""
        comment = row.comment.replace("|", "\\|")
        lines.append(f"| `{row.key}` | {default.replace('|', chr(92) + '|')} | {comment} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
