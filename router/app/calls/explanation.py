"""`kvroute explain`: a prompt's tokens, and each worker's row of the decision."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from google.protobuf.json_format import MessageToJson
from rich.console import Console

from events.engines.endpoints import same_place
from kvroute.client import (
    InvalidRequest,
    KvRouteClient,
    PromptTokens,
    RouteOptions,
)
from kvroute.client.messages.bodies import read_fields
from kvroute.client.messages.pick import prompt_tokens
from kvroute.v1 import CandidateRow, Explanation, Phase, Receipt
from router.api.desk.text_codec import TEXT_BYTES_MAX
from router.app.calls.dialing import dial
from router.app.calls.fleet import WIDTH_MIN, stream_text
from router.app.cli.text import add_row, console, line, styled, table
from router.app.offline.receipt import prefill_in_words, print_formula
from router.app.offline.rendering import differences, tokens_of_engine
from router.request.bodies import COMPLETION, WITH_TOKENS
from router.request.dialects.table import DEFAULT, DIALECTS

_ROW_NUMBERS = ("cost", "overlap", "new", "in use", "run", "wait", "ours")
_MADE_BY = {
    "local": "made by the router",
    "engine": "from an engine",
}


class BodyFile(NamedTuple):
    """A file with the body of a request."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The request to explain, by the flags' names; empty or None: not given."""

    model: str = ""
    tokens: str | None = None
    text: str | None = None
    tokenize: str | None = None
    bodies: Mapping[str, BodyFile] = field(default_factory=dict)
    """Files with a request's body, by the name of the body's field in RouteRequest."""
    policy: str = ""
    lora: str = ""
    cache_salt: str | None = None
    phase: str = "aggregated"
    session: str = ""


async def show_explanation(
    target: str,
    question: Question,
    *,
    timeout_s: float,
    as_json: bool = False,
    against: str = "",
) -> int:
    """Prints every candidate's row for a prompt. Returns the exit code: 1 if `against` is the
    address of an engine whose tokens differ from the router's."""
    options = await _prompt_options(question, timeout_s)
    if against and WITH_TOKENS.keys().isdisjoint(options):
        raise click.UsageError(
            "--against needs a prompt without tokens: --text, --chat or the like"
        )
    options["return_tokens"] = bool(against)
    async with dial(target) as client:
        explanation = await client.explain(timeout_s=timeout_s, **options)
        engine = await _engine_at(client, against) if against else DEFAULT
    if as_json:
        click.echo(MessageToJson(explanation))
        return 0
    screen = console(WIDTH_MIN)
    code = 0
    if explanation.HasField("prompt"):
        prompt = prompt_tokens(explanation.prompt)
        for each in prompt_lines(prompt):
            screen.print(line(each))
        if against:
            code = await _compare(screen, prompt, options, against, engine)
        screen.print()
    _print_explanation(screen, explanation)
    return code


def prompt_lines(prompt: PromptTokens) -> Iterator[str]:
    """Lines that describe a prompt's tokens."""
    if prompt.source == "estimate":
        yield f"tokens     about {prompt.count}, an estimate: the prompt matches no worker's cache"
        yield f"why        {prompt.estimate_reason}"
    else:
        proof = "verified" if prompt.verified else "not verified"
        yield f"tokens     {prompt.count}, {_MADE_BY.get(prompt.source, prompt.source)}, {proof}"
    if prompt.shape:
        yield f"shape      {prompt.shape}"
    if prompt.tokenizer_digest:
        yield f"tokenizer  {prompt.tokenizer_digest}"


async def _prompt_options(question: Question, timeout_s: float) -> RouteOptions:
    """The request's fields for a call; raises click.UsageError unless there is one prompt."""
    prompt = await _prompt(question, timeout_s)
    return {
        **prompt,
        "model": question.model or None,
        "policy": question.policy,
        "lora_name": question.lora,
        "cache_salt": question.cache_salt,
        "phase": Phase.Value(f"PHASE_{question.phase.upper()}"),
        "session_id": question.session,
    }


async def _prompt(question: Question, timeout_s: float) -> RouteOptions:
    given = (question.tokens is not None) + (question.text is not None) + len(question.bodies)
    if question.tokenize is not None and question.text is None:
        raise click.UsageError("--tokenize is only for a prompt of --text")
    if not given and question.phase == "decode" and question.session:
        return {}  # it is where the session was
    if given != 1:
        flags = ", ".join(f"--{kind.name}" for kind in WITH_TOKENS.values())
        raise click.UsageError(f"give the prompt by one of {flags} and --tokens")
    if question.tokens is not None:
        return {"token_ids": _read_tokens(question.tokens)}
    if question.text is not None:
        if question.tokenize is None:
            return {"text": question.text}
        model = {"model": question.model} if question.model else {}
        body = msgspec.json.encode({"prompt": question.text, **model})
        base = question.tokenize.rstrip("/")
        about = body, question.model, timeout_s
        tokens = await tokens_of_engine(base, DEFAULT, COMPLETION, *about)
        return {"token_ids": array("I", tokens)}
    ((name, file),) = question.bodies.items()
    _check_body(file)
    options: Any = {name: file.content}
    return options  # type: ignore[no-any-return]


def _check_body(file: BodyFile) -> None:
    """Raises click.ClickException for a file that is too long or no JSON object, with its name."""
    if len(file.content) > TEXT_BYTES_MAX:
        size = len(file.content)
        raise click.ClickException(f"{file.name} has {size} bytes, the limit is {TEXT_BYTES_MAX}")
    try:
        read_fields(file.name, file.content, ("model", "cache_salt"))
    except InvalidRequest as error:
        raise click.ClickException(error.message) from None


async def _engine_at(client: KvRouteClient, address: str) -> str:
    """The kind of engine at an address; DEFAULT if the router names no known engine there."""
    for worker in await client.list_workers():
        if same_place(worker.address) == same_place(address) and worker.engine in DIALECTS:
            return worker.engine
    return DEFAULT


async def _compare(
    screen: Console, prompt: PromptTokens, options: RouteOptions, base: str, engine: str
) -> int:
    """Prints the first token that differs from an engine's; returns exit code 1 if there is one."""
    if prompt.source == "estimate":
        raise click.ClickException("the router has no tokens to compare with an engine's")
    ((name, kind),) = ((name, kind) for name, kind in WITH_TOKENS.items() if name in options)
    content: Any = options[name]  # type: ignore[literal-required]
    data = content.encode() if isinstance(content, str) else content
    theirs = await tokens_of_engine(base, engine, kind, data, options["model"] or "")
    lines = list(differences(prompt.token_bytes, theirs))
    for each in lines or [f"engine     the same {prompt.count} tokens"]:
        screen.print(line(each))
    return 1 if lines else 0


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
    """Prints one decision: its formula, and all rows. pick: worker id and rank of the picked row;
    an empty id: none was picked."""
    screen.print(line(styled(receipt.policy, "bold"), f", {receipt.prompt_tokens} prompt tokens"))
    print_formula(screen, receipt.formula)
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
            stream_text(row.stream_state, row.stream_complete),
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
        f"{max(0.0, row.reserved):.0f}",  # below 0 where some ended since the engine's sample
        *(f"{row.terms[term]:.3g}" if term in row.terms else "" for term in terms),
    ]


def _read_tokens(text: str) -> list[int]:
    """Reads token ids from a text such as 1,2,3 (or with spaces, or a JSON list), or from @FILE
    with one."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"{text[1:]}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise click.UsageError(
                f"{text[1:]}: expected a text with token ids, in UTF-8"
            ) from None
    try:
        return [int(word) for word in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError:
        raise click.UsageError("--tokens: expected token ids such as 1,2,3") from None
