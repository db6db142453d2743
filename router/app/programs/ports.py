"""The commands `kvroute gateway` and `kvroute picker`."""

from pathlib import Path
from typing import Any

import click

from router.app.cli.flags import read_config, settings_flags
from router.app.cli.run import run
from router.app.processes.logs import set_up
from router.config.settings.configurations import GatewayConfig, PickerConfig


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


@click.command()
@settings_flags(PickerConfig, {"picker.listen": "--listen"})
def picker(config_file: Path | None, **given: Any) -> None:
    """Pick endpoints for Envoy, Istio and other gateways that speak ext_proc.

    An endpoint picker of the Gateway API Inference Extension (protocol v1.0): the gateway sends
    each request's headers and body, and gets the worker that a router picked. Several pickers may
    stand side by side; they keep no state that outlives a request.
    """
    config = read_config(PickerConfig, config_file, given)
    set_up(config.log)

    async def running() -> int:
        from router.app.processes.picker_process import PickerApp

        return await PickerApp(config).run()

    run(running())
