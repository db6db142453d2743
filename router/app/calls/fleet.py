"""`kvroute workers`: the fleet as a router sees it."""

from collections.abc import Sequence

import click
from google.protobuf.json_format import MessageToJson
from rich.table import Table
from rich.text import Text

from events.engines.endpoints import masked
from events.feed.stream import CONNECTION_DOWN
from kvroute.v1 import ListWorkersResponse, WorkerStatus
from router.app.calls.dialing import dial
from router.app.cli.text import add_row, console, line, styled, table


async def show_workers(
    target: str, model: str, as_json: bool, timeout_s: float, required: int = 0
) -> int:
    """Prints the fleet; returns the exit code. required: number of workers that must be able to get
    requests.
    """
    async with dial(target) as client:
        workers = await client.list_workers(model or None, timeout_s=timeout_s)
    if as_json:
        click.echo(MessageToJson(ListWorkersResponse(workers=workers)))
    else:
        _show(target, model, workers)
    able = sum(worker.schedulable for worker in workers)
    if able >= required:
        return 0
    click.echo(
        f"kvroute: {target}: {able} of {len(workers)} workers can get requests, fewer than"
        f" --require {required}",
        err=True,
    )
    return 1


def _show(target: str, model: str, workers: Sequence[WorkerStatus]) -> None:
    screen = console(WIDTH_MIN)
    if not workers:
        which = f" that serves {model!r}." if model else " yet."
        screen.print(line(f"{target} knows no worker{which}"))
        return
    screen.print(_workers_table(workers), crop=False)
    for worker in workers:
        name = styled(f"{_name(worker)}:", "yellow")
        if worker.HasField("ejection"):
            screen.print(line(name, " ", _told_of(worker)))
        for warning in worker.warnings:
            screen.print(line(name, " ", masked(warning)))
    if trouble := cut_off(workers):
        screen.print(line(styled(trouble, "red")))


def _workers_table(workers: Sequence[WorkerStatus]) -> Table:
    made = table("worker", "stream", right=_WORKER_NUMBERS)
    for name in ("role", "engine", "model", "address", "why not"):
        made.add_column(name, no_wrap=True)
    for worker in workers:
        used = f"{worker.active_blocks:.0f}"
        if worker.HasField("total_blocks"):
            used += f"/{worker.total_blocks}"
            if worker.HasField("block_share") and worker.block_share < 1:
                used += f" (to {worker.block_share:.0%})"
        add_row(
            made,
            _name(worker),
            stream_text(worker.stream_state, worker.stream_complete),
            str(worker.blocks_device + worker.blocks_host + worker.blocks_disk),
            used,
            f"{worker.running}{_slots(worker)}",
            str(worker.waiting),
            str(worker.reserved),
            reused_text(worker.hit_ratio),
            worker.role or "?",
            f"{worker.engine} {worker.engine_version}".strip() or "?",
            worker.model or "?",
            masked(worker.address),
            styled(worker.unschedulable_reason, "red"),
        )
    return made


def _told_of(worker: WorkerStatus) -> str:
    """Why and for how long requests are kept away from an ejected worker."""
    ejection = worker.ejection
    of_replica = f" by replica {ejection.replica}" if ejection.replica else ""
    until = ejection.until.ToDatetime().strftime("%H:%M:%S UTC")
    now = "being probed with a few requests" if ejection.probing else f"not before {until}"
    return (
        f"ejected{of_replica} ({ejection.reason}, {ejection.times or 1} in a row);"
        f" gets requests again: {now}"
    )


WIDTH_MIN = 400
_WORKER_NUMBERS = ("held", "in use", "run", "wait", "ours", "reused")


def cut_off(workers: Sequence[WorkerStatus]) -> str:
    """A sentence, if the router receives no worker's messages now and its numbers are old; else
    empty."""
    if not workers or any(worker.stream_reason != CONNECTION_DOWN for worker in workers):
        return ""
    return "the router has lost its connection to NATS: caches and loads are those of before"


def reused_text(hit_ratio: float) -> str:
    """Share of the predicted overlap that the engine reused, as text; it may be above 100 %."""
    if not hit_ratio:
        return "-"
    return f"{hit_ratio:.0%}" if hit_ratio <= 1 else ">100%"


def stream_text(state: str, is_complete: bool) -> Text:
    """State of a worker's event stream, as colored text."""
    color = "green" if state == "live" and is_complete else "yellow"
    return styled(f"{state}{'' if is_complete else ', partial'}", color)


def _slots(worker: WorkerStatus) -> str:
    """Requests that can run at once, as `/N`; ~ marks an estimate; empty: unknown."""
    if worker.HasField("total_slots"):
        return f"/{worker.total_slots}"
    return f"/~{worker.slots_estimated}" if worker.HasField("slots_estimated") else ""


def _name(worker: WorkerStatus) -> str:
    return f"{worker.worker_id}/{worker.dp_rank}"
