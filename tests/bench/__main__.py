"""Runs every benchmark, prints what they say, and writes it to build/bench.json.

python -m tests.bench [words of module names ...]
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "build" / "bench.json"


def main(words: list[str]) -> None:
    names = sorted(path.stem for path in HERE.glob("bench_*.py"))
    chosen = [name for name in names if not words or any(word in name for word in words)]
    console = Console()
    rows: list[dict[str, Any]] = []
    for name in chosen:
        with console.status(name):
            rows += importlib.import_module(f"tests.bench.{name}").rows()
    console.print(table_of(rows))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"written to {RESULTS.relative_to(HERE.parent.parent)}")


def table_of(rows: list[dict[str, Any]]) -> Table:
    with_peer = any(row["peer"] is not None for row in rows)
    table = Table(title="kvroute, one core")
    table.add_column("benchmark")
    table.add_column("ours", justify="right")
    if with_peer:
        table.add_column("peer", justify="right")
        table.add_column("ratio", justify="right")
    table.add_column("unit")
    for row in rows:
        compared = [shown(row["peer"]), shown(row["ratio"])] if with_peer else []
        arrow = "↑" if row["better"] == "more" else "↓"
        table.add_row(row["name"], shown(row["ours"]), *compared, f"{row['unit']} {arrow}")
    return table


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])
