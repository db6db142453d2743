"""The table of workers: one list of columns, in Python and in C."""

import pytest

from router.decide.policies.candidates import Candidates
from router.fleet.table import COLUMNS, check_header
from tests.router.fleet.table_header import HEADER, header
from tests.stage.rows import rows


def test_the_header_in_c_has_the_columns_of_the_table() -> None:
    assert HEADER.read_text(encoding="utf-8") == header(), "run `make proto`"


@pytest.mark.parametrize(
    ("built", "named"),
    [
        ((*COLUMNS, "more"), "differ in more"),
        (COLUMNS[1:], f"differ in {COLUMNS[0]}"),
        (COLUMNS[::-1], "their order"),
    ],
)
def test_native_code_that_was_built_with_other_columns_is_refused(
    built: tuple[str, ...], named: str
) -> None:
    check_header(COLUMNS)
    with pytest.raises(ImportError, match=named):
        check_header(built)


def test_each_column_is_an_attribute_of_candidates_at_its_place() -> None:
    candidates: Candidates = rows(100, {"running": 3.0}, {"waiting": 2.0, "total_blocks": 5.0})
    for place, name in enumerate(COLUMNS):
        column = getattr(candidates, name)
        assert column.base is candidates.table or column.base is candidates.table.base, name
        assert column.tobytes() == candidates.table[place].tobytes(), name
