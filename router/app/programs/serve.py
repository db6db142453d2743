"""The commands `kvroute serve` and `kvroute check-config`."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from router.app.cli.flags import given_flags, read_config, settings_flags
from router.app.cli.run import run
from router.app.processes.logs import set_up
from router.config.printable import shown
from router.config.reading import load_with_sources
from router.config.rendering import render
from router.config.settings.configurations import ServeConfig
from router.config.sources import annotated


@click.command()
@settings_flags(ServeConfig, first_week=True)
def serve(config_file: Path | None, **given: Any) -> None:
    """Serve picks over gRPC.

    The flags listed here are those to set in the first week. Every other key is a flag, too
    (--queue-order is queue.order), and all are keys of the YAML file and environment variables
    (KVROUTE_QUEUE_ORDER): docs/reference-configuration.md lists them, and `kvroute check-config`
    prints them with their origin. Flags win over the environment, the environment over the file.
    Models, and workers whose relays this router runs, are described in the file alone. SIGHUP reads
    the file again: policies, models' prompts, the queue and the decision log change at once, other
    keys with a restart.
    """
    config = read_config(ServeConfig, config_file, given)
    set_up(config.log)

    async def running() -> int:
        from router.app.processes.router_process import (
            RouterApp,  # grpc takes a while to import; --help needn't wait
        )

        read_again = partial(read_config, ServeConfig, config_file, given)
        return await RouterApp(config, read_again=read_again).run()

    run(running())


@click.command("check-config")
@settings_flags(ServeConfig, first_week=True)
def check_config(config_file: Path | None, **given: Any) -> None:
    """Check a router's configuration and print it whole.

    It takes the flags of `kvroute serve`; those listed here are to be set in the first week
    (docs/reference-configuration.md lists all). Warnings on stderr name each setting that is not
    safe.

    The comment behind each value says where it came from: a flag, a variable of the environment,
    the file, the preset of routing.preset, or the defaults; the first of these that sets it wins.
    """
    from router.app.processes.risks import warnings_of
    from router.app.processes.router_process import RouterApp

    config, sources = load_with_sources(ServeConfig, config_file, os.environ, given_flags(given))

    async def check() -> None:
        RouterApp(config)

    run(check())
    for sentence in warnings_of(config):
        click.echo(shown(f"kvroute: warning: {sentence}"), err=True)
    click.echo(annotated(render(config), sources), nl=False)
