"""Writes the references: python -m tests.docs.reference"""

from tests.docs.reference import PAGES, ROOT

for path, page in PAGES.items():
    (ROOT / path).write_text(page(), encoding="utf-8")
