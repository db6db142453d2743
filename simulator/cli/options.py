"""Options that several commands of the simulator have, and parsers of the options' values."""

from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import click

from router.app.cli.flags import shared_option
from router.config.settings.presets import PRESETS

Command = TypeVar("Command", bound=Callable[..., Any])
File = click.Path(path_type=Path, dir_okay=False)
STDOUT = Path("-")
Workers = click.IntRange(1, 4096)
Positive = click.FloatRange(min=0, min_open=True)
Share = click.FloatRange(0, 0.9)
NotNegative = click.FloatRange(min=0)
Count = click.IntRange(min=1)


def as_rates(context: click.Context, option: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected numbers such as 1,3,6") from None
    if not all(0 < rate < inf for rate in rates):
        raise click.BadParameter(f"{text!r}: every rate must be more than 0, and finite")
    return tuple(dict.fromkeys(rates))


def as_s(context: click.Context, option: click.Parameter, ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def as_failures(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[int, float, float]]:
    """(worker's index, second at which it dies, seconds until it is back) of each --fail."""
    failures = []
    for text in texts:
        worker, _, when = text.partition("@")
        at_s, _, down_s = when.partition("+")
        try:
            failures.append((int(worker), float(at_s), float(down_s or 30)))
        except ValueError:
            raise click.BadParameter(
                f"{text!r}: expected WORKER@SECONDS or WORKER@SECONDS+DOWN, such as 3@120+60"
            ) from None
    return failures


def as_options(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    given = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise click.BadParameter(f"{text!r}: expected NAME=VALUE")
        given[name.strip()] = value.strip()
    return given


def as_output(context: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
    """Raises BadParameter, before any run, when the output file's folder doesn't exist."""
    if file is not None and not file.parent.is_dir():
        raise click.BadParameter(f"there is no folder {file.parent}")
    return file


def write_json(file: Path, text: str) -> None:
    """Writes a JSON text to a file, or to stdout for `-`. Raises OSError."""
    if file == STDOUT:
        click.echo(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")


def options(*parts: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that adds options, and groups of options, to a command, in the order given."""

    def decorate(command: Command) -> Command:
        for part in reversed(parts):
            command = part(command)
        return command

    return decorate


option = partial(click.option, show_default=True)
_option = partial(shared_option("Options of simulated runs"), show_default=True)
_engine_option = partial(shared_option("Options of simulated engines"), show_default=True)
run_options = options(
    _option("--policy",
            help="Routing policy: one that `kvroute policies` lists, or module:function."
                 " [routing.policy of preset or file]"),
    _option("--json", "json_file", type=File, callback=as_output,
            help="Write the results of the runs as JSON to this file; - for stdout."),
)  # fmt: skip

traffic_options = options(
    _option("--trace-block-size", type=click.IntRange(8, 1 << 16), default=512,
            help="Tokens that each of a trace's hash_ids stands for: 512 in Mooncake's files, 16"
            " in Bailian's. In a trace without hash_ids, prompts of the same session or prefix"
            " share whole blocks of this many tokens."),
    _option("--tick-s", type=NotNegative,
            help="Seconds over which requests with the same time stamp are spread. [the distance"
            " between the trace's time stamps]"),
    _option("--from", "from_s", type=NotNegative, default=0.0,
            help="Second of the trace from which on requests are played; earlier requests are"
            " left out."),
    _option("--until", "until_s", type=Positive, default=inf, show_default=False,
            help="Second of the trace from which on requests are left out."),
    _option("--warm-up", "warm_up_s", type=NotNegative, default=0.0,
            help="Seconds at the start of the trace whose requests are played but not counted in"
            " the results."),
    _option("--warm-up-requests", type=click.IntRange(min=0), default=0,
            help="Number of requests at the start of the trace that are played but not counted in"
            " the results."),
    _option("--tenants", type=click.IntRange(0, 10_000), default=0,
            help="Number of tenants. Each session, or each request without a session, gets a tenant"
            " at random, by --seed. 0: the tenants of the trace."),
    _option("--tenant-skew", type=click.FloatRange(0, 10), default=1.0,
            help="Exponent s of Zipf's law for --tenants: tenant-K sends a share of the requests"
            " in proportion to 1 / K^s; 0: all send the same share."),
    _option("--priority-of", default="trace", metavar="FORM",
            help="Priorities of the requests; a higher priority goes first. FORM: trace (as in the"
            " trace), random:LOW,HIGH:SHARE (a SHARE, 0 to 1, of the requests has HIGH, the others"
            " LOW; further priorities and shares after commas), or tenant:NAME=PRIORITY,..."),
)  # fmt: skip

engine_options = options(
    _engine_option("--engine", default="vllm",
                   type=click.Choice(["vllm", "sglang", "chitu", "chitu-skew", "chitu-dp"]),
                   help="Engine whose scheduler is simulated."),
    _engine_option("--engine-option", "engine_options", callback=as_options, multiple=True,
                   metavar="NAME=VALUE",
                   help="Option of the simulated engine: max_num_seqs=64, or policy=lpm for"
                   " sglang; an unknown name prints the list of all options. Repeatable."),
    _engine_option("--profile", default="llama-8b-h100",
                   help="Profile of the model and GPU: llama-8b-h100, llama-70b-4xh100,"
                   " qwen3-32b-2xh100, mocker (NVIDIA Dynamo's mock engine), or a YAML file."),
    _engine_option("--block-size", type=Count, default=64,
                   help="Tokens of a KV block."),
    _engine_option("--blocks", type=Count,
                   help="KV blocks of each worker. [as many as the profile's memory holds]"),
    _engine_option("--host-blocks", type=Count,
                   help="KV blocks of each worker's cache in host memory, with vllm only. [none]"),
)  # fmt: skip

fleet_options = options(
    engine_options,
    _option("--ranks", type=Count, default=1,
            help="Data-parallel ranks of each engine."),
    _option("--config", "-c", "config_file", type=File,
            help="A router's YAML file; only its sections `routing` and `queue` are used."),
    _option("--queue", "queue_settings", callback=as_options, multiple=True,
            metavar="KEY=VALUE",
            help="Key of the section `queue` with its value in YAML, which overrides the file's:"
            " max_waiting=0, timeout_s=30, tenants.fair=true, or 'bands=[{name: low,"
            " from_priority: 0}, {name: high, from_priority: 10}]'. Repeatable."),
    _option("--preset", type=click.Choice(list(PRESETS)),
            help="Named routing settings; `kvroute policies --presets` lists them. A key of"
                 " the file overrides the preset's. [routing.preset of the file]"),
    _option("--replicas", type=Count, default=1,
            help="Number of routers, each with its own index of the workers' blocks."),
    _option("--event-delay-ms", "event_delay_s", type=NotNegative, callback=as_s, default=5.0,
            help="Milliseconds from the end of an engine's step until its events are in the"
            " routers' index."),
    _option("--event-jitter-ms", "event_jitter_s", type=NotNegative, callback=as_s, default=0.0,
            help="Milliseconds by which the delay of an event message may be longer or shorter; at"
            " most --event-delay-ms."),
    _option("--event-loss", type=Share, default=0.0,
            help="Share (0 to 0.9) of the event messages that are lost."),
    _option("--approximate-workers", type=click.IntRange(min=0), default=0,
            help="Number of workers that publish no events; routers predict these workers' blocks"
            " from their own picks."),
    _option("--past-router", "past_router_share", type=click.FloatRange(0, 1), default=0.0,
            help="Share (0 to 1) of the requests that go to a random worker without a router."),
    _option("--prefill-workers", type=Count,
            help="Number of workers that only compute prompts; the others fetch the KV cache and"
            " decode. [every worker does both]"),
    _option("--engines-per-host", type=Count, default=1,
            help="Number of engines on a host. With --hosts-per-rack this decides over which of"
            " the profile's links KV caches are sent."),
    _option("--hosts-per-rack", type=Count, default=8,
            help="Number of hosts in a rack; all racks are in one cluster."),
    _option("--hot-prefixes", is_flag=True,
            help="Copy a prefix that many requests share into the caches of further engines."),
    _option("--fail", "failures", callback=as_failures, multiple=True,
            metavar="WORKER@S[+DOWN_S]",
            help="WORKER, counted from 0, dies at second S of the run, and is back with an empty"
                 " cache DOWN_S seconds later (30 if left out). Repeatable."),
)  # fmt: skip
