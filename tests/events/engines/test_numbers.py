"""Numbers of engines: what pages are read for is in the table, and what is in it is read."""

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from events.engines.events import LoadSample
from events.engines.numbers import GAUGES, NUMBERS, in_table
from events.engines.sglang.pages import sglang_loads, sglang_metrics
from events.engines.table import READINGS
from events.engines.vllm.pages import vllm_loads
from tests.stage.engine_pages import SGLANG_LOADS, SGLANG_PAGE, VLLM_PAGE

RELAY = Path(__file__).parents[3] / "events" / "relay"


def samples() -> list[LoadSample]:
    trtllm = READINGS["trtllm"].load_pages[0].read
    page = (
        b"trtllm_num_requests_running 1\ntrtllm_num_requests_waiting 0\n"
        b"trtllm_kv_cache_hit_rate 0.5\n"
    )
    pages: list[Any] = [vllm_loads(VLLM_PAGE), sglang_metrics(SGLANG_PAGE)]
    pages += [sglang_loads(SGLANG_LOADS, 16), trtllm(page, None)]
    return [load for loads in pages for load in loads.values()]


def test_every_number_that_is_read_is_in_the_table_and_each_of_the_table_is_read() -> None:
    assert {name for sample in samples() for name in sample.numbers} == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_record_says_what_its_number_means(name: str) -> None:
    number = NUMBERS[name]
    assert number.name == name
    assert name.isidentifier()
    assert number.meaning.endswith(".")
    assert len(number.meaning) > 30
    assert (name in GAUGES) is not number.is_counter


def test_every_field_of_a_load_is_read_by_the_relay() -> None:
    """A number that no rule of relay or router names belongs into the table."""
    read = {
        node.attr
        for path in RELAY.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert {field.name for field in fields(LoadSample)} <= read


def test_numbers_of_a_later_relay_are_left_out() -> None:
    assert in_table({"of_a_later_release": 1.0, "cache_hit_rate": 0.5}) == {"cache_hit_rate": 0.5}
