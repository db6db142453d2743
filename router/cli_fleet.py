"""`kvroute workers` and `kvroute explain`: what an operator types to see the fleet, and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from kvroute.client import KvRouteClient, KvRouteError
from kvroute.v1 import CandidateRow, Explanation, ListWorkersResponse, WorkerStatus


async def show_workers(target: str, model: str, as_json: bool, timeout_s: float) -> int:
    """Prints the fleet; returns the exit code."""
    async with KvRouteClient(target) as client:
        try:
            workers = await client.list_workers(model or None, timeout_s=timeout_s)
        except KvRouteError as error:
            return _complain(target, error)
    if as_json:
        click.echo(MessageToJson(ListWorkersResponse(workers=workers)))
        return 0
    console = Console()
    if not workers:
        console.print(
            f"{target} knows no worker" + (f" that serves {model!r}." if model else " yet.")
        )
        return 0
    console.print(_workers_table(workers))
    for worker in workers:
        for warning in worker.warnings:
            console.print(f"[yellow]{_name(worker)}:[/] {warning}", highlight=False)
    return 0


async def show_explanation(
    *,
    target: str,
    model: str,
    timeout_s: float,
    tokens: str | None,
    text: str | None,
    tokenize: str | None,
    policy: str,
    lora: str,
    cache_salt: str,
    as_json: bool,
) -> int:
    """Prints every candidate's row for a prompt; returns the exit code."""
    if (tokens is None) == (text is None):
        raise click.UsageError("give the prompt as --tokens or as --text")
    if tokens is not None:
        ids = _read_tokens(tokens)
    elif tokenize is None:
        raise click.UsageError("--text needs --tokenize, an engine's HTTP address")
    else:
        ids = await _tokenize(tokenize, model, text or "", timeout_s)
    async with KvRouteClient(target) as client:
        try:
            explanation = await client.explain(
                timeout_s=timeout_s,
                token_ids=ids,
                model=model,
                policy=policy,
                lora_name=lora,
                cache_salt=cache_salt,
            )
        except KvRouteError as error:
            return _complain(target, error)
    if as_json:
        click.echo(MessageToJson(explanation))
        return 0
    _print_explanation(Console(), explanation)
    return 0


def _workers_table(workers: Sequence[WorkerStatus]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("worker", "model", "engine", "stream"):
        table.add_column(name)
    for name in ("blocks held", "in use", "running", "waiting", "ours", "hits"):
        table.add_column(name, justify="right")
    table.add_column("address")
    table.add_column("why not")
    for worker in workers:
        held = worker.blocks_device + worker.blocks_host + worker.blocks_disk
        state = worker.stream_state + ("" if worker.stream_complete else ", partial")
        used = f"{worker.active_blocks:.0f}"
        if worker.HasField("total_blocks"):
            used += f"/{worker.total_blocks}"
        table.add_row(
            _name(worker),
            worker.model or "?",
            f"{worker.engine} {worker.engine_version}".strip() or "?",
            f"[{'green' if worker.stream_state == 'live' else 'yellow'}]{state}[/]",
            str(held),
            used,
            str(worker.running),
            str(worker.waiting),
            str(worker.reserved),
            f"{worker.hit_ratio:.0%}" if worker.hit_ratio else "-",
            worker.address,
            f"[red]{worker.unschedulable_reason}[/]",
        )
    return table


def _print_explanation(console: Console, explanation: Explanation) -> None:
    receipt = explanation.receipt
    console.print(
        f"[bold]{receipt.policy}[/]: cost = {receipt.formula}",
        highlight=False,
    )
    numbers = {**receipt.parameters, **receipt.terms}
    if numbers:
        told = "  ".join(f"{name} = {value:.4g}" for name, value in sorted(numbers.items()))
        console.print(told, highlight=False)
    console.print(f"{receipt.prompt_tokens} prompt tokens\n", highlight=False)
    table = Table(box=None, header_style="bold")
    table.add_column("")
    table.add_column("worker")
    for name in ("cost", "overlap", "new", "blocks", "running", "waiting", "reserved"):
        table.add_column(name, justify="right")
    table.add_column("stream")
    table.add_column("terms")
    table.add_column("why not")
    for row in explanation.candidates:
        is_pick = (row.worker_id, row.dp_rank) == (explanation.worker_id, explanation.dp_rank)
        table.add_row(*_explained_row(row, is_pick=is_pick and not row.excluded))
    console.print(table)
    if explanation.HasField("refusal"):
        console.print(f"\n[red]nobody can be picked:[/] {explanation.refusal.message}")
    elif receipt.tied > 1:
        console.print(
            f"\n{receipt.tied} tie for the lowest cost: Route picks among them at random."
        )


def _explained_row(row: CandidateRow, *, is_pick: bool) -> list[str]:
    name = f"{row.worker_id}/{row.dp_rank}"
    stream = row.stream_state + ("" if row.stream_complete else ", partial")
    if not row.terms and row.excluded:  # not live, so it was never scored
        return ["", name, *[""] * 7, stream, "", f"[red]{row.excluded}[/]"]
    blocks = f"{row.active_blocks:.0f}"
    if row.HasField("total_blocks"):
        blocks += f"/{row.total_blocks}"
    return [
        "[green]->[/]" if is_pick else "",
        name,
        f"{row.cost:.4f}",
        str(row.overlap_tokens.usable),
        f"{row.new_tokens:.0f}",
        blocks,
        str(row.running),
        str(row.waiting),
        f"{row.reserved:.0f}",
        stream,
        "  ".join(f"{term}={value:.3g}" for term, value in sorted(row.terms.items())),
        f"[red]{row.excluded}[/]",
    ]


def _name(worker: WorkerStatus) -> str:
    return f"{worker.worker_id}/{worker.dp_rank}"


def _read_tokens(text: str) -> list[int]:
    """Token ids as 1,2,3 (or with spaces, or as a JSON list), or @FILE with such a text."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"{text[1:]}: {error.strerror}") from error
    try:
        return [int(word) for word in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError:
        raise click.UsageError("--tokens: expected token ids such as 1,2,3") from None


async def _tokenize(base: str, model: str, text: str, timeout_s: float) -> list[int]:
    """Token ids by an engine's /tokenize (vLLM) or /v1/tokenize (SGLang)."""
    body: dict[str, Any] = {"prompt": text}
    if model:
        body["model"] = model
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
            for path in ("/tokenize", "/v1/tokenize"):
                async with session.post(base.rstrip("/") + path, json=body) as response:
                    if response.status == 404:
                        continue
                    response.raise_for_status()
                    return list((await response.json())["tokens"])
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
        raise click.ClickException(f"{base}: can't tokenize: {error!r}") from error
    raise click.ClickException(f"{base} has no /tokenize")


def _complain(target: str, error: KvRouteError) -> int:
    click.echo(f"kvroute: {target}: {error}", err=True)
    return 1
