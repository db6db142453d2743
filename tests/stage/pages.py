"""The Markdown pages of the project, as text without code and as blocks of code."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATIONS = ("router", "events", "indexer", "simulator", "proto")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_BUILT = {".venv", ".git", "build", "dist", "node_modules"}


@cache
def files() -> tuple[Path, ...]:
    """All files of the project, relative to its root; without what tools have made."""
    found: list[Path] = []
    folders = [ROOT]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                if not (path.name in _BUILT or path.name.startswith(".") or "cache" in path.name):
                    folders.append(path)
            else:
                found.append(path.relative_to(ROOT))
    return tuple(sorted(found))


def pages() -> list[Path]:
    """All Markdown pages, relative to the root."""
    return [path for path in files() if path.suffix == ".md"]


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """A page without its blocks of code, fenced or indented."""
    without = FENCE.sub("", text_of(page))
    return "\n".join(line for line in without.splitlines() if not line.startswith("    "))


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE):
        name = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
        twin = 0
        anchor = name
        while anchor in anchors:
            twin += 1
            anchor = f"{name}-{twin}"
        anchors.add(anchor)
    return anchors


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)
