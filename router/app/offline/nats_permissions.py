"""The command `kvroute nats-permissions`: prints NATS permissions for relays and routers."""

import re

import click

from events.plane.permissions import nsc_commands, of_relay, of_router, server_config

_NAME = re.compile(r"[^A-Za-z0-9_-]+")


@click.command("nats-permissions")
@click.option("--worker", "workers", multiple=True, help="Id of a worker with a relay; repeatable.")
@click.option("--fleet", default="default", show_default=True, help="Name of the fleet.")
@click.option(
    "--together",
    is_flag=True,
    help="Print one user for a relay of all workers, instead of a user for each worker.",
)
@click.option(
    "--account",
    default="kvroute",
    show_default=True,
    help="Name of the account in nsc that the users belong to.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["server", "nsc"]),
    default="server",
    show_default=True,
    help="server: a part of nats-server's configuration; nsc: commands that make users with JWTs.",
)
def nats_permissions(
    workers: tuple[str, ...], fleet: str, together: bool, account: str, form: str
) -> None:
    """Print the least NATS permissions of a fleet's relays and routers.

    A relay's credentials publish for its own workers and nothing else: no facts of other workers,
    and no command to the fleet.
    """
    if re.fullmatch(r"[A-Za-z0-9_-]+", fleet) is None:
        raise click.UsageError(f"{fleet!r} is no fleet name: letters, digits, - and _ only")
    if re.fullmatch(r"[A-Za-z0-9_-]+", account) is None:
        raise click.UsageError(f"{account!r} is no account name: letters, digits, - and _ only")
    users = {"router": of_router(fleet)}
    for ids in [workers] if together and workers else [(worker,) for worker in workers]:
        name = "relay" if together else f"relay-{_NAME.sub('-', ids[0])}"
        if not all(ids) or name in users:
            raise click.UsageError(
                f"--worker {ids[0]!r} is empty, or its user {name} is another worker's"
            )
        users[name] = of_relay(fleet, ids)
    text = server_config(fleet, users) if form == "server" else nsc_commands(account, users)
    click.echo(text, nl=False)
