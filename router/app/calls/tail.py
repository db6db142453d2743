"""`kvroute tail`: prints decisions, one line each."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click
from google.protobuf.json_format import MessageToJson
from rich.text import Text

from kvroute.v1 import WatchDecisionsResponse, WatchedDecision
from router.app.calls.dialing import dial
from router.app.cli.text import console
from router.config.printable import shown

HEAD = (
    "time          worker                     cached / prompt     cost  queue  request, reservation"
)
WORKER_WIDTH = 24


async def show_decisions(target: str, as_json: bool, **wanted: Any) -> None:
    """Prints decisions until the command is stopped."""
    screen, head = console(0), not as_json
    async with dial(target) as client:
        async for response in client.watch_decisions(**wanted):
            if head:  # the router answers, and looks
                screen.print(Text(HEAD, style="bold"))
                head = False
            for line in lines(response, as_json):
                if isinstance(line, Text):
                    screen.print(line)
                else:
                    click.echo(line)


def lines(response: WatchDecisionsResponse, as_json: bool) -> Iterator[Text | str]:
    if as_json:
        for decision in response.decisions:
            yield MessageToJson(decision, preserving_proto_field_name=True, indent=None)
        return
    yield from map(line_of, response.decisions)
    if response.left_out:
        yield Text(f"  {response.left_out} more were left out: this terminal is too slow", "yellow")
    if response.limited:
        yield Text("  more were made in this second than are looked at", "dim")


def line_of(decision: WatchedDecision) -> Text:
    """A pick or a refusal on one line."""
    line = Text(_clock(decision.decided_at_s) + "  ")
    request = shown(decision.request_id)
    if decision.refusal:
        line.append(decision.refusal, "red")
        line.append(f"  {shown(decision.message)}  ")
        line.append(request, "dim")
        return _append_wait(line, decision)
    picked = decision.receipt.picked
    rank = f"/{picked.dp_rank}" if picked.dp_rank else ""
    line.append(f"{shown(picked.worker_id + rank):<{WORKER_WIDTH}}  ", "bold")
    cached = picked.overlap_tokens.usable
    share = cached / max(1, decision.prompt_tokens)
    style = "green" if share >= 0.5 else "yellow" if share > 0 else "dim"
    line.append(f"{cached:>7,} / {decision.prompt_tokens:<7,} ", style)
    line.append(f"{picked.cost:>9.3f}  {picked.waiting + picked.running:>5}  ")
    line.append(f"{request}  {shown(decision.reservation_id)}", "dim")
    _append_wait(line, decision)
    if decision.receipt.HasField("guarded"):
        passed_over = shown(decision.receipt.guarded.cheapest.worker_id)
        line.append(f"  guard: not {passed_over}", "magenta")
    return line


def _append_wait(line: Text, decision: WatchedDecision) -> Text:
    """Appends the time that the request waited in the router's queue, if it waited there."""
    if decision.waited_s > 0:
        line.append(f"  waited {decision.waited_s:.3f} s", "yellow")
    return line


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S.%f")[:-3]
