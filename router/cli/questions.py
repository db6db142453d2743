"""`kvroute workers`, `queue`, `explain` and `replay-log`: commands that change nothing."""

from pathlib import Path
from typing import IO, Any

import click

from router.cli.flags import model_flag, target_flag, timeout_flag
from router.cli.run import run
from router.config.configurations import ServeConfig
from router.config.reading import load


@click.command()
@target_flag
@model_flag
@timeout_flag
@click.option("--json", "as_json", is_flag=True, help="What ListWorkers says, as JSON.")
def workers(target: str, model: str, timeout_s: float, as_json: bool) -> None:
    """Show the fleet as a router sees it."""
    from router.cli.fleet import show_workers

    run(show_workers(target, model, as_json, timeout_s))


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
    from router.cli.queue import show_queue

    run(show_queue(target, model, limit, as_json, timeout_s))


@click.command()
@target_flag
@model_flag
@timeout_flag
@click.option("--tokens", help="Prompt as token ids: 1,2,3 or @FILE.")
@click.option("--text", help="Prompt as text; needs --tokenize.")
@click.option("--tokenize", help="HTTP base of an engine whose /tokenize turns text into ids.")
@click.option("--policy", default="", help="Another policy than the configured one.")
@click.option("--lora", default="", help="LoRA name.")
@click.option("--cache-salt", default="", help="Cache salt.")
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
    "--receipt",
    "receipt_file",
    type=click.File("rb"),
    help="Recompute what was decided instead: an answer with its receipts, one receipt, or a"
    " line of the decision log; JSON or protobuf's bytes; - for stdin.",
)
def explain(receipt_file: IO[bytes] | None, **question: Any) -> None:
    """Show why a prompt would go where, or did. Nothing is reserved."""
    if receipt_file is not None:
        from router.cli.receipt import show_receipt

        raise click.exceptions.Exit(show_receipt(receipt_file))
    from router.cli.fleet import show_explanation

    run(show_explanation(**question))


@click.command("replay-log")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--policy",
    "names",
    multiple=True,
    required=True,
    help="Policy to ask; repeatable. One of your own: module:function.",
)
@click.option(
    "--config",
    "-c",
    "config_file",
    type=click.Path(path_type=Path),
    help="YAML file of a router, for its routing.parameters and routing.affinity.",
)
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
def replay_log(
    files: tuple[Path, ...], names: tuple[str, ...], config_file: Path | None, as_json: bool
) -> None:
    """Ask other policies about logged decisions (decision_log.file).

    Tells how often each would have picked the same worker, and what its own choices would have
    changed, as predicted then: in the fleet that the policy which decided had filled.
    """
    from router.cli.replay_log import show_replay

    routing = load(ServeConfig, config_file, {}, {}).routing
    raise click.exceptions.Exit(show_replay(files, names, routing, as_json))
