"""`kvroute workers`, `queue`, `tail`, `top` and `explain`: commands that change nothing."""

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
    help="Number of workers that must be able to get requests; the exit code is 1 when fewer can.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the answer of the RPC ListWorkers as JSON."
)
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
    help="Most waiting requests that are listed; the sums count all.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the answer of the RPC ListQueue as JSON."
)
def queue(target: str, model: str, limit: int, timeout_s: float, as_json: bool) -> None:
    """Show the requests that wait in a router for a worker with room.

    Each router has a queue of its own. The order is the one in which requests would go if all
    workers had room now, pool by pool (one model and one role). `behind` is the id of the request
    that goes right before. `held by` is why a request waits: `room` (it is the first of its pool,
    or no worker had room at its turn), `turn` (other requests of this router go first) or
    `replicas` (requests that wait in other replicas go first).
    """
    from router.app.calls.queue import show_queue

    run(show_queue(target, model, limit, as_json, timeout_s))


@click.command()
@target_flag
@model_flag
@click.option(
    "--worker", "worker_id", default="", help="Show only decisions that picked this worker."
)
@click.option("--tenant", default="", help="Show only decisions about requests of this tenant.")
@click.option(
    "--reason",
    "reasons",
    multiple=True,
    type=click.Choice([reason.value for reason in Reason], case_sensitive=False),
    metavar="REASON",
    help="Show only refusals with this reason, such as ALL_WORKERS_FULL; may be given several"
    " times.",
)
@click.option(
    "--slower-than",
    "slower_than_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Show only picks whose time in the queue plus predicted time to the first token is"
    " longer, and refusals after a longer wait, in seconds.",
)
@click.option(
    "--share",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share (0 to 1) of the decisions matching the other flags that is shown, drawn at random.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each decision as a line of JSON.")
def tail(target: str, model: str, as_json: bool, **wanted: Any) -> None:
    """Follow a router's decisions, one line each, until Ctrl-C.

    A router shows at most the first 50 decisions of each second to the commands that follow it, so
    a busy router's output is a sample. Each router has decisions of its own.
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
    help="Seconds between two updates of the screen.",
)
@click.option(
    "--once", is_flag=True, help="Print the screen once and end, as is done without a terminal."
)
def top(target: str, model: str, every_s: float, once: bool) -> None:
    """Follow a router on one screen: its workers, its queue, its last decisions.

    Workers that need attention come first, then the busiest. The key q ends the command. For
    requests that another router serves (gateway.observe), the screen shows the share of cached
    tokens and the time to the first token: today's, and those estimated for this router's picks.
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
@click.option("--text", help="Prompt of a completion, as text.")
@click.option("--tokens", help="Prompt as token ids, 1,2,3; or @FILE with such a text.")
@click.option(
    "--tokenize",
    help="HTTP base of an engine whose /tokenize makes the tokens of --text. [the router makes"
    " them]",
)
@click.option(
    "--against",
    default="",
    callback=http_base,
    help="HTTP base of an engine that serves the model: the router's tokens are compared with the"
    " engine's, and the exit code is 1 if they differ.",
)
@click.option("--policy", default="", help="Policy that decides, instead of the configured one.")
@click.option("--lora", default="", help="Name of the LoRA that the request uses.")
@click.option("--cache-salt", help="Cache salt of the request. [the body's cache_salt]")
@click.option(
    "--phase",
    type=click.Choice(["aggregated", "prefill_decode", "prefill", "decode"]),
    default="aggregated",
    show_default=True,
    help="Pick one worker for all, a pair, or one half of a pair.",
)
@click.option(
    "--session",
    default="",
    help="Session id of the request; with --phase decode it may take the place of the prompt.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the whole answer of the RPC Explain as JSON."
)
@click.option(
    "--request",
    "request_id",
    default="",
    metavar="ID",
    help="Show a past decision, named by the id of its request or reservation, or by the"
    " X-Request-Id of a client of the gateway or of Envoy. A router remembers requests that are"
    " open, or that ended less than 1.5 times routing.lease_s ago.",
)
@click.option(
    "--receipt",
    "receipt_file",
    type=click.File("rb"),
    help="Compute a past decision again from this file: an answer with its receipts, one receipt,"
    " or a line of the decision log, as JSON or as bytes of protobuf; - for stdin.",
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

    For a text or body, the first lines show its tokens: how many, from where, and whether they are
    verified. The model is that of the body, unless --model names one.
    """
    if receipt_file is not None:
        from router.app.offline.receipt import show_receipt

        raise click.exceptions.Exit(show_receipt(receipt_file))
    if request_id:
        if any(flags[name] for name in ("tokens", "text", *(kind.name for kind in _BODIES))):
            raise click.UsageError("--request shows a past decision, so give no prompt with it")
        from router.app.calls.past import show_past

        run(show_past(target, request_id, timeout_s=timeout_s, as_json=as_json))
        return
    from router.app.calls.explanation import BodyFile, Question, show_explanation

    if against and as_json:
        raise click.UsageError("--against can't be used together with --json")
    files = {kind.option: flags.pop(kind.name) for kind in _BODIES}
    bodies = {name: BodyFile(file, _content(file)) for name, file in files.items() if file}
    question = Question(bodies=bodies, **flags)
    run(show_explanation(target, question, timeout_s=timeout_s, as_json=as_json, against=against))


def _content(file: str) -> bytes:
    """Content of a file (`-`: stdin). Raises click.ClickException if it can't be read."""
    try:
        with click.open_file(file, "rb") as opened:
            content: bytes = opened.read()
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from error
    return content
