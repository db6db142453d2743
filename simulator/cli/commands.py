"""`kvroute replay`, `capacity` and `simulate`: fleets without GPUs, in virtual time or live.

Modules that take long to import are imported when a command runs, so that `kvroute --help` is fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from router.cli.run import run
from router.config.presets import PRESETS
from router.config.serving_settings import LogSettings
from router.processes.logs import set_up

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.study.capacity import Percentile
    from simulator.study.comparison import Traffic
    from simulator.study.report import Comparison
    from simulator.world.options import RunOptions

Command = TypeVar("Command", bound=Callable[..., Any])
_File = click.Path(path_type=Path, dir_okay=False)
_STDOUT = Path("-")
_Workers = click.IntRange(1, 4096)
_Positive = click.FloatRange(min=0, min_open=True)
_Share = click.FloatRange(0, 0.9)
_NotNegative = click.FloatRange(min=0)
_Count = click.IntRange(min=1)


def _as_rates(context: click.Context, option: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected numbers such as 1,3,6") from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise click.BadParameter(f"{text!r}: every rate must be more than 0")
    return tuple(dict.fromkeys(rates))


def _as_failures(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[int, float, float]]:
    """(worker, second, seconds down) for each failure."""
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


def _as_options(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    given = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise click.BadParameter(f"{text!r}: expected NAME=VALUE")
        given[name.strip()] = value.strip()
    return given


def _as_output(context: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
    """Checks the output's folder at the start, not after half an hour of work."""
    if file is not None and not file.parent.is_dir():
        raise click.BadParameter(f"there is no folder {file.parent}")
    return file


def _write_json(file: Path, text: str) -> None:
    """`-` is stdout. Raises OSError."""
    if file == _STDOUT:
        click.echo(text)
    else:
        file.write_text(text + "\n", encoding="utf-8")


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_traffic_options = _options(
    click.option("--trace-block-size", type=click.IntRange(8, 1 << 16), default=512,
                 show_default=True,
                 help="Tokens of each of a trace's hash_ids: 512 in Mooncake's files, 16 in"
                      " Bailian's. In a trace without hash_ids, prompts of a session or prefix"
                      " share whole blocks of so many tokens."),
    click.option("--tick-s", type=_NotNegative, default=None,
                 help="Spread requests with the same time stamp over so many seconds."
                      " [the distance between the stamps]"),
    click.option("--from", "from_s", type=_NotNegative, default=0.0, show_default=True,
                 help="Leave out requests that arrive before this second of the trace."),
    click.option("--until", "until_s", type=_Positive, default=None,
                 help="Leave out requests that arrive from this second of the trace on."),
    click.option("--warm-up", "warm_up_s", type=_NotNegative, default=0.0, show_default=True,
                 help="Seconds of the trace that are run but not counted."),
    click.option("--warm-up-requests", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Requests that are run but not counted."),
    click.option("--tenants", type=click.IntRange(0, 10_000), default=0, show_default=True,
                 help="Requests, or sessions, belong to one of so many tenants, drawn by the seed;"
                      " 0: to those of the trace."),
    click.option("--tenant-skew", type=click.FloatRange(0, 10), default=1.0, show_default=True,
                 help="Exponent s of Zipf's law for --tenants: tenant-K sends a share of the"
                      " requests proportional to 1 / K^s; 0: all send alike."),
    click.option("--priority-of", default="trace", show_default=True, metavar="FORM",
                 help="Priorities of the requests, higher is sooner: trace, or"
                      " random:LOW,HIGH:SHARE (SHARE of the requests have HIGH; further ones"
                      " follow with commas, as in random:0,10,20:0.5,0.2), or"
                      " tenant:NAME=PRIORITY,..."),
)  # fmt: skip

_engine_options = _options(
    click.option("--engine", default="vllm", show_default=True,
                 type=click.Choice(["vllm", "sglang", "chitu", "chitu-skew", "chitu-dp"]),
                 help="Scheduler of the engines."),
    click.option("--engine-option", "engine_options", callback=_as_options, multiple=True,
                 metavar="NAME=VALUE",
                 help="Option of the engine's own: max_num_seqs=64, or policy=lpm for sglang; an"
                      " unknown name prints the list of all. Repeatable."),
    click.option("--profile", default="llama-8b-h100", show_default=True,
                 help="Model and GPU: llama-8b-h100, llama-70b-4xh100, qwen3-32b-2xh100, mocker"
                      " (NVIDIA Dynamo's mock engine), or a YAML file."),
    click.option("--block-size", type=_Count, default=64, show_default=True,
                 help="Tokens of a block."),
    click.option("--blocks", type=_Count, default=None,
                 help="Blocks of each worker. [as many as the profile's memory holds]"),
    click.option("--host-blocks", type=_Count, default=None,
                 help="Blocks of each worker's host cache, with vllm only. [none]"),
)  # fmt: skip

_fleet_options = _options(
    _engine_options,
    click.option("--ranks", type=_Count, default=1, show_default=True,
                 help="Data-parallel ranks of each engine."),
    click.option("--config", "-c", "config_file", type=_File, default=None,
                 help="A router's YAML file; only its sections `routing` and `queue` are used."),
    click.option("--queue", "queue_settings", callback=_as_options, multiple=True,
                 metavar="KEY=VALUE",
                 help="A key of the section `queue` and its value in YAML, over the file's:"
                      " max_waiting=0, timeout_s=30, tenants.fair=true, or"
                      " 'bands=[{name: low, from_priority: 0}, {name: high, from_priority: 10}]'."
                      " Repeatable."),
    click.option("--preset", type=click.Choice(list(PRESETS)), default=None,
                 help="Named routing settings; `kvroute policies --presets` lists them. A key of"
                      " the file overrides the preset's. [routing.preset of the file]"),
    click.option("--replicas", type=_Count, default=1, show_default=True,
                 help="Routers, each with a view of its own."),
    click.option("--event-delay-ms", type=_NotNegative, default=5.0, show_default=True,
                 help="Milliseconds from the end of an engine's step to the routers' index."),
    click.option("--event-jitter-ms", type=_NotNegative, default=0.0, show_default=True,
                 help="Milliseconds by which a message's delay may be longer or shorter."),
    click.option("--event-loss", type=_Share, default=0.0, show_default=True,
                 help="Share of the event messages that are lost."),
    click.option("--approximate-workers", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Workers that publish no events: routers predict their blocks from their own"
                      " picks."),
    click.option("--past-router", "past_router_share", type=click.FloatRange(0, 1), default=0.0,
                 show_default=True,
                 help="Share of the requests that go to a random worker, past the routers."),
    click.option("--prefill-workers", type=_Count, default=None,
                 help="Workers that compute prompts; the others fetch the KV cache and decode."
                      " [every worker does both]"),
    click.option("--engines-per-host", type=_Count, default=1, show_default=True,
                 help="Decides, with --hosts-per-rack, by which of the profile's links KV cache"
                      " travels."),
    click.option("--hosts-per-rack", type=_Count, default=8, show_default=True,
                 help="All racks are of one cluster."),
    click.option("--hot-prefixes", is_flag=True,
                 help="Copy prefixes that many requests share from engine to engine."),
    click.option("--fail", "failures", callback=_as_failures, multiple=True,
                 metavar="WORKER@S[+DOWN_S]",
                 help="This worker, counted from 0, dies at second S of the run and is back, empty,"
                      " after DOWN_S, or 30. Repeatable."),
)  # fmt: skip


@click.command()
@click.argument("trace")
@click.option("--workers", "-w", type=_Workers, default=8, show_default=True, help="Engines.")
@click.option(
    "--rate",
    "rates",
    callback=_as_rates,
    default="1",
    show_default=True,
    help="Speed of the trace's clock, times the recorded; several with commas: 1,3,6.",
)
@click.option(
    "--policy",
    default=None,
    help="Routing policy; `kvroute policies` lists them. [routing.policy of preset or file]",
)
@click.option("--compare", default="", help="More policies, with commas, on the same traffic.")
@click.option(
    "--order",
    "orders",
    default="",
    metavar="NAME[,NAME...]",
    help="Orders in which requests wait for a worker with room; each is played with each policy."
    " [queue.order of the file: priority]",
)
@_fleet_options
@_traffic_options
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    default=(0,),
    show_default=True,
    help="Seed of a run. Repeatable: numbers are then means over the seeds.",
)
@click.option(
    "--shadow",
    "shadows",
    multiple=True,
    help="Policy that only scores each request, beside the policy that picks. Repeatable.",
)
@click.option(
    "--slo-ttft-ms",
    type=_Positive,
    default=None,
    help="Goodput counts requests whose first token came within this time. Requests without a"
    " TTFT of their own in the trace name it to the router as their ttft_slo_ms.",
)
@click.option(
    "--slo-itl-ms",
    type=_Positive,
    default=None,
    help="Goodput counts requests whose mean time between tokens is at most this.",
)
@click.option(
    "--json",
    "json_file",
    type=_File,
    callback=_as_output,
    help="Write the numbers to this file; - for stdout.",
)
@click.option(
    "--csv",
    "csv_file",
    type=_File,
    callback=_as_output,
    help="Write a row for each run to this file.",
)
@click.option(
    "--plot",
    "plot_folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Draw pictures into this folder; needs kvroute[plots].",
)
@click.option(
    "--jobs", "-j", type=_Count, default=1, show_default=True, help="Processes that share the runs."
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing.")
def replay(
    trace: str,
    workers: int,
    rates: tuple[float, ...],
    policy: str | None,
    compare: str,
    orders: str,
    seeds: tuple[int, ...],
    shadows: tuple[str, ...],
    slo_ttft_ms: float | None,
    slo_itl_ms: float | None,
    json_file: Path | None,
    csv_file: Path | None,
    plot_folder: Path | None,
    jobs: int,
    quiet: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Replay a trace on simulated engines, in virtual time, and compare policies.

    TRACE is an included slice (conversation, synthetic, agentic) or a file of requests in
    order of time: JSON lines or CSV with a header. Columns are known by their names: Mooncake's
    (timestamp, input_length, output_length, hash_ids), Azure's (TIMESTAMP, ContextTokens,
    GeneratedTokens, or arrived_at, num_prefill_tokens, num_decode_tokens), BurstGPT's (Timestamp,
    Request tokens, Response tokens, Session ID, Model), Bailian's (chat_id and so on), arrival_s.
    More columns, of any form: session_id, turn, think_ms (the turn starts so long after the end of
    the turn before), prefix_id, prefix_tokens, model, lora_name, tenant, priority (higher is
    sooner), deadline_ms, ttft_slo_ms. The first lines of the output give the meaning of each
    column, and the columns that are not read; docs/simulate.md lists them all.

    The router's own decision core picks, each policy from cold caches. Times are those of the
    profile's cost model, not of this machine.
    """
    from rich.console import Console

    from simulator.study.comparison import compare as compare_runs
    from simulator.study.plots import PlotsMissing, check_plots, write_plots
    from simulator.study.progress import Unwatched, watch
    from simulator.study.report import to_json, write_csv
    from simulator.traffic.results import Slo
    from simulator.world import world

    traffic = _traffic(trace, given, slo_ttft_ms)
    fleets = _fleets(policy, compare, orders, workers, given, shadows)
    slo = Slo(*(None if ms is None else ms / 1e3 for ms in (slo_ttft_ms, slo_itl_ms)))
    console = Console(quiet=quiet)
    try:
        if plot_folder is not None:
            check_plots()
        console.print(_about(traffic), highlight=False, soft_wrap=True, markup=False)
        arguments: dict[str, Any] = {"rates": rates, "seeds": tuple(dict.fromkeys(seeds))}
        arguments |= {"slo": slo, "jobs": jobs}
        if quiet:
            runs = compare_runs(traffic, fleets, world.run, Unwatched(), **arguments)
        else:
            with watch(console) as watcher:
                runs = compare_runs(traffic, fleets, world.run, watcher, **arguments)
        for comparison in runs:
            _print_comparison(console, comparison)
        if json_file is not None:
            _write_json(json_file, to_json(runs))
        if csv_file is not None:
            write_csv(runs, csv_file)
        if plot_folder is not None:
            for file in write_plots(runs, plot_folder):
                console.print(f"drawn: {file}", highlight=False, soft_wrap=True)
    except (ValueError, OSError, PlotsMissing) as error:
        raise click.ClickException(str(error)) from error


def _print_comparison(console: "Console", comparison: "Comparison") -> None:
    from simulator.study.report import shadow_table, tables

    for table in tables(comparison, console.width):
        console.print(table)
    shadows = shadow_table(comparison)
    if shadows is not None:
        console.print(shadows)
    for played in comparison.runs:
        for reason, count in sorted(played.first.failures.items()):
            line = f"{played.label}: {count} failed: {reason}"
            console.print(line, style="red", highlight=False, soft_wrap=True)


@click.command()
@click.argument("trace")
@click.option(
    "--policy",
    default=None,
    help="Routing policy; `kvroute policies` lists them. [routing.policy of preset or file]",
)
@click.option(
    "--ttft-ms", type=_Positive, required=True, help="The promised time to first token, ms."
)
@click.option(
    "--percentile",
    type=click.Choice(["mean", "p50", "p90", "p99"]),
    default="p90",
    show_default=True,
    help="Statistic that the promise bounds. A failed request counts as infinitely late.",
)
@click.option(
    "--rate",
    type=_Positive,
    default=1.0,
    show_default=True,
    help="Speed of the trace's clock, times the recorded.",
)
@click.option(
    "--workers-min", type=_Workers, default=1, show_default=True, help="The smallest fleet tried."
)
@click.option(
    "--workers-max", type=_Workers, default=256, show_default=True, help="The largest fleet tried."
)
@_fleet_options
@_traffic_options
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--json",
    "json_file",
    type=_File,
    callback=_as_output,
    help="Write the result to this file; - for stdout.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print the number alone.")
def capacity(
    trace: str,
    policy: str | None,
    ttft_ms: float,
    percentile: "Percentile",
    rate: float,
    workers_min: int,
    workers_max: int,
    seed: int,
    json_file: Path | None,
    quiet: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Find the smallest fleet that keeps a promise about the time to first token.

    Doubles the fleet until it keeps the promise, then bisects, and tries the next larger fleet,
    too, since more workers need not mean less waiting. TRACE is as for `kvroute replay`. Exit code
    1 when no fleet that was tried keeps it.
    """
    from rich.console import Console

    from simulator.study.capacity import capacity_table, promised_ttft_s, smallest_fleet
    from simulator.world import world

    traffic = _traffic(trace, given)
    fleet = replace(_fleet(policy, workers_min, given), seed=seed)
    warm_up = traffic.warm_up(rate)
    console = Console(quiet=quiet)
    console.print(_about(traffic), highlight=False, soft_wrap=True, markup=False)

    def measure(workers: int) -> float:
        with console.status(f"{workers} workers"):
            result = world.run(replace(fleet, workers=workers), played, None)
        return promised_ttft_s(result, percentile, warm_up)

    try:
        played = traffic.at(rate, seed)
        answer = smallest_fleet(measure, ttft_ms / 1e3, least=workers_min, most=workers_max)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    console.print(capacity_table(answer, percentile, ttft_ms / 1e3))
    if not answer.is_monotone:
        console.print("More workers did not always mean less waiting: see the table.")
    if json_file is not None:
        document = {
            "trace": traffic.trace.name,
            "policy": fleet.policy,
            "rate": rate,
            "percentile": percentile,
            "ttft_ms": ttft_ms,
            **answer.to_dict(),
        }
        try:
            _write_json(json_file, msgspec.json.format(msgspec.json.encode(document)).decode())
        except OSError as error:
            raise click.ClickException(str(error)) from error
    if answer.workers is None:
        click.echo(f"kvroute: not even {workers_max} workers keep the promise", err=True)
        raise click.exceptions.Exit(1)
    if quiet:
        if json_file != _STDOUT:
            click.echo(answer.workers)
    else:
        keep = "worker keeps" if answer.workers == 1 else "workers keep"
        console.print(f"{answer.workers} {keep} the promise with {fleet.policy}.", highlight=False)


@click.command()
@click.option("--engines", "count", type=_Count, default=2, show_default=True)
@_engine_options
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
    type=_File,
    callback=_as_output,
    help="Write a configuration for `kvroute serve` with these engines.",
)
@click.option(
    "--gateway",
    is_flag=False,
    flag_value="127.0.0.1:8080",
    default=None,
    metavar="[HOST:PORT]",
    help="Run a router with its gateway, too: OpenAI's API on this address, or on 127.0.0.1:8080.",
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

    With --gateway the whole of kvroute runs in front of them: point a client of OpenAI's API at it.
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
        scheduler = _scheduler(given)
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


def _traffic(name: str, given: dict[str, Any], ttft_slo_ms: float | None = None) -> "Traffic":
    from simulator.study.comparison import Traffic
    from simulator.traffic.callers import Callers, Priorities
    from simulator.traffic.trace_columns import TraceError
    from simulator.traffic.trace_file import load_trace

    try:
        trace = load_trace(name, given["trace_block_size"])
    except TraceError as error:
        raise click.UsageError(str(error)) from error
    until_s = given["until_s"]
    try:
        callers = Callers(
            tenants=given["tenants"],
            skew=given["tenant_skew"],
            priorities=Priorities.parse(given["priority_of"]),
            ttft_slo_s=None if ttft_slo_ms is None else ttft_slo_ms / 1e3,
        )
    except ValueError as error:
        raise click.UsageError(f"--priority-of: {error}") from error
    return Traffic(
        trace=trace,
        tick_s=given["tick_s"],
        from_s=given["from_s"],
        until_s=float("inf") if until_s is None else until_s,
        warm_up_s=given["warm_up_s"],
        warm_up_requests=given["warm_up_requests"],
        callers=callers,
    )


def _fleets(
    policy: str | None,
    compare: str,
    orders: str,
    workers: int,
    given: dict[str, Any],
    shadows: Sequence[str],
) -> "list[RunOptions]":
    """A fleet for each policy and order. Raises UsageError."""
    first = _fleet(policy, workers, given, shadows=shadows)
    more = _names(compare)
    more.pop(first.policy, None)
    fleets = [first, *(_fleet(name, workers, given, shadows=shadows) for name in more)]
    try:
        return [
            replace(fleet, queue=msgspec.structs.replace(fleet.queue, order=order))
            for fleet in fleets
            for order in _names(orders) or [fleet.queue.order]
        ]
    except ValueError as error:
        raise click.UsageError(f"--order: {error}") from error


def _names(text: str) -> dict[str, None]:
    """Names with commas between them, each once."""
    return dict.fromkeys(filter(None, map(str.strip, text.split(","))))


def _fleet(
    policy: str | None, workers: int, given: dict[str, Any], *, shadows: Sequence[str] = ()
) -> "RunOptions":
    """The options of all runs of a policy; `workers` is the smallest fleet that is run.

    policy: None: the configured policy. Raises UsageError for options that can't be run.
    """
    from router.config.configurations import ServeConfig
    from router.config.reading import load
    from simulator.traffic.trace import check_block_size
    from simulator.world.options import Disaggregation, Failure, RunOptions

    _check_fits(workers, given)
    flags: dict[tuple[str, ...], object] = {}
    if given["preset"] is not None:
        flags["routing", "preset"] = given["preset"]
    for key, text in given["queue_settings"].items():
        flags["queue", *key.split(".")] = _yaml(key, text)
    prefill_workers = given["prefill_workers"]
    try:
        config = load(ServeConfig, given["config_file"], {}, flags)
        check_block_size(given["block_size"], given["trace_block_size"])
        return RunOptions(
            policy=policy or config.routing.policy,
            workers=workers,
            ranks=given["ranks"],
            engine=given["engine"],
            scheduler=_scheduler(given, ranks=given["ranks"], joined_steps_max=_JOINED_STEPS),
            routing=config.routing,
            queue=config.queue,
            replicas=given["replicas"],
            shadows=tuple(shadows),
            event_delay_s=given["event_delay_ms"] / 1e3,
            event_jitter_s=given["event_jitter_ms"] / 1e3,
            event_loss=given["event_loss"],
            approximate_workers=given["approximate_workers"],
            past_router_share=given["past_router_share"],
            disaggregation=None if prefill_workers is None else Disaggregation(prefill_workers),
            engines_per_host=given["engines_per_host"],
            hosts_per_rack=given["hosts_per_rack"],
            hot_prefixes=given["hot_prefixes"] or config.routing.hot_prefixes.enabled,
            failures=tuple(
                Failure(at_s=at_s, worker=worker, down_s=down_s)
                for worker, at_s, down_s in given["failures"]
            ),
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _yaml(key: str, text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.UsageError(f"--queue {key}={text}: not YAML: {error}") from error


def _check_fits(workers: int, given: dict[str, Any]) -> None:
    """Raises UsageError for options that don't go together, with their names as flags."""
    needed = [("--fail", worker + 1) for worker, _, _ in given["failures"]]
    needed.append(("--approximate-workers", given["approximate_workers"]))
    if given["prefill_workers"] is not None:
        needed.append(("--prefill-workers", given["prefill_workers"] + 1))
    for option, count in needed:
        if count > workers:
            raise click.UsageError(f"{option}: needs a fleet of {count} workers, not {workers}")
    if given["event_jitter_ms"] > given["event_delay_ms"]:
        raise click.UsageError("--event-jitter-ms: more than --event-delay-ms")


def _scheduler(given: dict[str, Any], *, ranks: int = 1, joined_steps_max: int = 1) -> Any:
    """One engine's limits and prices. Raises ValueError."""
    from simulator.engines.profile import load_profile
    from simulator.schedulers import SCHEDULERS
    from simulator.schedulers.options import scheduler_config

    options = dict(given["engine_options"])
    if given["host_blocks"] is not None:
        if given["engine"] != "vllm":
            raise ValueError(f"--host-blocks: {given['engine']} has no host cache here, only vllm")
        options["host_block_count"] = str(given["host_blocks"])
    config = scheduler_config(
        given["engine"],
        load_profile(given["profile"]),
        block_size=given["block_size"],
        block_count=given["blocks"],
        ranks=ranks,
        joined_steps_max=joined_steps_max,
        options=options,
    )
    SCHEDULERS[given["engine"]](config)  # raises if the options don't go together
    return config


_JOINED_STEPS = 10_000
"""The most consecutive decode steps without a decision between them that are joined."""


def _about(traffic: "Traffic") -> str:
    trace = traffic.trace.spread(traffic.tick_s)
    ticks = f", stamped in ticks of {trace.tick_s:.3g} s, which are spread" if trace.tick_s else ""
    loop = ", turns wait for the turns before them" if trace.is_closed_loop else ""
    about = f"{trace.name}: {len(trace.requests)} requests{ticks}{loop}"
    width = max((len(use.name) for use in trace.columns), default=0)
    return "\n".join([about, *(f"  {use.name:{width}}  {use.meaning}" for use in trace.columns)])


@click.command()
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the table's numbers to this file.",
)
@click.option(
    "--policy",
    "chosen",
    multiple=True,
    help="Policies to compare, repeatable. [round-robin, dynamo-adaptive]",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0.1, max=20),
    default=None,
    help="Speed, times the trace's own.",
)
@click.option("--verbose", "-v", is_flag=True, help="Show the logs of router and relays.")
def demo(json_file: Path | None, chosen: tuple[str, ...], speed: float | None,
         verbose: bool) -> None:  # fmt: skip
    """Watch kvroute route to stand-in engines.

    Real NATS, real relays, the router and eight engines without GPUs, all on loopback: replays a
    slice of a public trace through gRPC, once for each policy, each from cold caches, and compares.
    """
    from simulator.cli.demo import run_demo

    set_up(LogSettings(format="plain", level="info" if verbose else "error"))
    run(run_demo(chosen or ("round-robin", "dynamo-adaptive"), speed, json_file, verbose))
