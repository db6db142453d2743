"""`kvroute explain --receipt FILE`: the costs of a decision that was made, worked out anew."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO

import click
from rich.console import Console
from rich.table import Table

from kvroute.v1 import router_pb2
from router.logged_decision import LoggedDecision
from router.read_receipt import read_receipts
from router.recompute import Verdict, check
from router.recompute_line import check_line

PREFILL_TOLD = {
    "remote": "by a worker that hands its KV cache over",
    "local": "by the one that decodes, since hardly anything is new there; it could have been",
    "absent": "by one worker alone, since nobody can hand over",
}
"""What Receipt.prefill means for the prompt."""


def show_receipt(file: IO[bytes]) -> int:
    """Prints what was decided with its costs, and whether they hold; 1 when they don't.

    Of a pair: who computes the prompt, then who decodes.
    """
    console = Console(width=max(Console().width, 200), soft_wrap=True, highlight=False)
    try:
        read = read_receipts(file.read())
        if isinstance(read, LoggedDecision):
            return _show(console, check_line(read))
        answer = check(read.answer)
        prefill = None if read.prefill is None else _check_prefill(read.prefill)
    except ValueError as error:
        raise click.ClickException(f"{file.name}: {error}") from error
    if read.prefill is None:
        return _show(console, answer)
    console.print(f"[bold]the prompt[/]: {PREFILL_TOLD.get(read.answer.prefill, 'by whoever')}")
    if prefill is None:
        _show_excluded(console, read.prefill.excluded)
        wrong = 0
    else:
        wrong = _show(console, prefill)
    console.print("\n[bold]the answer[/]:")
    return _show(console, answer) | wrong


def _check_prefill(receipt: router_pb2.Receipt) -> Verdict | None:
    """None: nobody could hand over, so there is nothing to work out."""
    return check(receipt) if receipt.HasField("picked") else None


def _show(console: Console, verdict: Verdict) -> int:
    when = datetime.fromtimestamp(verdict.decided_at_s, UTC).isoformat(timespec="milliseconds")
    console.print(
        f"[bold]{verdict.policy}[/] at {when} by {verdict.replica or 'a router without a name'}:"
        f" {verdict.prompt_tokens} prompt tokens, {verdict.candidates} candidates"
    )
    for i, clause in enumerate(verdict.formula.split("; ")):
        console.print(f"  {'' if i else 'cost = '}{clause}")
    if verdict.shared:
        told = ", ".join(f"{name} {one:g}" for name, one in verdict.shared.items())
        console.print(f"  with {told}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "worker", *verdict.terms, "cost", "worked out anew"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("", "worker") else "right")
    for row, role in zip(verdict.rows, ("pick", "next"), strict=False):
        numbers = [f"{row.terms[term]:.4g}" if term in row.terms else "" for term in verdict.terms]
        color = "green" if row.agrees else "red"
        table.add_row(
            role,
            f"{row.worker_id}/{row.dp_rank}",
            *numbers,
            f"{row.told:.9g}",
            f"[{color}]{row.cost:.9g}[/]",
        )
    console.print()
    console.print(table)
    _show_excluded(console, verdict.excluded)
    if verdict.tied > 1:
        console.print(f"{verdict.tied} tied for the lowest cost, and the pick was random.")
    for complaint in verdict.complaints:
        console.print(f"[red]does not hold:[/] {complaint}")
    if not verdict.complaints:
        console.print("[green]It holds.[/]")
    return 1 if verdict.complaints else 0


def _show_excluded(console: Console, excluded: Mapping[str, int]) -> None:
    for reason, count in sorted(excluded.items()):
        console.print(f"excluded: {count} {reason}")
