"""The chart's README is that of its values, and every value has a comment."""

import yaml

from tests.helm.rendered import CHART
from tests.helm.values_page import PAGE, Row, page, rows


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.helm.values_page"


def test_rows_follow_the_file() -> None:
    text = """\
# --- One ---
# A section,
# of two lines.
a:
  # A number.
  b: 1
  # A list.
  c:
    - x: 1
      y: 2

# A remark that belongs to nothing.

d: {}
"""
    assert list(rows(text, yaml.safe_load(text))) == [
        "One",
        Row("a", "A section, of two lines.", ""),
        Row("a.b", "A number.", "1"),
        Row("a.c", "A list.", '[{"x": 1, "y": 2}]'),
        Row("d", "", "{}"),
    ]


def test_values_have_comments() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    found = [row for row in rows(text, values) if isinstance(row, Row)]
    bare = {row.key for row in found if not row.comment}
    allowed = ("resources", "podSecurityContext", "securityContext", "probes", "prometheusRule")
    nested = (".resources.", "files", ".limits", ".requests")
    assert not [
        key for key in bare if not key.startswith(allowed) and not any(n in key for n in nested)
    ]
    assert {row.key.partition(".")[0] for row in found} == set(values)
