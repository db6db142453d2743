"""What pyproject.toml says of the project: the one place of its version, address and authors.

The chart, the image and the client's distribution get theirs from it when they are packaged.
"""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def _project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def version() -> str:
    return str(_project()["version"])


def address() -> str:
    """URL of the source."""
    return str(_project()["urls"]["Source"])


def authors() -> list[str]:
    """Their names."""
    return [author["name"] for author in _project()["authors"]]


def of_chart() -> dict[str, Any]:
    """Keys of Chart.yaml."""
    maintainers = [{"name": name} for name in authors()]
    return {"home": address(), "sources": [address()], "maintainers": maintainers}


def into_distribution(text: str) -> str:
    """A pyproject.toml without authors and address, with ours."""
    names = ", ".join(f'{{name = "{name}"}}' for name in authors())
    ours = f'authors = [{names}]\nurls = {{Source = "{address()}"}}\n'
    return text.replace("[project]\n", f"[project]\n{ours}", 1)
