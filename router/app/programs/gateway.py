"""`kvroute gateway`."""

from pathlib import Path
from typing import Any

import click

from router.app.cli.flags import read_config, settings_flags
from router.app.cli.run import run
from router.app.processes.logs import set_up
from router.config.settings.configurations import GatewayConfig


@click.command()
@settings_flags(GatewayConfig, {"gateway.listen": "--listen"})
def gateway(config_file: Path | None, **given: Any) -> None:
    """Serve OpenAI's and Anthropic's HTTP API in front of the fleet.

    Requests go to the workers that the routers pick, and answers come back byte for byte.
    /v1/models, /health, /ready and /metrics are the gateway's own. An address that is not loopback
    needs --keys-file, --tls-client-ca-file or --gateway-any-address. Several gateways may stand
    side by side.
    """
    config = read_config(GatewayConfig, config_file, given)
    set_up(config.log)

    async def running() -> int:
        from router.app.processes.gateway_process import GatewayApp

        return await GatewayApp(config).run()

    run(running())
