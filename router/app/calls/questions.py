"""`kvroute workers`, `queue`, `tail`, `top` and `explain`: calls that change nothing."""

from collections.abc import Callable
from typing import IO, Any

import click

from router.app.calls.dialing import target_flag
from router.app.cli.flags import http_base, model_flag, timeout_flag
from router.app.cli.run import run
from router.request.bodies import WITH_TOKENS
from router.request.refusal import Reason


@click.command()
@target_flag
@model_flag
@timeout_flag
@click.option(
    "--require",
    "required",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Workers that must be able to get requests; exit code 1 when fewer can.",
)
@click.option("--json", "as_json", is_flag=True, help="The answer of ListWorkers, as JSON.")
def workers(target: str, model: str, timeout_s: float, required: int, as_json: bool) -> None:
    """Show the fleet as a router sees it."""
    from router.app.calls.fleet import show_workers

    run(show_workers(target, model, as_json, timeout_s, required))


@click.command()
@target_flag
@model_flag
@timeout_flag
@click.option(
    "--limit",
    type=click.IntRange(1, 4096),
    default=100,
    show_default=True,
    help="Requests that are shown; the sums count all.",
)
@click.option("--json", "as_json", is_flag=True, help="The answer of ListQueue, as JSON.")
def queue(target: str, model: str, limit: int, timeout_s: float, as_json: bool) -> None:
    """Show the requests that wait in a router for a worker with room.

    Each router has a queue of its own. The order is the one in which requests would go if all
    workers had room now.
    """
    from router.app.calls.queue import show_queue

    run(show_queue(target, model, limit, as_json, timeout_s))


@click.command()
@target_flag
@model_flag
@click.option("--worker", "worker_id", default="", help="Picks of this worker only.")
@click.option("--tenant", default="", help="Requests of this tenant only.")
@click.option(
    "--reason",
    "reasons",
    multiple=True,
    type=click.Choice([reason.value for reason in Reason], case_sensitive=False),
    metavar="REASON",
    help="Refusals with this reason only, such as ALL_WORKERS_FULL; may be given several times.",
)
@click.option(
    "--slower-than",
    "slower_than_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Picks whose wait in the queue and predicted time to the first token are together longer,"
    " and refusals after a longer wait.",
)
@click.option(
    "--share",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of the decisions that fit, drawn at random.",
)
@click.option("--json", "as_json", is_flag=True, help="Each decision as a line of JSON.")
def tail(target: str, model: str, as_json: bool, **wanted: Any) -> None:
    """Follow a router's decisions, one line each, until Ctrl-C.

    A router looks at the first 50 decisions of each second for all that follow it, so on a busy
    router this is a sample. Each router has decisions of its own.
    """
    from router.app.calls.tail import show_decisions

    run(show_decisions(target, as_json, model=model, **wanted))


@click.command()
@target_flag
@model_flag
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.2, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks at the fleet.",
)
@click.option("--once", is_flag=True, help="Print the screen once, as without a terminal.")
def top(target: str, model: str, every_s: float, once: bool) -> None:
    """Follow a router on one screen: its workers, its queue, its last decisions.

    Workers that need attention come first, then the busiest. q ends it.
    """
    from router.app.calls.top import show_top

    run(show_top(target, model, every_s, once=once))


_BODIES = [kind for kind in WITH_TOKENS.values() if kind.paths]


def _body_flags(command: Callable[..., None]) -> Callable[..., None]:
    for kind in reversed(_BODIES):
        command = click.option(
            f"--{kind.name}",
            type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True),
            help=f"File with the body of a POST to {kind.paths[0]}; - for stdin.",
        )(command)
    return command


@click.command()
@target_flag
@model_flag
@timeout_flag
@_body_flags
@click.option("--text", help="A completion's prompt as text.")
@click.option("--tokens", help="Prompt as token ids: 1,2,3 or @FILE.")
@click.option(
    "--tokenize",
    help="HTTP base of an engine whose /tokenize makes the tokens of --text. [the router does]",
)
@click.option(
    "--against",
    default="",
    callback=http_base,
    help="HTTP base of an engine of the model: the router's tokens are compared with its tokens,"
    " and the exit code is 1 if they differ.",
)
@click.option("--policy", default="", help="Another policy than the configured one.")
@click.option("--lora", default="", help="LoRA name.")
@click.option("--cache-salt", help="Cache salt. [that of the body]")
@click.option(
    "--phase",
    type=click.Choice(["aggregated", "prefill_decode", "prefill", "decode"]),
    default="aggregated",
    show_default=True,
    help="One worker, a pair, or one half.",
)
@click.option("--session", default="", help="Session; for decode it may stand for the prompt.")
@click.option("--json", "as_json", is_flag=True, help="The whole Explanation, as JSON.")
@click.option(
    "--request",
    "request_id",
    default="",
    metavar="ID",
    help="Show a past decision: a request's id, a reservation's, or the X-Request-Id of a client of"
    " the gateway or of Envoy. A router remembers requests that are open, or that ended less than"
    " routing.memory_window_s ago.",
)
@click.option(
    "--receipt",
    "receipt_file",
    type=click.File("rb"),
    help="Compute a past decision again: a file with an answer and its receipts, one receipt, or a"
    " line of the decision log; JSON or protobuf's bytes; - for stdin.",
)
def explain(
    receipt_file: IO[bytes] | None,
    request_id: str,
    target: str,
    timeout_s: float,
    against: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show where a prompt would go, and why, or where a request went. Nothing is reserved.

    Of a text or a body, the first lines show its tokens: how many, from where, and whether they are
    verified. The model is that of the body, unless --model names one.
    """
    if receipt_file is not None:
        from router.app.offline.receipt import show_receipt

        raise click.exceptions.Exit(show_receipt(receipt_file))
    if request_id:
        if any(flags[name] for name in ("tokens", "text", *(kind.name for kind in _BODIES))):
            raise click.UsageError("--request shows a decision that was made; it takes no prompt")
        from router.app.calls.past import show_past

        run(show_past(target, request_id, timeout_s=timeout_s, as_json=as_json))
        return
    from router.app.calls.explanation import BodyFile, Question, show_explanation

    if against and as_json:
        raise click.UsageError("--against has no form in JSON")
    files = {kind.option: flags.pop(kind.name) for kind in _BODIES}
    bodies = {name: BodyFile(file, _content(file)) for name, file in files.items() if file}
    question = Question(bodies=bodies, **flags)
    run(show_explanation(target, question, timeout_s=timeout_s, as_json=as_json, against=against))


def _content(file: str) -> bytes:
    """- is stdin. Raises click.ClickException for a file that can't be read."""
    try:
        with click.open_file(file, "rb") as opened:
            content: bytes = opened.read()
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from error
    return content
