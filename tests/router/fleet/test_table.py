"""The table of workers: one list of columns, in Python and in C."""

import importlib.util
from pathlib import Path

from router.decide.policies.candidates import Candidates
from router.fleet.table import COLUMNS
from tests.stage.rows import rows

GENERATE = Path(__file__).parents[3] / "proto" / "generate.py"


def test_the_header_in_c_has_the_columns_of_the_table() -> None:
    spec = importlib.util.spec_from_file_location("generate", GENERATE)
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.TABLE.read_text() == generate.table(COLUMNS), "run `make proto`"


def test_each_column_is_an_attribute_of_candidates_at_its_place() -> None:
    candidates: Candidates = rows(100, {"running": 3.0}, {"waiting": 2.0, "total_blocks": 5.0})
    for place, name in enumerate(COLUMNS):
        column = getattr(candidates, name)
        assert column.base is candidates.table or column.base is candidates.table.base, name
        assert column.tobytes() == candidates.table[place].tobytes(), name
