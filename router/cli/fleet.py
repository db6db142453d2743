"""`kvroute workers` and `kvroute explain`: what an operator types to see the fleet, and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from events.engines.endpoints import masked
from kvroute.client import KvRouteClient, KvRouteError
from kvroute.v1 import (
    CandidateRow,
    Explanation,
    ListWorkersResponse,
    Phase,
    Receipt,
    WorkerStatus,
)
from router.cli.receipt import prefill_in_words
from router.cli.text import add_row, console, line, styled, table
from router.config.printable import shown


async def show_workers(target: str, model: str, as_json: bool, timeout_s: float) -> int:
    """Prints the fleet; returns the exit code."""
    async with KvRouteClient(target) as client:
        try:
            workers = await client.list_workers(model or None, timeout_s=timeout_s)
        except KvRouteError as error:
            return complain(target, error)
    if as_json:
        click.echo(MessageToJson(ListWorkersResponse(workers=workers)))
        return 0
    screen = console(WIDTH_MIN)
    if not workers:
        which = f" that serves {model!r}." if model else " yet."
        screen.print(line(f"{target} knows no worker{which}"))
        return 0
    screen.print(_workers_table(workers), crop=False)
    for worker in workers:
        name = styled(f"{_name(worker)}:", "yellow")
        if worker.HasField("ejection"):
            screen.print(line(name, " ", _told_of(worker)))
        for warning in worker.warnings:
            screen.print(line(name, " ", masked(warning)))
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
    phase: str,
    session: str,
    as_json: bool,
) -> int:
    """Prints every candidate's row for a prompt; returns the exit code."""
    ids: list[int] | None
    if tokens is None and text is None and phase == "decode" and session:
        ids = None  # it is where the session was
    elif (tokens is None) == (text is None):
        raise click.UsageError("give the prompt as --tokens or as --text")
    elif tokens is not None:
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
                phase=Phase.Value(f"PHASE_{phase.upper()}"),
                session_id=session,
            )
        except KvRouteError as error:
            return complain(target, error)
    if as_json:
        click.echo(MessageToJson(explanation))
        return 0
    _print_explanation(console(WIDTH_MIN), explanation)
    return 0


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
            _stream(worker.stream_state, worker.stream_complete),
            str(worker.blocks_device + worker.blocks_host + worker.blocks_disk),
            used,
            f"{worker.running}{_slots(worker)}",
            str(worker.waiting),
            str(worker.reserved),
            f"{worker.hit_ratio:.0%}" if worker.hit_ratio else "-",
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


def _print_explanation(screen: Console, explanation: Explanation) -> None:
    if explanation.HasField("prefill_receipt"):
        other = explanation.prefill_worker
        words = prefill_in_words(explanation.receipt.prefill)
        screen.print(line(styled("the prompt", "bold"), f": {words}"))
        pick = (other.worker_id, other.dp_rank)
        _print_stage(screen, explanation.prefill_receipt, explanation.prefill_candidates, pick)
        screen.print()
        screen.print(line(styled("the answer", "bold"), ":"))
    pick = (explanation.worker_id, explanation.dp_rank)
    _print_stage(screen, explanation.receipt, explanation.candidates, pick)
    if explanation.HasField("refusal"):
        screen.print()
        reason = f" {explanation.refusal.message}"
        screen.print(line(styled("no worker can be picked:", "red"), reason))
    elif explanation.receipt.tied > 1:
        screen.print(
            f"\n{explanation.receipt.tied} tie for the lowest cost: Route picks one at random."
        )


def _print_stage(
    screen: Console, receipt: Receipt, candidates: Sequence[CandidateRow], pick: tuple[str, int]
) -> None:
    """One decision: its formula, and all rows. pick: which of them; an empty id is none."""
    screen.print(line(styled(receipt.policy, "bold"), f", {receipt.prompt_tokens} prompt tokens"))
    for clause in receipt.formula.split("; "):
        prefix = "" if clause is not receipt.formula and " = " in clause else "cost = "
        screen.print(line(f"  {prefix}{clause}"))
    numbers = {**receipt.parameters, **receipt.terms}
    if numbers:
        shared = ", ".join(f"{name} {value:.4g}" for name, value in sorted(numbers.items()))
        screen.print(line(f"  with {shared}"))
    screen.print()
    scored = [row for row in candidates if row.terms or not row.excluded]
    terms = sorted({term for row in scored for term in row.terms})
    made = table("", "worker", right=(*_ROW_NUMBERS, *terms))
    for name in ("stream", "why not"):
        made.add_column(name, no_wrap=True)
    for row in candidates:
        is_pick = (row.worker_id, row.dp_rank) == pick and not row.excluded
        add_row(
            made,
            styled("->", "green") if is_pick else "",
            f"{row.worker_id}/{row.dp_rank}",
            *(_row_cells(row, terms) if row in scored else [""] * (len(_ROW_NUMBERS) + len(terms))),
            _stream(row.stream_state, row.stream_complete),
            styled(row.excluded, "red"),
        )
    screen.print(made, crop=False)


def _row_cells(row: CandidateRow, terms: Sequence[str]) -> list[str]:
    blocks = f"{row.active_blocks:.0f}"
    if row.HasField("total_blocks"):
        blocks += f"/{row.total_blocks}"
    return [
        f"{row.cost:.4f}",
        str(row.overlap_tokens.usable),
        f"{row.new_tokens:.0f}",
        blocks,
        str(row.running),
        str(row.waiting),
        f"{row.reserved:.0f}",
        *(f"{row.terms[term]:.3g}" if term in row.terms else "" for term in terms),
    ]


WIDTH_MIN = 400
_WORKER_NUMBERS = ("held", "in use", "run", "wait", "ours", "hits")
_ROW_NUMBERS = ("cost", "overlap", "new", "in use", "run", "wait", "ours")


def _stream(state: str, is_complete: bool) -> Text:
    color = "green" if state == "live" and is_complete else "yellow"
    return styled(f"{state}{'' if is_complete else ', partial'}", color)


def _slots(worker: WorkerStatus) -> str:
    """Behind the running requests, how many can run at once; ~ marks an estimate."""
    if worker.HasField("total_slots"):
        return f"/{worker.total_slots}"
    return f"/~{worker.slots_estimated}" if worker.HasField("slots_estimated") else ""


def _name(worker: WorkerStatus) -> str:
    return f"{worker.worker_id}/{worker.dp_rank}"


def _read_tokens(text: str) -> list[int]:
    """Token ids as 1,2,3 (or with spaces, or as a JSON list), or @FILE with such a text."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"{text[1:]}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise click.UsageError(f"{text[1:]}: expected a text with token ids") from None
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
                    return _tokens_in(await response.json())
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        raise click.ClickException(f"{base}: can't tokenize: {error!r}") from error
    raise click.ClickException(f"{base} has no /tokenize")


def _tokens_in(answer: object) -> list[int]:
    """The token ids in an engine's answer; raises ValueError."""
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("its answer has no list of token ids")
    return tokens


def complain(target: str, error: KvRouteError) -> int:
    """One line on stderr; returns the exit code."""
    click.echo(shown(f"kvroute: {target}: {error}"), err=True)
    return 1
