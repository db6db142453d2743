"""The page of a comparison: the printed numbers, whole, bounded, harmless whatever its names."""

import re
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from simulator.study.page import page, picture_file, ttft_over_rates
from simulator.study.report import table_of
from simulator.study.series import (
    CELLS_MAX,
    GROUPS_MAX,
    OTHERS,
    groups_of,
    hit_rates_over_time,
    load_by_worker,
    quantiles,
    waits_by_group,
)
from simulator.study.svg import nice_step, png, ramp
from simulator.traffic.trace import Trace, TraceRequest
from tests.simulator.made_results import compared, comparison, printed, result

HOSTILE = "<script>alert(1)</script>\"'&"
COMMAND = "kvroute replay conversation --compare ttft"
EMPTY = {"meta", "br"}
SVG = "{http://www.w3.org/2000/svg}"


def trace_of(about: list[dict[str, Any]]) -> Trace:
    requests = [TraceRequest(float(n), 64, 1, [n], **one) for n, one in enumerate(about)]
    return Trace("t", requests)


class Read(HTMLParser):
    """Checks that each element is closed, and keeps its tables' cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._cell: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)


def read(text: str) -> Read:
    seen = Read()
    seen.feed(text)
    seen.close()
    assert seen.open == []
    return seen


def test_its_numbers_are_the_printed_ones() -> None:
    one = compared(result("dynamo-adaptive"), result("round-robin", seed=1))
    table = read(page([one], COMMAND)).tables[-1]
    columns = [list(column.cells) for column in table_of(one, one.runs).columns]
    assert table[0][1:] == ["dynamo-adaptive", "round-robin", "ceiling"]
    assert [list(row) for row in zip(*table[1:], strict=True)] == columns
    shown = printed(table_of(one, one.runs), width=200)
    for row in table[1:]:
        assert all(cell.split("\n")[0] in shown for cell in row)


def test_it_needs_no_script_and_no_network() -> None:
    text = page([compared(result("a"), result("b"))], COMMAND)
    assert "script" not in read(text).seen
    addresses = re.findall(r'(?:href|src|url\()="?([^")]*)', text)
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses)


def test_hostile_names_are_texts() -> None:
    one = compared(result(HOSTILE), result("b"), trace=HOSTILE, groups=[HOSTILE] * 40)
    seen = read(page([one], HOSTILE))
    assert "script" not in seen.seen
    assert HOSTILE in seen.tables[-1][0]


def test_a_run_in_which_nothing_was_served_is_shown_too() -> None:
    text = page([compared(result("a", failed=True))], COMMAND)
    assert "No request got a first token." in text
    read(text)


def test_each_picture_has_a_name_and_a_description() -> None:
    text = page([compared(result("a"), result("b"))], COMMAND)
    pictures = re.findall(r"<svg [^>]*role=.*?</svg>", text)
    assert len(pictures) == 4
    for picture in pictures:
        root = ET.fromstring(picture)
        names = [root.findtext(f"{SVG}{tag}") for tag in ("title", "desc")]
        assert all(names)


def test_several_rates_have_their_means_in_one_picture_first() -> None:
    rates = [comparison("round-robin", "ttft", rate=rate) for rate in (6.0, 1.0, 3.0)]
    text = page(rates, COMMAND)
    pictures = re.findall(r"<svg [^>]*role=.*?</svg>", text)
    assert len(pictures) == 4 * 3 + 1
    assert pictures[0] == ttft_over_rates(rates)
    root = ET.fromstring(pictures[0])
    means = [run.numbers.ttft_ms.mean for run in rates[0].runs]
    about = root.findtext(f"{SVG}desc") or ""
    for label, mean in zip(("round-robin", "ttft"), means, strict=True):
        assert f"{label}: {mean:,.0f} ms, {mean:,.0f} ms, {mean:,.0f} ms" in about
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [name for name in texts if name in ("1x", "3x", "6x")] == ["1x", "3x", "6x"]
    read(text)


def test_rates_at_which_nothing_was_served_leave_a_gap() -> None:
    unserved = [comparison("a", rate=rate, failed=True) for rate in (1.0, 2.0)]
    ET.fromstring(ttft_over_rates(unserved))
    one_served = ttft_over_rates([comparison("a", rate=1.0), unserved[1]])
    curve = re.search(r'<path class="line s0" d="(M[^"]*)"><title>', one_served)
    assert curve is not None
    assert "L" not in curve[1]


def test_a_picture_is_a_file_of_its_own_with_its_colours_and_its_key() -> None:
    names = [f"policy-{n}" for n in range(10)]
    root = ET.fromstring(picture_file(ttft_over_rates([comparison(*names)])))
    style = root.findtext(f"{SVG}style") or ""
    lines = [path for path in root.iter(f"{SVG}path") if "line" in path.attrib["class"].split()]
    for line in lines:
        assert all(f".{name}" in style for name in line.attrib["class"].split())
    assert len(lines) == 2 * len(names)  # a curve for each, and its sample in the key
    assert len({line.attrib["class"] for line in lines}) == len(names)
    texts = [text for text in root.iter(f"{SVG}text") if "y" in text.attrib]
    assert {*names} <= {text.text for text in texts}
    height = float(root.attrib["viewBox"].split()[3])
    assert max(float(text.attrib["y"]) for text in texts) < height


def test_a_long_run_of_a_large_fleet_has_a_bounded_page() -> None:
    wide = np.random.default_rng(3).integers(0, 50, (20_000, 1000))
    workers = [f"w{number}" for number in range(1000)]
    seconds = np.arange(20_000)
    run = replace(result("a"), in_flight=wide, sampled_s=seconds, workers=workers)
    assert load_by_worker(run).shape == (1000, CELLS_MAX)
    assert len(page([compared(run)], COMMAND)) < 1_500_000


def test_a_map_keeps_the_peak_of_each_span() -> None:
    flat = np.zeros((4000, 2), np.int64)
    flat[1234, 1] = 7
    run = replace(result("a"), in_flight=flat, sampled_s=np.arange(4000))
    assert load_by_worker(run).max(axis=1).tolist() == [0, 7]
    busy = np.array([0, 1234, 3999])  # a second that is not sampled had no requests
    again = replace(run, in_flight=flat[busy], sampled_s=busy)
    assert load_by_worker(again).tolist() == load_by_worker(run).tolist()


def test_quantiles_leave_out_what_is_not_known() -> None:
    values = quantiles(np.array([np.nan, 3.0, 1.0, 2.0]))
    assert (values[0], values[-1]) == (1.0, 3.0)
    assert len(quantiles(np.array([np.nan]))) == 0


def test_the_smallest_groups_are_one() -> None:
    run = result("a", count=200)
    groups = [f"t{min(n, 29)}" for n in range(200)]
    waits = waits_by_group(run, groups)
    assert len(waits) == GROUPS_MAX
    assert sum(one.requests for one in waits) == 200
    assert waits[-1].group == OTHERS
    assert any(one.group == "t29" for one in waits)


@pytest.mark.parametrize(
    ("about", "by", "names"),
    [
        ([{"tenant": "a"}, {"tenant": None}], "tenant", ["a", "(no tenant)"]),
        ([{"priority": 5}, {}], "priority", ["priority 5", "priority 0"]),
        ([{}, {}], "", ["all requests", "all requests"]),
    ],
)
def test_what_tells_requests_apart(about: list[dict[str, Any]], by: str, names: list[str]) -> None:
    assert groups_of(trace_of(about)) == (by, names)


def test_a_picture_is_a_png_with_the_colours_of_the_values() -> None:
    data = png(np.array([[0, 5], [10, 10]]), 10)
    width, height, bits, kind = struct.unpack(">IIBB", data[16:26])
    assert (width, height, bits, kind) == (2, 2, 8, 3)
    begin = data.index(b"IDAT") + 4
    assert list(zlib.decompress(data[begin:-16])) == [0, 0, 128, 0, 255, 255]


def test_colours_grow_lighter() -> None:
    sums = [sum(ramp(step / 20)) for step in range(21)]
    assert sums == sorted(sums)


@pytest.mark.parametrize(
    ("least", "step"), [(0.7, 1), (1, 1), (1.2, 2), (3, 5), (7, 10), (0.03, 0.05), (0, 1)]
)
def test_steps_are_round(least: float, step: float) -> None:
    assert nice_step(least) == pytest.approx(step)


def test_hit_rates_over_time_follow_the_arrivals() -> None:
    run = result("p")
    rates = hit_rates_over_time(run, run.cached_blocks, np.array([0.0, 10.0, 20.0, 40.0, 50.0]))
    assert rates[:3].tolist() == [0.0, 0.0, 0.5]
    assert np.isnan(rates[3])
