"""Folders of tests are independent: shared parts are in tests/stage, or have yet to move there."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
READERS = {("results", "bar"), ("results", "bench"), ("simulator", "bench")}
"""Folders that read the records of `make bar` and `make bench`, and compare with them."""
BORROWERS = {
    *((own, "end_to_end") for own in ("bench", "chaos", "events", "kvroute", "router")),
    *(("bench", "router"), ("router", "real_engines")),
}
"""Folders that still use parts which should stand in tests/stage: no other folder may begin to."""


def imported_folders(path: Path) -> set[str]:
    """Folders of tests that a file imports from."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [module.split(".") for module in modules]
    return {names[1] for names in parts if names[0] == "tests" and len(names) > 1}


def test_no_folder_of_tests_imports_another() -> None:
    imports = {
        (path.relative_to(TESTS).parts[0], folder)
        for path in TESTS.rglob("*.py")
        if len(path.relative_to(TESTS).parts) > 1
        for folder in imported_folders(path)
    }
    across = {(own, folder) for own, folder in imports if folder not in (own, "stage")}
    assert across <= READERS | BORROWERS
