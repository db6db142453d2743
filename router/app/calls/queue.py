"""`kvroute queue`: which requests wait in a router, why, and behind which."""

from collections.abc import Iterable, Sequence

import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from kvroute.v1 import ListQueueResponse, QueuedBand
from router.app.calls.dialing import dial
from router.app.calls.fleet import WIDTH_MIN
from router.app.cli.text import add_row, console, line, styled, table

_NUMBERS = ("place", "priority", "waited", "ends in")
_NONE = "-"
"""What a table's cell shows for an empty text."""


async def show_queue(target: str, model: str, limit: int, as_json: bool, timeout_s: float) -> int:
    """Prints the waiting requests, and their numbers by band and tenant; returns the exit code."""
    async with dial(target) as client:
        answer = await client.list_queue(model or None, limit=limit, timeout_s=timeout_s)
    if as_json:
        click.echo(MessageToJson(answer))
        return 0
    screen = console(WIDTH_MIN)
    if not answer.waiting:
        which = f" for {model!r}" if model else ""
        screen.print(line(f"no request{which} waits in the router at {target}"))
        _print_elsewhere(answer, screen)
        return 0
    screen.print(_table(answer), crop=False)
    if (more := answer.waiting - len(answer.requests)) > 0:
        screen.print(line(f"and {more} more (--limit)"))
    screen.print(line(styled(f"{answer.waiting} waiting", "bold"), "; ", _sums(answer)))
    _print_elsewhere(answer, screen)
    return 0


def _table(answer: ListQueueResponse) -> Table:
    made = table("model", "role", "request", right=_NUMBERS)
    for name in ("band", "tenant", "held by", "behind"):
        made.add_column(name, no_wrap=True)
    for request in answer.requests:
        add_row(
            made,
            request.model or _NONE,
            request.role,
            request.request_id,
            str(request.place),
            str(request.priority),
            f"{request.waited_s:.1f} s",
            f"{max(0.0, request.expires_in_s):.1f} s",
            request.band,
            request.tenant or _NONE,
            request.held_by,
            request.behind or _NONE,
        )
    return made


def _sums(answer: ListQueueResponse) -> str:
    tenants = (f"{tenant.tenant or _NONE} {tenant.count}" for tenant in answer.tenants)
    return f"bands: {_bands(answer.bands)}; tenants: {_listed(tenants)}"


def _print_elsewhere(answer: ListQueueResponse, screen: Console) -> None:
    """Prints the numbers of requests that wait in other replicas, if any are known."""
    if answer.replica_bands:
        screen.print(line(f"in other replicas: bands: {_bands(answer.replica_bands)}"))


def _bands(bands: Sequence[QueuedBand]) -> str:
    return _listed(
        f"{band.band} {band.count}" + (f" (oldest {band.oldest_s:.1f} s)" if band.count else "")
        for band in reversed(bands)
    )


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)
