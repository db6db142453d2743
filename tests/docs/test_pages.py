"""Links, anchors, files and folders that the Markdown pages name exist; their words are plain."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.stage.pages import ROOT, STATIONS, anchors_of, files, pages, prose_of, text_of

SUFFIXES = "py|pyx|pxd|pyi|h|proto|md|yaml|toml|sh"
ELSEWHERE = {
    "kvroute.yaml", "engines.yaml", "my_policies.py",  # the reader's own
    "router/decide/policies/short_work.py",
    "examples/llm/components/kv_router.py", "schedule_policy.py", "schedule_batch.py",  # engines'
}  # fmt: skip
"""Files that pages name and that are no part of this tree."""
PLAIN = [
    Path("README.md"),
    *(page for page in pages() if page.parent == Path("docs")),
    *(Path(station) / "README.md" for station in STATIONS),
    Path("helm/README.md"),
    Path("helm/ALERTS.md"),
]
"""Pages that the words below are held to."""
RIDDLES = re.compile(r"\b(told|asked|anew|whoever|nor|heed|no more)\b", re.IGNORECASE)
ROOT_LINES_MAX = 170
FILES_OFF_MAX = 3
"""A number of files in a table gives a sense of size: it may lag by as many files."""


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        linked = (ROOT / page.parent / path).resolve() if path else ROOT / page
        there = linked.is_relative_to(ROOT) and linked.exists()
        if not there or (anchor and anchor not in anchors_of(linked.relative_to(ROOT))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_file_in_backquotes_is_in_the_tree(page: Path) -> None:
    tree = [path.as_posix() for path in files()]
    named = {
        name
        for name in re.findall(r"`([^`\s]+)`", prose_of(page))
        if re.fullmatch(rf"[\w./*-]+\.({SUFFIXES})", name) and name not in ELSEWHERE
    }
    lost = {
        name
        for name in named
        if not any(fnmatch(f"/{path}", f"*/{name.removeprefix('./')}") for path in tree)
    }
    assert not lost


@pytest.mark.parametrize("station", ["router", "events", "simulator"])
def test_a_stations_table_has_its_folders_with_about_their_number_of_files(station: str) -> None:
    tree = [path for path in files() if path.parts[0] == station]
    suffixes = (".py", ".pyx")
    modules = [path for path in tree if path.suffix in suffixes and path.name != "__init__.py"]
    packages = {path.parent for path in modules} - {Path(station)}
    table = dict(
        re.findall(r"^\| `([\w/]+)` \| (\d+)", text_of(Path(station) / "README.md"), re.MULTILINE)
    )
    assert set(table) == {path.relative_to(station).as_posix() for path in packages}
    for folder, count in table.items():
        there = sum(path.parent == Path(station) / folder for path in modules)
        assert abs(there - int(count)) <= FILES_OFF_MAX, (folder, there)


@pytest.mark.parametrize("page", PLAIN, ids=str)
def test_sentences_have_plain_words(page: Path) -> None:
    assert RIDDLES.findall(re.sub(r"`[^`]*`", "", prose_of(page))) == []


def test_the_root_page_is_short() -> None:
    assert len(text_of(Path("README.md")).splitlines()) < ROOT_LINES_MAX
