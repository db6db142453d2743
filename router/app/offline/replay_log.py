"""The command `kvroute replay-log`."""

from pathlib import Path

import click

from router.config.reading import load
from router.config.settings.configurations import ServeConfig


@click.command("replay-log")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--policy",
    "names",
    multiple=True,
    required=True,
    help="Policy that scores the logged decisions again: a name, or module:function for a policy"
    " of your own; repeatable.",
)
@click.option(
    "--config",
    "-c",
    "config_file",
    type=click.Path(path_type=Path),
    help="YAML file of a router's configuration; its routing.parameters and routing.affinity are"
    " used.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def replay_log(
    files: tuple[Path, ...], names: tuple[str, ...], config_file: Path | None, as_json: bool
) -> None:
    """Score logged decisions (decision_log.file) with other policies.

    Shows how often each policy would have picked the same worker, and the predicted effect of its
    own picks. Caches and loads are the logged ones, to which the picks of the deciding policy led.
    """
    from router.app.offline.replaying import show_replay

    routing = load(ServeConfig, config_file, {}, {}).routing
    raise click.exceptions.Exit(show_replay(files, names, routing, as_json))
