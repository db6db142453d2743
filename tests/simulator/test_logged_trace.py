"""A router's decision log as a trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.observe.audit.logged_decision import capture, encode
from simulator.traffic.logged_trace import OUTPUT_TOKENS
from simulator.traffic.trace_columns import TraceError
from simulator.traffic.trace_file import load_trace, read_trace
from tests.stage.fleet import Fleet, prompt


def logged(fleet: Fleet, *asked: tuple[int, int], hashes: bool = True, **about: Any) -> list[str]:
    """The log of prompts, each with so many tokens from a first one on, a second apart."""
    lines: list[str] = []
    for count, first in asked:
        request = fleet.request(prompt(count, first), **about)
        fleet.core.route(
            request,
            fleet.now_s,
            watch=lambda decision: lines.append(encode(capture(decision, "here", hashes)).decode()),
        )
        fleet.now_s += 1.0
    return lines


def two_workers(block_size: int = 16) -> Fleet:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.add(name, block_size=block_size)
    return fleet


def test_requests_come_when_they_came_with_the_text_that_they_shared(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    file.write_text("".join(logged(two_workers(), (100, 0), (96, 0), (100, 0), (96, 5000))))
    trace = load_trace(file)
    assert [one.arrival_s for one in trace.requests] == [0.0, 1.0, 2.0, 3.0]
    assert [one.prompt_tokens for one in trace.requests] == [100, 96, 100, 96]
    assert {one.output_tokens for one in trace.requests} == {OUTPUT_TOKENS}
    assert {one.id_tokens for one in trace.requests} == {16}
    first, shorter, again, other = (one.hash_ids.tolist() for one in trace.requests)
    assert [len(ids) for ids in (first, shorter, again, other)] == [7, 6, 7, 6]
    assert first[:6] == shorter == again[:6]
    assert first[6] != again[6], "the last block is not full: nobody else reuses it"
    assert not set(first) & set(other)


def test_output_tokens_are_those_that_the_request_expected() -> None:
    lines = logged(two_workers(), (64, 0), expected_output_tokens=77)
    assert [one.output_tokens for one in read_trace(lines)] == [77]


def test_a_log_without_hashes_is_no_trace() -> None:
    with pytest.raises(TraceError, match=r"line 1: .*decision_log.hashes was off"):
        list(read_trace(logged(two_workers(), (64, 0), hashes=False)))


def test_lines_of_workers_with_other_blocks_are_refused() -> None:
    lines = logged(two_workers(), (64, 0)) + logged(two_workers(32), (64, 0), request_id="other")
    with pytest.raises(TraceError, match="line 2: workers of another block size"):
        list(read_trace(lines))


def test_a_prompt_without_tokens_shares_nothing() -> None:
    fleet = two_workers()
    lines = logged(fleet, (40, 0))
    by_load = json.loads(lines[0]) | {"request_id": "x", "prefixes": "", "at_s": fleet.now_s}
    first, other = read_trace([*lines, json.dumps(by_load)])
    assert (len(first.hash_ids), len(other.hash_ids)) == (3, 3)
    assert not set(first.hash_ids.tolist()) & set(other.hash_ids.tolist())


def test_a_refused_request_that_is_tried_again_counts_once_and_one_without_a_prompt_not() -> None:
    picked = json.loads(logged(two_workers(), (40, 0))[0])
    decision = {name: of for name, of in picked.items() if name != "picked"} | {"picked": None}
    about = {"v": 1, "replica": "here", "at_s": picked["at_s"]}
    full = about | {"reason": "ALL_WORKERS_FULL", "decision": decision}
    unknown = about | {"reason": "UNKNOWN_MODEL"}
    lines = [json.dumps(one) for one in (unknown, full, full, picked)]
    assert [one.prompt_tokens for one in read_trace(lines)] == [40]


def test_a_line_that_only_looks_like_a_decision_is_refused() -> None:
    with pytest.raises(TraceError, match="line 1: no line of a decision log"):
        list(read_trace(['{"v": 1, "replica": "here"}']))


@pytest.mark.parametrize(
    ("odd", "mistake"),
    [
        ({"prompt_tokens": 10**15}, "no line of a decision log: .* <= 100000000"),
        ({"prompt_tokens": 0}, "no line of a decision log: .* >= 1"),
        ({"prefixes": "no hashes"}, "prefixes: "),
        ({"prefixes": "0123"}, "prefixes: "),
        ({"columns": {"block_size": [0.5, 0.5]}}, "workers of another block size"),
    ],
)
def test_a_line_with_odd_numbers_is_refused(odd: dict[str, Any], mistake: str) -> None:
    line = json.loads(logged(two_workers(), (64, 0))[0]) | odd
    with pytest.raises(TraceError, match=f"line 1: {mistake}"):
        list(read_trace([json.dumps(line)]))
