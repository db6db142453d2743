"""The gateway's page has every path of the table of body formats, where its record says."""

import re
from pathlib import Path

from events.engines.table import ENGINES
from router.request.bodies import PATHS
from tests.stage.pages import text_of


def paths_in(text: str) -> set[str]:
    return set(re.findall(r"`(/[^`]*)`", text))


def test_every_path_is_in_the_row_by_which_its_requests_are_routed() -> None:
    section = text_of(Path("docs/gateway.md")).partition("## Paths")[2]
    by_prefix, by_load = re.findall(r"^\| (`/.*) \| by (?:cached|load)", section, re.MULTILINE)
    assert paths_in(by_prefix) == {path for path, kind in PATHS.items() if kind.option}
    assert paths_in(by_load) == {path for path, kind in PATHS.items() if not kind.option}


def test_every_path_that_may_pair_is_in_the_table_of_pairs() -> None:
    section = text_of(Path("docs/gateway.md")).partition("| path | vLLM | SGLang |")[2]
    rows = section.partition("\n\n")[0]
    assert paths_in(rows) == {path for path, kind in PATHS.items() if kind.may_pair}
    without = {path for row in rows.split("\n") if "no pairs" in row for path in paths_in(row)}
    unpaired = ENGINES["sglang"].unpaired_bodies
    assert without == {path for path, kind in PATHS.items() if kind.name in unpaired}
