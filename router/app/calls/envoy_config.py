"""The command `kvroute envoy-config`."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import click

from events.engines.endpoints import masked
from router.app.calls.dialing import dial, target_flag
from router.app.cli.flags import timeout_flag
from router.app.cli.run import run
from router.config.keys import ConfigError
from router.config.printable import shown
from router.net.keys.exposure import split_address


def _addresses(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> Any:
    try:
        return [split_address(text) for text in texts]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _reached(urls: Iterable[str]) -> list[tuple[str, int]]:
    """Hosts and ports of workers' URLs, in order, each once. Leaves out a worker that the cluster
    of engines (plain HTTP, paths unchanged) can't reach, and says so on stderr."""
    places: set[tuple[str, int]] = set()
    for url in sorted(filter(None, urls)):
        with suppress(ValueError):
            parts = urlsplit(url if "//" in url else f"//{url}")
            is_plain = parts.scheme in ("", "http") and parts.path in ("", "/")
            if is_plain and parts.username is None and parts.hostname:
                places.add((parts.hostname, parts.port or 80))
                continue
        about = "Envoy gets engines of the form http://host:port only, so it is left out"
        click.echo(shown(f"kvroute: warning: worker {masked(url)}: {about}"), err=True)
    return sorted(places)


@click.command("envoy-config")
@target_flag
@timeout_flag
@click.option(
    "--listen",
    default=("127.0.0.1:8000",),
    show_default=True,
    multiple=True,
    callback=_addresses,
    help="host:port on which Envoy takes requests of OpenAI's API; if given several times, the"
    " last counts.",
)
@click.option(
    "--picker",
    "pickers",
    multiple=True,
    default=("127.0.0.1:9002",),
    show_default=True,
    callback=_addresses,
    help="host:port of a picker (`kvroute picker`, or `kvroute serve --picker-listen`);"
    " repeatable.",
)
@click.option(
    "--worker",
    "workers",
    multiple=True,
    callback=_addresses,
    help="host:port of an engine that Envoy sends requests to; repeatable. [the workers of the"
    " router at --target]",
)
@click.option(
    "--admin",
    multiple=True,
    callback=_addresses,
    help="host:port of Envoy's own admin page. [none]",
)
@click.option(
    "--answers",
    type=click.Choice(["through", "around"]),
    default="through",
    show_default=True,
    help="Whether answers pass the picker. through: it sees their end and their cached tokens."
    " around: it sees nothing, and answers cost it nothing; the router infers a request's end from"
    " the engine's load, after picker.unobserved_s seconds at the latest.",
)
@click.option(
    "--tls-ca-file", default="", help="PEM file of the CAs that signed the pickers' certificates."
)
@click.option(
    "--retries",
    type=click.IntRange(0, 8),
    default=2,
    show_default=True,
    help="Most further endpoints on which Envoy tries a request that failed (as picker.fallbacks).",
)
def envoy_config(
    target: str,
    timeout_s: float,
    listen: Any,
    pickers: Any,
    workers: Any,
    admin: Any,
    answers: str,
    tls_ca_file: str,
    retries: int,
) -> None:
    """Print a configuration of Envoy by which kvroute picks each request's worker.

    The configuration has the present workers' addresses: run the command again for new workers.
    """

    async def running() -> None:
        import yaml

        from router.gateway.picker.envoy_config import Address, envoy_config

        known = workers
        if not known:
            async with dial(target, timeout_s=timeout_s) as client:
                listed = await client.list_workers()
            known = _reached({each.address for each in listed})
        if not known:
            raise ConfigError(
                "the router knows no worker at http://host:port: name engines with --worker"
            )
        config = envoy_config(
            listen=Address(*listen[-1]),
            admin=Address(*admin[-1]) if admin else None,
            pickers=[Address(*each) for each in pickers],
            workers=[Address(*each) for each in known],
            shows_answers=answers == "through",
            tls_ca_file=tls_ca_file,
            retries=retries,
        )
        click.echo(yaml.safe_dump(config, sort_keys=False, width=120), nl=False)

    run(running())
