"""The top level has no stray file, and a folder of tests imports no other but tests/stage."""

import ast
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
READERS = {("results", "bar"), ("results", "bench"), ("simulator", "bench")}
"""Readers of the records that `make bar` and `make bench` keep: they compare with them, and use the
code that reads the records. Neither of the two has tests that others could borrow parts of."""
READERS |= {("cluster", "distribution"), ("cluster", "helm")}
READERS |= {("gateways", "cluster"), ("gateways", "helm")}
READERS |= {("interop", "cluster")}
READERS |= {("bench", "real_engines")}
"""The cluster runs the image that `make image` builds and the examples of the chart; gateways are
run on that cluster; the programs of `make interop` are built and kept as the cluster's are; a
benchmark starts the engines that `make real-engines` installs."""
READERS |= {("cluster", "distribution"), ("distribution", "helm"), ("helm", "distribution")}
"""The image is run on the cluster and as the chart renders it; the chart's archive has the
project's address, as the other packages have it."""
TOP_LEVEL = {
    *(".ci", "docs", "events", "helm", "indexer", "proto", "router", "simulator", "tests"),
    *(".dockerignore", ".gitignore", "CHANGELOG.md", "Dockerfile", "LICENSE", "MANIFEST.in"),
    *("Makefile", "NOTICE", "README.md", "SECURITY.md", "pyproject.toml", "setup.py"),
}
FILES = sorted(path for path in TESTS.rglob("*.py") if path.parent != TESTS)


def imported_modules(path: Path) -> set[tuple[str, ...]]:
    """Modules of tests that a file imports, as their parts below `tests`."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [tuple(module.split(".")) for module in modules]
    return {names[1:] for names in parts if names[0] == "tests" and len(names) > 1}


def folder_of(module: tuple[str, ...]) -> tuple[str, ...]:
    """The folder of an imported module, or of the module that an imported name is in."""
    while not (TESTS.joinpath(*module[:-1]) / f"{module[-1]}.py").is_file():
        module = module[:-1]
        if not module or TESTS.joinpath(*module).is_dir():
            return module
    return module[:-1]


def test_nothing_is_added_to_the_top_level() -> None:
    """A file that was left in the root by mistake is not committed without being seen here."""
    listed = ("git", "-C", str(TESTS.parent), "ls-files", "--cached")
    tracked = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    assert {name.split("/")[0] for name in tracked.splitlines()} == TOP_LEVEL


@pytest.mark.parametrize("top", sorted({path.relative_to(TESTS).parts[0] for path in FILES}))
def test_a_folder_of_tests_imports_no_other(top: str) -> None:
    """A file imports from its own folder, the folders around that one, and tests/stage."""
    across = set()
    for path in FILES:
        own = path.parent.relative_to(TESTS).parts
        if own[0] != top:
            continue
        for folder in map(folder_of, imported_modules(path)):
            allowed = folder[:1] == ("stage",) or own[: len(folder)] == folder
            if not allowed and (own[0], folder[0]) not in READERS:
                across.add((path.relative_to(TESTS).as_posix(), "/".join(folder)))
    assert across == set()
