"""Modules that a README calls pure import nothing that does I/O, waits or reads a clock."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPURE = {
    *("aiohttp", "asyncio", "click", "grpc", "nats", "os", "prometheus_client", "selectors"),
    *("socket", "subprocess", "threading", "time", "urllib.request", "uvloop", "yaml", "zmq"),
}
VALUES = {"prometheus_client.samples"}
"""What an impure package has for values alone."""
ROW = re.compile(r"^\| `([\w/]+)` \| \d+[^|]*\| (.*) \|$", re.MULTILINE)
LAW = re.compile(r"\bpure(?:, but for (?P<files>`[^;|]*))?(?:;|,|$)")


def pure_modules() -> Iterator[Path]:
    """Modules of each folder that a station's table calls pure, but for the files it names."""
    yield from (ROOT / "indexer").glob("*.py")
    yield from (ROOT / "proto" / "kvroute" / "client" / "fallback").glob("*.py")
    for station in ("router", "events", "simulator"):
        text = (ROOT / station / "README.md").read_text(encoding="utf-8")
        for folder, law in ROW.findall(text):
            if (said := LAW.search(law)) is None:
                continue
            impure = set(re.findall(r"`([\w.]+\.py)`", said["files"] or ""))
            modules = {path.name: path for path in (ROOT / station / folder).glob("*.py")}
            assert impure <= modules.keys(), f"{station}/README.md: no {impure} in {folder}"
            yield from (path for name, path in modules.items() if name not in impure)


def imports(body: list[ast.stmt]) -> Iterator[str]:
    """Modules that statements import when they run: none below `if TYPE_CHECKING`."""
    for statement in body:
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imports(statement.orelse)
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case _:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.stmt):
                        yield from imports([child])


def is_of(name: str, packages: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
    "path", sorted(pure_modules()), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_a_pure_module_does_no_io(path: Path) -> None:
    named = set(imports(ast.parse(path.read_text(encoding="utf-8")).body))
    assert [name for name in named if is_of(name, IMPURE) and not is_of(name, VALUES)] == []


@pytest.mark.parametrize(
    ("law", "files"),
    [
        ("the one writer; pure", ""),
        ("spans; pure, but for `a.py` and `b.py`; no more", "`a.py` and `b.py`"),
        ("reads the tokenizer's folder", None),
    ],
)
def test_a_law_is_read_as_it_is_meant(law: str, files: str | None) -> None:
    said = LAW.search(law)
    assert (said and (said["files"] or "")) == files
