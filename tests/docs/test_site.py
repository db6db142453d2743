"""The site has every page of docs/, and its pages link to files that are there."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("stage", ROOT / "docs/site/stage.py")
assert _spec is not None
assert _spec.loader is not None
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)


def test_every_page_of_docs_is_in_the_navigation_once() -> None:
    pages = site.pages()
    written = {path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md")}
    assert written - set(pages) == set()
    assert len(pages) == len(set(pages))


def test_pages_and_what_they_link_to_are_copied(tmp_path: Path) -> None:
    site.stage(tmp_path)
    staged = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert staged >= set(site.pages())
    for page in site.pages():
        text = (tmp_path / page).read_text(encoding="utf-8")
        for _, target, _ in site.LINK.findall(text):
            assert (tmp_path / page.parent / target).is_file(), (page, target)


def test_a_link_to_a_folder_becomes_text_and_one_to_nothing_fails(tmp_path: Path) -> None:
    def linked(text: str) -> str:
        return str(site.LINK.sub(partial(site._linked, Path("docs/a.md"), tmp_path), text))

    assert linked("see [the `tests`](../tests/docs) there") == "see the `tests` there"
    assert linked("[a](https://host/x) [b](#here)") == "[a](https://host/x) [b](#here)"
    with pytest.raises(FileNotFoundError):
        linked("[c](nothing.md)")


def test_nothing_is_loaded_from_other_hosts() -> None:
    config = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  font: false", config, re.MULTILINE)
    assert "://" not in config
