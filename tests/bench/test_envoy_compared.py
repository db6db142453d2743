"""Tests of the comparison of pickers behind Envoy: its mixes, its sums and its table."""

import random

import pytest

from tests.bench.envoy_compared import MIXES, PLAIN, TURNS, USERS, result_of, table_of


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_is_the_same_for_each_picker(mix: str) -> None:
    first = MIXES[mix](random.Random(3), 10.0)
    assert first == MIXES[mix](random.Random(3), 10.0)
    assert first != MIXES[mix](random.Random(4), 10.0)
    turns = [str(turn["messages"]) for session in first for turn in session]
    assert len(set(turns)) == len(turns) > 50


def test_an_agents_chat_begins_anew_after_its_turns() -> None:
    sessions = MIXES["agents"](random.Random(3), 10.0)
    assert len(sessions) == USERS
    for turns in sessions:
        begun = [turn["anew"] for turn in turns]
        assert begun == [True, *[False] * (TURNS - 1), True, False]
        assert [len(turn["messages"]) == 2 for turn in turns] == begun


def test_a_row_has_medians_of_the_seeds_and_the_ratio_to_the_second_picker() -> None:
    answers = [
        {"ttft_s": 0.1, "end_s": 0.8, "prompt_tokens": 100, "cached_tokens": 50},
        {"ttft_s": 0.3, "end_s": 0.9, "prompt_tokens": 300, "cached_tokens": 250},
    ]
    rows = [
        result_of("agents", name, seed, answers, spent, 64.0)
        for name, seed, spent in (
            ("kvroute", 1, (0.01, 0.002)),
            ("before", 1, (0.02, 0.002)),
            ("kvroute", 2, (0.03, 0.002)),
            (PLAIN, 1, (0.002,)),
        )
    ]
    assert rows[0].ttft_ms == 200.0
    assert rows[0].cached_share == 0.75
    assert rows[0].picker_cpu_s == 5.0
    assert rows[3].picker_cpu_s == 0.0
    assert rows[3].envoy_cpu_s == 1.0
    cells = [list(column.cells) for column in table_of(rows).columns]
    assert cells[1] == ["kvroute", "before", PLAIN]
    assert cells[2] == ["4", "2", "2"]
    assert cells[-1] == ["1.00", "", ""]
