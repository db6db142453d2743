"""Tables, JSON and CSV of runs that went well, badly, and not at all."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.study.report import Comparison, mean_of, shadow_table, tables, to_json, write_csv
from simulator.traffic.results import ShadowResult, aggregate
from tests.simulator.made_results import comparison, printed, result


def shown_of(one: Comparison, width: int = 160) -> str:
    return printed(*tables(one, width), width=width)


def test_json_has_exactly_the_published_fields() -> None:
    told = json.loads(to_json([comparison("round-robin", "dynamo-adaptive", rate=3.0)]))
    assert {key: told[key] for key in told if key != "runs"} == {
        "trace": "trace",
        "workers": 2,
        "engine": "vllm",
        "rate": 3.0,
        "ceiling": 0.4,
        "pooled_ceiling": 0.3,
    }
    assert [run["policy"] for run in told["runs"]] == ["round-robin", "dynamo-adaptive"]
    for run in told["runs"]:
        parts = {"mean", "p50", "p90", "p99"}
        assert parts == set(run["ttft_ms"]) == set(run["itl_ms"]) == set(run["e2e_ms"])
        assert set(run) == {
            *("policy", "order", "requests", "served", "failed", "shed", "block_hit_rate"),
            *("token_hit_rate", "ttft_ms", "wait_ms", "queue_ms", "itl_ms", "e2e_ms", "load_cv"),
            *("goodput_rps", "goodput_share", "queued", "queue_timeouts", "queue_full"),
            *("preemptions", "copies", "wall_s"),
        }
        assert (run["order"], run["requests"], run["failed"], run["shed"]) == ("priority", 40, 0, 0)
        assert run["block_hit_rate"] == run["token_hit_rate"] == 0.25
        assert run["itl_ms"]["p99"] == pytest.approx(20.0)
        assert (run["copies"], run["wall_s"]) == (3, 1.5)


def test_several_rates_are_a_list_of_the_same_form() -> None:
    told = json.loads(to_json([comparison("p", rate=1.0), comparison("p", rate=3.0)]))
    assert [one["rate"] for one in told] == [1.0, 3.0]


@pytest.mark.parametrize("about", [{"count": 0}, {"failed": True}])
def test_nothing_to_measure_is_null_in_json_a_dash_in_tables_and_no_error(
    about: dict[str, Any], tmp_path: Path
) -> None:
    one = comparison("p", **about)
    told = json.loads(to_json([one]))["runs"][0]
    assert told["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert told["goodput_rps"] == told["block_hit_rate"] == 0.0
    assert " - " in shown_of(one)
    write_csv([one], tmp_path / "runs.csv")


def test_the_table_puts_runs_beside_the_best_possible() -> None:
    shown = shown_of(comparison("round-robin", "dynamo-adaptive"))
    for text in (
        *("trace at 1x, 2 workers (vllm)", "round-robin", "dynamo-adaptive", "ceiling"),
        *("25.0%", "40.0%", "39.0%", "62%", "of one LRU cache's 30.0%", "83%", "133%"),
        *("goodput", "TTFT <= 500 ms", "ITL <= 50 ms"),
        *("TTFT mean", "queue mean", "ITL mean", "20.0 ms", "end to end mean", "p99", "copies"),
    ):
        assert text in shown
    assert "seeds" not in shown
    assert "messages lost" in shown
    for nothing in ("gaps", "streams"):
        assert nothing not in shown


def test_runs_that_find_no_room_in_a_table_get_another_one() -> None:
    names = ["dynamo-adaptive", "dynamo-blocks", "round-robin", "ttft", "conductor"]
    for width, count in ((120, 1), (80, 2), (60, 5), (20, 5)):
        assert len(tables(comparison(*names), width)) == count
    shown = shown_of(comparison(*names), 80)
    assert shown.count("TTFT mean") == shown.count("2 workers (vllm)") == 2
    assert max(map(len, shown.splitlines())) <= 80
    for name in names:
        assert shown.count(name) == 1  # whole, not folded


def test_policies_that_only_watched_have_a_table_of_their_own() -> None:
    assert shadow_table(comparison("p")) is None
    shadows = {
        "watcher": ShadowResult(400, 300, -5000, -20.0),
        "idle": ShadowResult(0, 0, 0, 0.0),
    }
    shown = printed(shadow_table(comparison("p", shadows=shadows)) or "")
    for text in ("watcher", "400", "75.0%", "-5,000", "+50.0 ms", "idle"):
        assert text in shown


def test_several_seeds_are_averaged_and_their_spread_is_told() -> None:
    one = comparison("p", seeds=(1, 2, 3))
    each = [numbers.ttft_ms.mean for numbers in one.runs[0].by_seed]
    assert len(set(each)) == 3
    assert one.runs[0].numbers.ttft_ms.mean == pytest.approx(np.mean(each))
    assert one.runs[0].numbers.requests == 40
    shown = shown_of(one)
    assert "mean of 3 seeds" in shown
    assert f"{np.std(each):,.0f} ms" in shown


def test_the_mean_of_one_run_is_that_run() -> None:
    numbers = aggregate(result("p"))
    assert mean_of([numbers]) == mean_of([numbers, numbers]) == numbers


def test_csv_has_a_row_for_each_policy_rate_and_seed(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    seeds = (4, 5)
    write_csv([comparison("a", "b", rate=rate, seeds=seeds) for rate in (1.0, 3.0)], path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["rate"], row["policy"], row["seed"]) for row in rows] == [
        (rate, policy, seed)
        for rate in ("1.0", "3.0")
        for policy in ("a", "b")
        for seed in ("4", "5")
    ]
    first = rows[0]
    assert [first[name] for name in ("trace", "ceiling", "token_ceiling", "pooled_ceiling")] == [
        *("trace", "0.4", "0.39", "0.3"),
    ]
    assert float(first["itl_ms_p90"]) == pytest.approx(20.0)
    assert float(first["queue_ms_mean"]) == pytest.approx(float(first["ttft_ms_mean"]) / 2)
