"""Runs every benchmark, prints what they say, and writes it to build/bench.json."""

import argparse
import importlib
import json
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench import dynamo_service
from tests.bench.environments import BUILD

RESULTS = BUILD / "bench.json"
WIDTH = 90
"""Columns that the table takes, at least."""
FIRST = [
    "cpu_tokens_unary_us",
    "cpu_tokens_stream_us",
    "cpu_hashes_unary_us",
    "cpu_hashes_stream_us",
    "cpu_tokens_key_unary_us",
    "cpu_tokens_key_stream_us",
    "cpu_hashes_key_unary_us",
    "cpu_hashes_key_stream_us",
    "route_unary_8192_p50_us",
    "route_unary_hashes_p50_us",
    "client_tokens_rps",
    "client_hashes_rps",
    "hash_8192_b16",
    "match_512_w64",
    "match_2048_w64",
    "store_16",
    "memory_chain_bytes",
    "memory_shared64_bytes",
    "forget_pause_ms",
    "match_growth_in_blocks",
    "match_growth_in_index",
    "ingest_blocks_per_s",
    "nats_ingest_blocks_per_s",
    "event_to_visible_idle_p50_us",
    "decision_8192_w8_us",
    "decision_8192_w64_us",
    "decision_8192_w1000_us",
]
"""What README.md explains one by one; the others show what these are made of."""


def main(words: list[str]) -> None:
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of modules; default: all")
    given = parser.parse_args(words).words
    chosen = [name for name in names if not given or any(word in name for word in given)]
    if not chosen:
        parser.error(f"no module has a name with any of: {' '.join(given)}")
    console = Console()
    console.width = max(console.width, WIDTH)
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    for name in chosen:
        with console.status(f"{name} ({time.monotonic() - started:.0f} s so far)"):
            rows += dynamo_service.compared(importlib.import_module(f"tests.bench.{name}").rows())
    rows = in_order(rows)
    console.print(table_of(rows))
    for row in rows:
        if "note" in row:
            console.print(f"{row['name']}: {row['note']}", highlight=False, soft_wrap=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(f"written to {RESULTS.relative_to(BUILD.parent)}")


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The named ones first, the others as they came. A name is there once."""
    by_name = {row["name"]: row for row in rows}
    if len(by_name) < len(rows):
        raise AssertionError("two rows have the same name")
    return [by_name.pop(name) for name in FIRST if name in by_name] + list(by_name.values())


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="kvroute and the other router",
        caption="ratio: how many times better than the other router",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("row", no_wrap=True)
    for column in ("ours", "other", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    for row, after in zip_longest(rows, rows[1:]):
        arrow = "↑" if row["better"] == "more" else "↓"
        last_named = row["name"] in FIRST and after is not None and after["name"] not in FIRST
        table.add_row(
            row["name"],
            shown(row["ours"]),
            shown(row["other"]),
            shown(row["ratio"]),
            f"{row['unit']} {arrow}",
            style="red" if row["ratio"] is not None and row["ratio"] < 1 else None,
            end_section=last_named,
        )
    return table


def shown(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1e6:
        return f"{value / 1e6:,.2f} M"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


if __name__ == "__main__":
    main(sys.argv[1:])
