"""`kvroute register`, `drain`, `undrain`, `remove` and `resync`: commands to a running router."""

from collections.abc import Callable
from typing import Any

import click

from events.plane.settings import LOCAL_KEYS
from router.app.calls.dialing import target_flag
from router.app.cli.engine_flags import engine_flags, engine_settings, given_engine
from router.app.cli.flags import Seconds, timeout_flag
from router.app.cli.run import run
from router.config.settings.fleet_settings import TOMBSTONE_MAX_S


def _fleet_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument WORKER and the flags that all of these commands share."""
    as_json = click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print what was done as JSON: the action, the worker's id, and how many DP ranks the"
        " router has of it.",
    )
    for decorate in (as_json, timeout_flag, target_flag, click.argument("worker")):
        command = decorate(command)
    return command


def _change(action: str, worker: str, **about: Any) -> None:
    from router.app.calls.fleet_changes import change_worker

    run(change_worker(action, worker, **about))


@click.command()
@_fleet_command
def drain(worker: str, **about: Any) -> None:
    """Stop new picks of WORKER on every replica.

    Requests that run there go on. The drain holds for all of the worker's ranks, later ones too,
    until `kvroute undrain`.
    """
    _change("drain", worker, **about)


@click.command()
@_fleet_command
def undrain(worker: str, **about: Any) -> None:
    """Give WORKER new picks again on every replica.

    Ends a drain of WORKER, and a removal.
    """
    _change("undrain", worker, **about)


@click.command()
@click.option(
    "--tombstone-s",
    type=Seconds(TOMBSTONE_MAX_S),
    default=None,
    help="Seconds for which the worker's heartbeats are ignored. [60]",
)
@_fleet_command
def remove(worker: str, **about: Any) -> None:
    """Forget WORKER on every replica, and ignore its heartbeats for a while.

    A relay that a router runs for the worker is stopped. A `kvroute relay` process goes on, and its
    worker is back when the time is over.
    """
    _change("remove", worker, **about)


@click.command()
@_fleet_command
def resync(worker: str, **about: Any) -> None:
    """Forget the blocks of WORKER on every replica, and read them again from its relay."""
    _change("resync", worker, **about)


@click.command()
@engine_flags(without=("id", *LOCAL_KEYS), required=True)
@_fleet_command
def register(worker: str, target: str, timeout_s: float, as_json: bool, **given: Any) -> None:
    """Have the router run a relay for an engine that has none, as WORKER.

    The flags are the keys of an entry of `workers:` in the router's configuration, but for those
    that name files. The router that is called runs the relay until it stops; for good, list the
    engine under `workers:`, or run `kvroute relay` beside the engine. A removal of WORKER that is
    in force is taken back.
    """
    engine = given_engine(given)
    engine_settings({"id": worker, **engine}, id_name="WORKER")
    from router.app.calls.fleet_changes import register_worker

    run(register_worker(worker, engine, target=target, timeout_s=timeout_s, as_json=as_json))
