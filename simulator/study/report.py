"""What runs came to, side by side: a table, JSON and CSV."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from simulator.traffic.results import (
    Aggregates,
    Distribution,
    Integers,
    RunResult,
    Slo,
)
from simulator.traffic.reuse import Ceiling


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One policy at one rate, once for each seed."""

    first: RunResult
    """With the first seed: what plots show."""
    by_seed: Sequence[Aggregates]

    @property
    def label(self) -> str:
        return run_label(self.first.policy, self.first.order)

    @property
    def numbers(self) -> Aggregates:
        """The mean over seeds."""
        return mean_of(self.by_seed)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Several policies on the same traffic, each from a cold start."""

    trace: str
    workers: int
    engine: str
    rate: float
    """Times the trace's own clock."""
    ceiling: Ceiling
    """Over the requests that count."""
    reusable: Integers
    """What one infinite cache would have had of each prompt, in blocks; shape (requests,)."""
    slo: Slo
    seeds: Sequence[int]
    runs: Sequence[Run]

    def to_dict(self) -> dict[str, Any]:
        """The form of `kvroute replay --json`. Hit rates and the ceiling are shares, 0 to 1."""
        return {
            "trace": self.trace,
            "workers": self.workers,
            "engine": self.engine,
            "rate": self.rate,
            "ceiling": self.ceiling.blocks,
            "runs": [_run_dict(run.numbers) for run in self.runs],
        }


def run_label(policy: str, order: str) -> str:
    """What a run is called in tables and plots."""
    return policy if order == "fcfs" else f"{policy}, {order}"


def mean_of(runs: Sequence[Aggregates]) -> Aggregates:
    """Each number's mean over the runs, counts rounded; numbers of one run are its own."""
    if len(runs) == 1:
        return runs[0]
    means: dict[str, Any] = {}
    for one in fields(Aggregates):
        values = [getattr(run, one.name) for run in runs]
        if isinstance(values[0], str):
            means[one.name] = values[0]
        elif isinstance(values[0], Distribution):
            columns = [[getattr(value, name) for name in _PARTS] for value in values]
            means[one.name] = Distribution(*np.mean(columns, axis=0).tolist())
        elif isinstance(values[0], int):
            means[one.name] = round(float(np.mean(values)))
        else:
            means[one.name] = float(np.mean(values))
    return Aggregates(**means)


def to_json(comparisons: Sequence[Comparison]) -> str:
    """One comparison as an object, several (one a rate) as a list of them. NaN becomes null."""
    told = [comparison.to_dict() for comparison in comparisons]
    return msgspec.json.format(msgspec.json.encode(told[0] if len(told) == 1 else told)).decode()


def write_csv(comparisons: Sequence[Comparison], path: Path) -> None:
    """One row a run, each seed its own; what is not known is an empty cell."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*_CSV_ABOUT, *_csv_names()])
        for comparison in comparisons:
            about = [comparison.trace, comparison.workers, comparison.engine, comparison.rate]
            ceiling = [comparison.ceiling.blocks, comparison.ceiling.tokens]
            for run in comparison.runs:
                for seed, numbers in zip(comparison.seeds, run.by_seed, strict=True):
                    rows.writerow([*about, seed, *ceiling, *_csv_cells(numbers)])


def tables(comparison: Comparison, width: int) -> list[Table]:
    """The runs side by side, beside the ceiling: as many in a table as `width` columns have room
    for, and at least one."""
    parts: list[list[Run]] = []
    room = 0
    for run in comparison.runs:
        needed = max(len(run.label), _CELL_WIDTH) + _COLUMN_GAP
        if not parts or needed > room:
            parts.append([])
            room = width - _FIXED_WIDTH
        parts[-1].append(run)
        room -= needed
    return [_table(comparison, runs) for runs in parts]


def _table(comparison: Comparison, runs: Sequence[Run]) -> Table:
    """Some of the runs."""
    of_seeds = f", mean of {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else ""
    title = (
        f"{comparison.trace} at {comparison.rate:g}x, {comparison.workers} workers"
        f" ({comparison.engine}){of_seeds}"
    )
    shown = Table(title=title, box=SIMPLE, min_width=len(title) + 1)
    shown.add_column("", no_wrap=True)
    for run in runs:
        shown.add_column(run.label, justify="right", overflow="fold")
    shown.add_column("ceiling", justify="right")
    numbers = [run.numbers for run in runs]
    ceiling = comparison.ceiling

    def row(name: str, cell: Callable[[Aggregates], str], best: str = "") -> None:
        shown.add_row(name, *map(cell, numbers), best)

    row("block hit rate", lambda one: f"{one.block_hit_rate:.1%}", f"{ceiling.blocks:.1%}")
    row("  of the ceiling", lambda one: _of(one.block_hit_rate, ceiling.blocks), "100%")
    row("token hit rate", lambda one: f"{one.token_hit_rate:.1%}", f"{ceiling.tokens:.1%}")
    shown.add_section()
    for name, pick, digits in _DURATIONS:
        for part in _PARTS:
            label = f"{name} mean" if part == "mean" else f"  {part}"

            def cell(
                one: Aggregates,
                pick: Callable[[Aggregates], Distribution] = pick,
                part: str = part,
                digits: int = digits,
            ) -> str:
                return milliseconds(getattr(pick(one), part), digits)

            row(label, cell)
        if name == "TTFT" and len(comparison.seeds) > 1:
            deviations = [f"{_deviation(run):,.0f} ms" for run in runs]
            shown.add_row("  mean, std of seeds", *deviations, "")
    shown.add_section()
    row(_promise(comparison.slo), lambda one: f"{one.goodput_rps:.2f} /s")
    row("load, std / mean", lambda one: f"{one.load_cv:.2f}", "0.00")
    row("requests", lambda one: f"{one.requests:,}")
    row("  failed", lambda one: f"{one.failed:,}", "0")
    row("  shed", lambda one: f"{one.shed:,}", "0")
    row("preemptions", lambda one: f"{one.preemptions:,}", "0")
    row("copies", lambda one: f"{one.copies:,}")
    for name in _noted(comparison.runs):
        cells = [f"{run.first.counters.get(name, 0):,}" for run in runs]
        shown.add_row(name.replace("_", " "), *cells, "")
    row("took here", lambda one: f"{one.wall_s:.1f} s")
    return shown


def shadow_table(comparison: Comparison) -> Table | None:
    """What policies that only watched would have done; None: there were none."""
    watched = [(run, name) for run in comparison.runs for name in run.first.shadows]
    if not watched:
        return None
    shown = Table(title="policies that only watched", box=SIMPLE)
    for name in ("policy", "in the run of"):
        shown.add_column(name, no_wrap=True)
    for name in ("decisions", "same pick", "overlap beside the picks'", "TTFT beside theirs"):
        shown.add_column(name, justify="right")
    for run, name in watched:
        shadow = run.first.shadows[name]
        same = f"{shadow.agreements / shadow.decisions:.1%}" if shadow.decisions else "-"
        more = f"{shadow.predicted_tokens_more:+,} tokens"
        later_s = -shadow.predicted_s_sooner / max(1, shadow.decisions)
        later = f"{1000 * later_s:+.1f} ms"
        shown.add_row(name, run.label, f"{shadow.decisions}", same, more, later)
    return shown


_CELL_WIDTH = 10
"""Of most numbers."""
_COLUMN_GAP = 3
_FIXED_WIDTH = 40
"""Of the names of the rows, the ceiling and the edges."""
_PARTS = ("mean", "p50", "p90", "p99")
_DURATIONS: tuple[tuple[str, Callable[[Aggregates], Distribution], int], ...] = (
    ("TTFT", lambda one: one.ttft_ms, 0),
    ("queue", lambda one: one.queue_ms, 0),
    ("ITL", lambda one: one.itl_ms, 1),
    ("end to end", lambda one: one.e2e_ms, 0),
)
"""Name, what, digits after the point."""

_CSV_ABOUT = ("trace", "workers", "engine", "rate", "seed", "ceiling", "token_ceiling")


def _run_dict(numbers: Aggregates) -> dict[str, Any]:
    return {
        "policy": numbers.policy,
        "order": numbers.order,
        "requests": numbers.requests,
        "failed": numbers.failed,
        "shed": numbers.shed,
        "block_hit_rate": numbers.block_hit_rate,
        "token_hit_rate": numbers.token_hit_rate,
        "ttft_ms": _distribution_dict(numbers.ttft_ms),
        "itl_ms": _distribution_dict(numbers.itl_ms),
        "e2e_ms": _distribution_dict(numbers.e2e_ms),
        "load_cv": numbers.load_cv,
        "goodput_rps": numbers.goodput_rps,
        "copies": numbers.copies,
        "wall_s": numbers.wall_s,
    }


def _distribution_dict(one: Distribution) -> dict[str, float | None]:
    values = {name: getattr(one, name) for name in _PARTS}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _csv_names() -> list[str]:
    names = []
    for one in fields(Aggregates):
        is_distribution = one.type is Distribution
        names += [f"{one.name}_{part}" for part in _PARTS] if is_distribution else [one.name]
    return names


def _csv_cells(numbers: Aggregates) -> list[object]:
    cells: list[object] = []
    for one in fields(Aggregates):
        value = getattr(numbers, one.name)
        if isinstance(value, Distribution):
            cells += ["" if told is None else told for told in _distribution_dict(value).values()]
        else:
            cells.append(value)
    return cells


def _noted(runs: Sequence[Run]) -> list[str]:
    """What else was counted in any of the runs, with the first seed."""
    names = {name for run in runs for name, count in run.first.counters.items() if count}
    return sorted(names - {"copies", "streams_live"})


def _promise(slo: Slo) -> str:
    """What goodput counts."""
    kept = [("TTFT", slo.ttft_s), ("ITL", slo.itl_s)]
    told = [f"{name} <= {1e3 * most:g} ms" for name, most in kept if most is not None]
    return "\n  ".join(["goodput", *told]) if told else "served"


def _of(rate: float, ceiling: float) -> str:
    return f"{rate / ceiling:.0%}" if ceiling else "-"


def milliseconds(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f} ms"


def _deviation(run: Run) -> float:
    """Of the mean time to first token, in ms."""
    return float(np.std([numbers.ttft_ms.mean for numbers in run.by_seed]))
