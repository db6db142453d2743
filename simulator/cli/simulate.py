"""`kvroute simulate`: stand-in engines, on loopback unless --host names another address."""

import ipaddress
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from router.app.processes.logs import set_up
from router.config.settings.serving_settings import LogSettings
from simulator.cli.options import File, NotNegative, as_output, engine_options, option, options
from simulator.cli.runs import scheduler_of

if TYPE_CHECKING:
    from simulator.engines.scheduler import SchedulerConfig
    from simulator.live.engine import Half


Several = click.IntRange(0, 1024)
Port = click.IntRange(0, 65535)


def _as_address(context: click.Context, option: click.Parameter, text: str) -> str:
    """The option's value as an IP address. Raises BadParameter for a host name, which may stand for
    several addresses."""
    try:
        return str(ipaddress.ip_address("127.0.0.1" if text == "localhost" else text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no IP address, such as 0.0.0.0 or ::1") from None


_options = options(
    option("--engines", "count", type=Several,
           help="Number of engines that serve whole requests. [2, or none beside --prefill and"
           " --decode]"),
    option("--prefill", type=Several, default=0, show_default=False,
           help="Number of engines that compute prompts for the engines of --decode, as SGLang's"
           " prefill engines do."),
    option("--decode", type=Several, default=0, show_default=False,
           help="Number of engines that answer prompts which the engines of --prefill computed."),
    engine_options,
    option("--model", default="stand-in", help="Name of the model that the engines serve."),
    option("--speed", type=click.FloatRange(min=0.01, max=1000), default=1.0,
           help="Seconds of the engines' simulated time in one real second."),
    option("--host", callback=_as_address, default="127.0.0.1",
           help="IP address that the engines listen on; 0.0.0.0: every IPv4 address, `::`: every"
           " address. The engines check no keys."),
    option("--port", type=Port, default=0, show_default=False,
           help="HTTP port of the first engine; its events, its replay socket and the next engine"
           " take the ports that follow. [free ports]"),
    option("--events-port", type=Port, default=0, show_default=False,
           help="Port of the first engine's events; its replay socket and the next engine's events"
           " take the ports that follow. [after --port]"),
    option("--drain-s", type=NotNegative, default=0.0,
           help="Seconds for which requests that have begun may go on after SIGTERM, while new ones"
           " are refused. 0: the engines end at once, as after Ctrl-C."),
    option("--write-config", "router_file", type=File, callback=as_output,
           help="Write a configuration for `kvroute serve` with these engines."),
    option("--gateway", is_flag=False, flag_value="127.0.0.1:8080", metavar="[HOST:PORT]",
           help="host:port on which a router with its gateway is run beside the engines, for"
           " OpenAI's and Anthropic's API; without a value, 127.0.0.1:8080."),
    option("--grpc-listen", default="127.0.0.1:50051",
           help="host:port on which the router that --gateway starts takes gRPC calls."),
)  # fmt: skip


@click.command()
@_options
def simulate(
    count: int | None,
    prefill: int,
    decode: int,
    model: str,
    speed: float,
    host: str,
    port: int,
    events_port: int,
    drain_s: float,
    router_file: Path | None,
    gateway: str | None,
    grpc_listen: str,
    **given: Any,
) -> None:  # fmt: skip
    """Run engines without GPUs, until Ctrl-C.

    They answer as vLLM or SGLang does over HTTP (completions, chats, metrics, tokenize), publish
    real KV events over ZMQ and replay them, take as long as the profile says, and generate random
    answers. A token is a byte. For trying kvroute, and for tests.

    With --gateway the whole of kvroute runs in front of them: point a client of OpenAI's API, or of
    Anthropic's, at it.
    """
    import asyncio

    import uvloop
    import zmq
    from rich.console import Console

    from simulator.live.addresses import ports_of
    from simulator.live.engine import EngineConfig
    from simulator.live.run import live_engines, run_live

    halves = _halves(count, prefill, decode)
    if prefill or decode:
        given["engine"] = _engine_of_pairs(given["engine"])
    ports = ports_of((half == "prefill" for half in halves), port, events_port)
    if max(map(max, ports)) >= 1 << 16:
        raise click.UsageError(f"there are not enough ports from {port or events_port} on")
    try:
        configs = [
            EngineConfig(f"{half or 'worker'}-{i}", scheduler, model, given["engine"], half)
            for i, half, scheduler in _schedulers(halves, given)
        ]
        engines = live_engines(configs, speed=speed, host=host, ports=ports)
        if gateway is None:
            work = run_live(engines, Console(), host=host, drain_s=drain_s, router_file=router_file)
        else:
            from simulator.cli.gateway import run_with_gateway

            if router_file is not None:
                raise click.UsageError("--write-config is for engines without --gateway")
            if drain_s:
                raise click.UsageError("--drain-s and --gateway can't be given together")
            set_up(LogSettings(format="plain", level="error"))
            work = run_with_gateway(
                engines, Console(), host=host, listen=gateway, grpc_listen=grpc_listen
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(work)
    except (ValueError, OSError, zmq.ZMQError) as error:
        raise click.ClickException(str(error)) from error
    if code:
        raise click.exceptions.Exit(code)


def _halves(count: int | None, prefill: int, decode: int) -> "list[Half | None]":
    """The half of a request that each engine serves; None: whole requests. Raises UsageError if the
    three numbers of engines add up to none."""
    if count is None:
        count = 0 if prefill or decode else 2
    halves: list[Half | None] = [None for _ in range(count)]
    halves += ["prefill" for _ in range(prefill)]
    halves += ["decode" for _ in range(decode)]
    if not halves:
        raise click.UsageError(
            "there is no engine to run: give --engines, or --prefill and --decode"
        )
    return halves


def _engine_of_pairs(engine: str) -> str:
    """The engine to simulate with --prefill and --decode: of the simulated engines only SGLang has
    the two halves. Raises UsageError if --engine was given and names another engine."""
    from events.engines.engine import HandOver
    from simulator.schedulers import SCHEDULERS

    pairs = [name for name, kind in SCHEDULERS.items() if kind.engine.hand_over is HandOver.AT_ONCE]
    source = click.get_current_context().get_parameter_source("engine")
    if engine not in pairs and source is not ParameterSource.DEFAULT:
        named = " or ".join(pairs)
        raise click.UsageError(f"--prefill and --decode are for --engine {named}, not {engine}")
    return engine if engine in pairs else pairs[0]


def _schedulers(
    halves: "Sequence[Half | None]", given: dict[str, Any]
) -> "Iterator[tuple[int, Half | None, SchedulerConfig]]":
    """Yields for each engine: its number among the engines of the same half, its half (None: whole
    requests), and its scheduler's configuration. Raises ValueError."""
    scheduler = scheduler_of(given)
    # A seed for each engine: engines of a fleet, also those of other processes, have different
    # hashes of the same block.
    seed = secrets.randbits(32)
    numbers: Counter[Half | None] = Counter()
    for place, half in enumerate(halves):
        own = replace(scheduler, hash_seed=seed + place)
        if half == "decode":
            own = replace(own, radix_cache=False)  # SGLang forces it
        yield numbers[half], half, own
        numbers[half] += 1
