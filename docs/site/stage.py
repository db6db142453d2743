"""Copies the pages of the site, and the files that they link to, from the tree into one folder.

    python docs/site/stage.py build/docs/pages

Pages keep their paths, so that their links hold. Links to a folder become text: a site has no
listing of a folder. Fails for a link to a file that is not there.
"""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAV = re.compile(r"^\s*- [^:\n]+: (\S+\.md)$", re.MULTILINE)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#:]+)((?:#[^)\s]*)?)\)")


def pages() -> list[Path]:
    """The pages of the site, as the navigation lists them."""
    text = Path(__file__).with_name("mkdocs.yml").read_text(encoding="utf-8")
    return [Path(name) for name in NAV.findall(text)]


def stage(target: Path) -> None:
    """Fills a folder, which is emptied first. Raises FileNotFoundError."""
    shutil.rmtree(target, ignore_errors=True)
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        copy = target / page
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(LINK.sub(partial(_linked, page, target), text), encoding="utf-8")


def _linked(page: Path, target: Path, link: re.Match[str]) -> str:
    file = (ROOT / page.parent / link[2]).resolve()
    name = file.relative_to(ROOT)
    if file.is_dir():
        return link[1].lstrip("!")[1:-1]
    if name not in pages():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return link[0]


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
