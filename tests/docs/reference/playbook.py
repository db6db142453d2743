"""What the console says of warnings and states: the tables of the documentation, as JSON."""

import json
import re
from pathlib import Path

from tests.stage.pages import text_of


def page() -> str:
    """router/observe/console/static/playbook.json."""
    return json.dumps(
        {
            "warnings": {
                code: {"holds": holds, "look": look}
                for code, holds, look in _rows("docs/operate.md", "## Warnings")
            },
            "states": {state: todo for state, _, todo in _rows("docs/console.md", "## States")},
        },
        ensure_ascii=False,
        indent=1,
    )


def _rows(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, as plain text."""
    section = text_of(Path(page)).split(f"\n{heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[_plain(cell) for cell in line.strip("| ").split(" | ")] for line in lines[2:]]


def _plain(markdown: str) -> str:
    """Text without links, code marks and escapes."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "").replace("\\", "")
