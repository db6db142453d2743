"""`kvroute explain --receipt FILE`: recomputes the costs of a past decision."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO

import click
from rich.console import Console

from kvroute.v1 import router_pb2
from router.app.cli.text import add_row, console, line, styled, table
from router.config.printable import shown
from router.observe.audit.logged_decision import LoggedDecision
from router.observe.audit.receipt_file import Receipts, read_receipts
from router.observe.audit.recompute_line import check_line
from router.observe.audit.recompute_receipt import Verdict, check

WIDTH_MIN = 200
_PREFILL_IN_WORDS = {
    "remote": "by a worker that hands its KV cache over",
    "local": "by the worker that decodes, since few tokens are new there; a pair was possible",
    "absent": "by one worker alone, since no worker can hand over",
}
"""Receipt.prefill in words: how the prompt is computed."""


def show_receipt(file: IO[bytes]) -> int:
    """Prints a decision with its costs, and whether recomputed costs match; returns exit code 1
    when they don't.

    For a pair: the receipt of the prefill worker, then that of the decode worker.
    """
    screen = console(WIDTH_MIN)
    try:
        read = read_receipts(file.read())
        if isinstance(read, LoggedDecision):
            return _show(screen, check_line(read))
        return show_receipts(screen, read)
    except ValueError as error:
        raise click.ClickException(shown(f"{file.name}: {error}")) from error


def show_receipts(screen: Console, read: Receipts) -> int:
    """Prints receipts as `show_receipt` does, and returns its exit code; raises ValueError for a
    receipt whose costs can't be recomputed."""
    answer = check(read.answer)
    prefill = None if read.prefill is None else _check_prefill(read.prefill)
    if read.prefill is None:
        return _show(screen, answer)
    words = prefill_in_words(read.answer.prefill)
    screen.print(line(styled("the prompt", "bold"), f": {words}"))
    if prefill is None:
        _show_excluded(screen, read.prefill.excluded)
        wrong = 0
    else:
        wrong = _show(screen, prefill)
    screen.print()
    screen.print(line(styled("the answer", "bold"), ":"))
    return _show(screen, answer) | wrong


def prefill_in_words(prefill: str) -> str:
    """Words for how the prompt is computed. prefill: a value of Receipt.prefill; one of a newer
    router may be unknown."""
    return _PREFILL_IN_WORDS.get(prefill, f"in a way that this kvroute does not know ({prefill})")


def print_formula(screen: Console, formula: str) -> None:
    """Prints a cost formula, each clause (they are separated by `; `) on a line of its own."""
    for clause in f"cost = {formula}".split("; "):
        screen.print(line(f"  {clause}"))


def _check_prefill(receipt: router_pb2.Receipt) -> Verdict | None:
    """The recomputed receipt of the prefill worker; None: no worker could hand over, so none was
    picked."""
    return check(receipt) if receipt.HasField("picked") else None


def _show(screen: Console, verdict: Verdict) -> int:
    when = datetime.fromtimestamp(verdict.decided_at_s, UTC).isoformat(timespec="milliseconds")
    about = (
        f" at {when} by {verdict.replica or 'a router without a name'}:"
        f" {verdict.prompt_tokens} prompt tokens, {verdict.candidates} candidates"
    )
    screen.print(line(styled(verdict.policy, "bold"), about))
    print_formula(screen, verdict.formula)
    if verdict.shared:
        shared = ", ".join(f"{name} {value:g}" for name, value in verdict.shared.items())
        screen.print(line(f"  with {shared}"))
    made = table("", "worker", right=(*verdict.terms, "cost", "recomputed"))
    for row, role in zip(verdict.rows, ("pick", "next"), strict=False):
        numbers = [f"{row.terms[term]:.4g}" if term in row.terms else "" for term in verdict.terms]
        color = "green" if row.agrees else "red"
        add_row(
            made,
            role,
            f"{row.worker_id}/{row.dp_rank}",
            *numbers,
            f"{row.shown:.9g}",
            styled(f"{row.cost:.9g}", color),
        )
    screen.print()
    screen.print(made)
    _show_excluded(screen, verdict.excluded)
    if verdict.tied > 1:
        screen.print(f"{verdict.tied} tied for the lowest cost, and the pick was random.")
    if verdict.moved_from is not None:
        screen.print(line(verdict.moved_from.sentence))
    for complaint in verdict.complaints:
        screen.print(line(styled("does not hold:", "red"), f" {complaint}"))
    if not verdict.complaints:
        screen.print(styled("It holds.", "green"))
    return 1 if verdict.complaints else 0


def _show_excluded(screen: Console, excluded: Mapping[str, int]) -> None:
    for reason, count in sorted(excluded.items()):
        screen.print(line(f"excluded: {count} {reason}"))
