"""`kvroute simulate`: stand-in engines on loopback."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from router.config.settings.serving_settings import LogSettings
from router.processes.logs import set_up
from simulator.cli.options import Count, File, as_output, engine_options
from simulator.cli.runs import scheduler_of


@click.command()
@click.option("--engines", "count", type=Count, default=2, show_default=True)
@engine_options
@click.option("--model", default="stand-in", show_default=True, help="Name of the model.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0.01, max=1000),
    default=1.0,
    show_default=True,
    help="Seconds of the engines' time in one real second.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the first engine's HTTP; its events, its replay and the next engine take the"
    " ports that follow. [free ports]",
)
@click.option(
    "--write-config",
    "router_file",
    type=File,
    callback=as_output,
    help="Write a configuration for `kvroute serve` with these engines.",
)
@click.option(
    "--gateway",
    is_flag=False,
    flag_value="127.0.0.1:8080",
    default=None,
    metavar="[HOST:PORT]",
    help="Run a router with its gateway, too: OpenAI's and Anthropic's API on this address, or on"
    " 127.0.0.1:8080.",
)
@click.option(
    "--grpc-listen",
    default="127.0.0.1:50051",
    show_default=True,
    help="With --gateway: host:port of the router.",
)
def simulate(
    count: int,
    model: str,
    speed: float,
    port: int,
    router_file: Path | None,
    gateway: str | None,
    grpc_listen: str,
    **given: Any,
) -> None:  # fmt: skip
    """Run engines without GPUs on loopback, until Ctrl-C.

    They answer as vLLM does over HTTP (completions, chats, metrics, tokenize), publish real KV
    events over ZMQ and replay them, take the time of the profile, and generate random answers. A
    token is a byte. For trying kvroute, and for tests.

    With --gateway the whole of kvroute runs in front of them: point a client of OpenAI's API, or of
    Anthropic's, at it.
    """
    import asyncio

    import uvloop
    import zmq
    from rich.console import Console

    from simulator.live.engine import EngineConfig
    from simulator.live.run import run_live
    from simulator.live.stand_ins import PORTS

    if port + PORTS * count > 1 << 16:
        raise click.UsageError(f"{count} engines need {PORTS * count} ports from {port} on")
    try:
        scheduler = scheduler_of(given)
        # A seed for each engine: engines of a fleet have different hashes of the same block.
        configs = [
            EngineConfig(
                f"worker-{i}", replace(scheduler, hash_seed=i + 1), model, kind=given["engine"]
            )
            for i in range(count)
        ]
        if gateway is None:
            work = run_live(configs, Console(), speed=speed, port=port, router_file=router_file)
        else:
            from simulator.cli.gateway import run_with_gateway

            if router_file is not None:
                raise click.UsageError("--write-config is for engines without --gateway")
            set_up(LogSettings(format="plain", level="error"))
            work = run_with_gateway(
                *(configs, Console()),
                speed=speed,
                port=port,
                listen=gateway,
                grpc_listen=grpc_listen,
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(work)
    except (ValueError, OSError, zmq.ZMQError) as error:
        raise click.ClickException(str(error)) from error
    if code:
        raise click.exceptions.Exit(code)
