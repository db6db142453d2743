"""The `kvroute` command."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

import click

from router.app.calls.envoy_config import envoy_config
from router.app.calls.questions import explain, queue, tail, top, workers
from router.app.calls.verbs import drain, register, remove, resync, undrain
from router.app.offline.nats_permissions import nats_permissions
from router.app.offline.policies import policies
from router.app.offline.render import render
from router.app.offline.replay_log import replay_log
from router.app.offline.token import token
from router.app.programs.ports import gateway, picker
from router.app.programs.relay import relay
from router.app.programs.serve import check_config, serve
from router.config.keys import ConfigError


def main() -> None:
    """Runs the command line; mistakes of the operator end with one line and exit code 2."""
    # Children are started by exec and never use gRPC: its fork handlers complain of each, and now
    # and then hang one between fork and exec.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        _check_text(sys.argv[1:])
        sys.exit(cli(standalone_mode=False) or 0)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(f"kvroute: {error}", err=True)
        sys.exit(2)


def _check_text(arguments: Sequence[str]) -> None:
    """Raises ConfigError for an argument whose bytes are no UTF-8, which no message can carry."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the argument {argument!a} is not UTF-8") from None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvroute")
def cli() -> None:
    """A KV-cache-aware router for vLLM and SGLang fleets."""


for command in (
    *(serve, relay, gateway, picker, envoy_config, check_config),
    *(workers, queue, register, drain, undrain, remove, resync),
    *(explain, tail, top, render, policies, replay_log, nats_permissions, token),
):
    cli.add_command(command)
for entry in entry_points(group="kvroute.commands"):
    cli.add_command(entry.load())


if __name__ == "__main__":
    main()
