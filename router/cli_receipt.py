"""`kvroute explain --receipt FILE`: the costs of a decision that was made, worked out anew."""

from datetime import UTC, datetime
from typing import IO

import click
from rich.console import Console
from rich.table import Table

from router.recompute import FormulaError, check, read_receipt


def show_receipt(file: IO[bytes]) -> int:
    """Prints a receipt with its costs, and whether they hold; 1 when they don't."""
    try:
        receipt = read_receipt(file.read())
        verdict = check(receipt)
    except (FormulaError, ValueError) as error:
        raise click.ClickException(f"{file.name}: {error}") from error
    console = Console(width=max(Console().width, 200), soft_wrap=True, highlight=False)
    when = datetime.fromtimestamp(receipt.decided_at_s, UTC).isoformat(timespec="milliseconds")
    console.print(
        f"[bold]{receipt.policy}[/] at {when} by {receipt.replica or 'a router without a name'}:"
        f" {receipt.prompt_tokens} prompt tokens, {receipt.candidates} candidates"
    )
    for i, clause in enumerate(receipt.formula.split("; ")):
        console.print(f"  {'' if i else 'cost = '}{clause}")
    shared = {**receipt.parameters, **receipt.terms}
    if shared:
        console.print("  with " + ", ".join(f"{name} {one:g}" for name, one in shared.items()))
    table = Table(box=None, header_style="bold", pad_edge=False)
    terms = sorted(receipt.picked.terms)
    for name in ("", "worker", *terms, "cost", "worked out anew"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("", "worker") else "right")
    for row, role in zip(verdict.rows, ("pick", "next"), strict=False):
        numbers = [f"{row.terms[term]:.4g}" if term in row.terms else "" for term in terms]
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
    for reason, count in sorted(receipt.excluded.items()):
        console.print(f"excluded: {count} {reason}")
    if receipt.tied > 1:
        console.print(f"{receipt.tied} tied for the lowest cost, and the pick was random.")
    for complaint in verdict.complaints:
        console.print(f"[red]does not hold:[/] {complaint}")
    if not verdict.complaints:
        console.print("[green]It holds.[/]")
    return 1 if verdict.complaints else 0
