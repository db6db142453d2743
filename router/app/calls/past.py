"""`kvroute explain --request ID`: past decisions, and how their requests ended."""

import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console

from kvroute.v1 import FindDecisionsResponse, PastDecision
from router.app.calls.dialing import dial
from router.app.cli.text import console, line, styled
from router.app.offline.receipt import WIDTH_MIN, show_receipts
from router.config.printable import shown
from router.observe.audit.receipt_file import Receipts


async def show_past(target: str, wanted: str, *, timeout_s: float, as_json: bool) -> int:
    """Prints each pick of a request, reservation or client's request with the id `wanted`, and its
    costs recomputed. Returns exit code 1 if there is no pick, or if a recomputed cost differs."""
    async with dial(target) as client:
        past = await client.find_decisions(wanted, timeout_s=timeout_s)
    if as_json:
        click.echo(MessageToJson(FindDecisionsResponse(decisions=past)))
        return 0 if past else 1
    if not past:
        click.echo(
            f"no pick of {shown(wanted)!r} is remembered at {target}: its request was refused"
            " (`kvroute tail` and the decision log show refusals), went past this router, or ended"
            " more than 1.5 times routing.lease_s ago",
            err=True,
        )
        return 1
    screen = console(WIDTH_MIN)
    return max([_show(screen, decision) for decision in past])


def _show(screen: Console, decision: PastDecision) -> int:
    answer = decision.answer
    rank = f"/{answer.dp_rank}" if answer.HasField("dp_rank") else ""
    screen.print(line(styled("request      ", "bold"), shown(decision.request_id)))
    screen.print(line("reservation  ", shown(answer.reservation_id)))
    screen.print(line("worker       ", shown(answer.worker_id + rank), f" at {answer.address}"))
    if answer.HasField("prefill_worker"):
        screen.print(line("prefill      ", shown(answer.prefill_worker.worker_id)))
    reported = (
        f"{decision.cached_tokens} by the engine's count"
        if decision.HasField("cached_tokens")
        else "not reported by the engine"
    )
    screen.print(line(f"state        {decision.state}, picked {decision.age_s:.1f} s ago"))
    screen.print(line(f"cached       {answer.overlap_tokens.usable} tokens predicted, {reported}"))
    screen.print(line(f"output       {decision.output_tokens} tokens reported"))
    screen.print()
    if not answer.HasField("receipt"):
        screen.print("The answer has no receipt: its request had set omit_receipt.")
        return 0
    prefill = answer.prefill_receipt if answer.HasField("prefill_receipt") else None
    try:
        return show_receipts(screen, Receipts(answer.receipt, prefill))
    except ValueError as error:
        raise click.ClickException(shown(str(error))) from error
    finally:
        screen.print()
