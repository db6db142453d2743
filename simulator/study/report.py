"""The results of runs side by side: a table, JSON and CSV."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from router.config.settings.queue_settings import QueueSettings
from simulator.traffic.results import Aggregates, Distribution, Integers, RunResult, Slo
from simulator.traffic.reuse import Ceiling

DEFAULT_ORDER = QueueSettings().order


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One policy at one rate, run with each seed."""

    first: RunResult
    """The run with the first seed, which pictures show."""
    by_seed: Sequence[Aggregates]

    @property
    def label(self) -> str:
        return run_label(self.first.policy, self.first.order)

    @property
    def numbers(self) -> Aggregates:
        """The numbers of the run, as means over the seeds."""
        return mean_of(self.by_seed)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Several policies on the same traffic, each from a cold start."""

    trace: str
    workers: int
    engine: str
    rate: float
    """Factor by which the trace is played faster than it was recorded."""
    ceiling: Ceiling
    """Ceiling of the hit rates, over the requests that count."""
    pooled: Ceiling
    """Pooled ceiling, of one LRU cache as large as the fleet's, over the requests that count."""
    reusable: Integers
    """Blocks of each prompt in a single infinite cache; shape (requests,)."""
    slo: Slo
    seeds: Sequence[int]
    runs: Sequence[Run]
    grouped_by: str = ""
    """What groups the requests: tenant or priority; empty: all requests are one group."""
    groups: Sequence[str] = ()
    """The group of each request; empty: all requests are one group."""

    def to_dict(self) -> dict[str, Any]:
        """The form of `kvroute replay --json`. Hit rates and ceilings are shares, 0 to 1."""
        return {
            "trace": self.trace,
            "workers": self.workers,
            "engine": self.engine,
            "rate": self.rate,
            "ceiling": self.ceiling.blocks,
            "pooled_ceiling": self.pooled.blocks,
            "runs": [run.numbers for run in self.runs],
        }


def run_label(policy: str, order: str) -> str:
    """The name of a run in tables and pictures: its policy, and its order of the queue unless that
    is the default."""
    return policy if order in ("", DEFAULT_ORDER) else f"{policy}, {order}"


def mean_of(runs: Sequence[Aggregates]) -> Aggregates:
    """Each number's mean over the runs, counts rounded; a single run is returned unchanged."""
    if len(runs) == 1:
        return runs[0]
    means: dict[str, Any] = {}
    for field in fields(Aggregates):
        values = [getattr(run, field.name) for run in runs]
        if isinstance(values[0], str):
            means[field.name] = values[0]
        elif isinstance(values[0], Distribution):
            columns = [[getattr(value, name) for name in _PARTS] for value in values]
            means[field.name] = Distribution(*np.mean(columns, axis=0).tolist())
        elif isinstance(values[0], int):
            means[field.name] = round(float(np.mean(values)))
        else:
            means[field.name] = float(np.mean(values))
    return Aggregates(**means)


def to_json(comparisons: Sequence[Comparison]) -> str:
    """A single comparison as an object, several (one for each rate) as a list. NaN becomes null."""
    objects = [comparison.to_dict() for comparison in comparisons]
    document = objects[0] if len(objects) == 1 else objects
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def write_csv(comparisons: Sequence[Comparison], path: Path) -> None:
    """A row for each run and seed; unknown values are empty cells."""
    rows = [
        {
            "trace": comparison.trace,
            "workers": comparison.workers,
            "engine": comparison.engine,
            "rate": comparison.rate,
            "seed": seed,
            "ceiling": comparison.ceiling.blocks,
            "token_ceiling": comparison.ceiling.tokens,
            "pooled_ceiling": comparison.pooled.blocks,
            **_csv_cells(numbers),
        }
        for comparison in comparisons
        for run in comparison.runs
        for seed, numbers in zip(comparison.seeds, run.by_seed, strict=True)
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def tables(comparison: Comparison, width: int) -> list[Table]:
    """Tables of the runs side by side, beside the ceiling: as many runs in a table as fit into
    `width` columns, and at least one."""
    parts: list[list[Run]] = []
    room = 0
    for run in comparison.runs:
        needed = max(len(run.label), _CELL_WIDTH) + _COLUMN_GAP
        if not parts or needed > room:
            parts.append([])
            room = width - _FIXED_WIDTH
        parts[-1].append(run)
        room -= needed
    return [table_of(comparison, runs) for runs in parts]


def table_of(comparison: Comparison, runs: Sequence[Run]) -> Table:
    """A table of these runs, a column each, and the ceiling in the last one."""
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
    ceiling, pooled = comparison.ceiling, comparison.pooled

    def row(name: str, cell: Callable[[Aggregates], str], best: str = "") -> None:
        shown.add_row(name, *map(cell, numbers), best)

    row("block hit rate", lambda run: f"{run.block_hit_rate:.1%}", f"{ceiling.blocks:.1%}")
    row("  of the ceiling", lambda run: _of(run.block_hit_rate, ceiling.blocks), "100%")
    row(
        f"  of one LRU cache's {pooled.blocks:.1%}",
        lambda run: _of(run.block_hit_rate, pooled.blocks),
        _of(ceiling.blocks, pooled.blocks),
    )
    row("token hit rate", lambda run: f"{run.token_hit_rate:.1%}", f"{ceiling.tokens:.1%}")
    shown.add_section()
    for name, field, digits in _DURATIONS:
        for part in _PARTS:
            label = f"{name} mean" if part == "mean" else f"  {part}"
            parts = [attrgetter(f"{field}.{part}")(run) for run in numbers]
            shown.add_row(label, *(milliseconds(value, digits) for value in parts), "")
        if name == "TTFT" and len(comparison.seeds) > 1:
            deviations = [f"{_deviation(run):,.0f} ms" for run in runs]
            shown.add_row("  mean, std of seeds", *deviations, "")
    shown.add_section()
    row(_promise(comparison.slo), lambda run: f"{run.goodput_rps:.2f} /s")
    row("  of all requests", lambda run: f"{run.goodput_share:.1%}", "100.0%")
    row("load, std / mean", lambda run: f"{run.load_cv:.2f}", "0.00")
    row("requests", lambda run: f"{run.requests:,}")
    row("  failed", lambda run: f"{run.failed:,}", "0")
    row("  shed", lambda run: f"{run.shed:,}", "0")
    row("waited in a router's queue", lambda run: f"{run.queued:,}", "0")
    row("  waits without a worker", lambda run: f"{run.queue_timeouts:,}", "0")
    row("  refused by a full queue", lambda run: f"{run.queue_full:,}", "0")
    row("preemptions", lambda run: f"{run.preemptions:,}", "0")
    row("copies", lambda run: f"{run.copies:,}")
    for name in _noted(comparison.runs):
        cells = [f"{run.first.counters.get(name, 0):,}" for run in runs]
        shown.add_row(name.replace("_", " "), *cells, "")
    row("took here", lambda run: f"{run.wall_s:.1f} s")
    return shown


def shadow_table(comparison: Comparison) -> Table | None:
    """A table of the shadow policies' results; None: there were no shadow policies."""
    watched = [(run, name) for run in comparison.runs for name in run.first.shadows]
    if not watched:
        return None
    shown = Table(title="shadow policies", box=SIMPLE)
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
"""Width of the cells of most numbers, in characters."""
_COLUMN_GAP = 3
_FIXED_WIDTH = 40
"""Width of the rows' names, the ceiling and the edges."""
_PARTS = ("mean", "p50", "p90", "p99")
_DURATIONS = (
    ("TTFT", "ttft_ms", 0),
    ("wait in the router", "wait_ms", 0),
    ("queue", "queue_ms", 0),
    ("ITL", "itl_ms", 1),
    ("end to end", "e2e_ms", 0),
)
"""Name, field of Aggregates, digits after the point."""


def _csv_cells(numbers: Aggregates) -> dict[str, object]:
    """Column -> cell; a distribution has a column for each part."""
    cells: dict[str, object] = {}
    for name, value in msgspec.json.decode(msgspec.json.encode(numbers)).items():
        if isinstance(value, dict):
            cells |= {f"{name}_{part}": number for part, number in value.items()}
        else:
            cells[name] = value
    return cells


def _noted(runs: Sequence[Run]) -> list[str]:
    """Names of the counters without a row of their own in the table that are above 0 in some run,
    with its first seed."""
    names = {name for run in runs for name, count in run.first.counters.items() if count}
    return sorted(names - {"copies", "streams_live", "queue_timeouts", "queue_full"})


def _promise(slo: Slo) -> str:
    """Name of the table's row for goodput, with the bounds of the SLO."""
    kept = [("TTFT", slo.ttft_s), ("ITL", slo.itl_s)]
    bounds = [f"{name} <= {1e3 * most:g} ms" for name, most in kept if most is not None]
    return "\n  ".join(["goodput", *bounds]) if bounds else "served"


def _of(rate: float, ceiling: float) -> str:
    return f"{rate / ceiling:.0%}" if ceiling else "-"


def milliseconds(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f} ms"


def _deviation(run: Run) -> float:
    """Standard deviation over seeds of the mean time to first token, in ms."""
    return float(np.std([numbers.ttft_ms.mean for numbers in run.by_seed]))
