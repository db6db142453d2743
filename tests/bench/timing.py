"""How benchmarks measure: one core, medians of repeats."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

REPEATS = 5
TIME_S = 0.15
"""Of each repeat, at least."""


def seconds_of(run: Callable[[], object]) -> float:
    """Median seconds of one go."""
    run()  # warm
    return median(_repeat(run) for _ in range(REPEATS))


def rate(name: str, run: Callable[[], object], count: int, unit: str) -> dict[str, Any]:
    """A row for something done `count` times in each go; more is better."""
    return row(name, round(count / seconds_of(run)), unit, "more")


def duration_us(name: str, run: Callable[[], object]) -> dict[str, Any]:
    """A row for how long one go takes; less is better."""
    return row(name, round(seconds_of(run) * 1e6, 2), "us", "less")


def row(name: str, ours: float, unit: str, better: str, note: str = "") -> dict[str, Any]:
    """A line of the report. better: "less" or "more"; a note is there only if it says something."""
    found: dict[str, Any] = {
        "name": name,
        "ours": ours,
        "other": None,
        "unit": unit,
        "ratio": None,
        "better": better,
    }
    if note:
        found["note"] = note
    return found


def beside(found: dict[str, Any], other: float | None) -> dict[str, Any]:
    """The row with another router's number; ratio: how many times better ours is."""
    if other is None:
        return found
    ours = found["ours"]
    ratio = other / ours if found["better"] == "less" else ours / other
    return found | {"other": round(other, 3), "ratio": round(ratio, 2)}


def _repeat(run: Callable[[], object]) -> float:
    goes = 0
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < TIME_S:
        run()
        goes += 1
    return spent / goes
