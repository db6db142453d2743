"""`kvroute capacity`: the smallest fleet that meets a target of time to the first token."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from simulator.cli.options import (
    STDOUT,
    Positive,
    Workers,
    fleet_options,
    option,
    options,
    run_options,
    traffic_options,
    write_json,
)
from simulator.cli.runs import about, fleet_of, traffic_of

if TYPE_CHECKING:
    from simulator.study.capacity import Percentile


_options = options(
    run_options,
    option("--ttft-ms", type=Positive, required=True,
           help="Target in ms: --percentile of the times to the first token is at most this."),
    option("--percentile", type=click.Choice(["mean", "p50", "p90", "p99"]), default="p90",
           help="Statistic of the times to the first token that must meet --ttft-ms. A failed"
           " request counts as infinitely late."),
    option("--rate", type=Positive, default=1.0,
           help="Factor by which requests arrive faster than in the recorded trace."),
    option("--workers-min", type=Workers, default=1,
           help="Number of workers of the smallest fleet that is tried."),
    option("--workers-max", type=Workers, default=256,
           help="Number of workers of the largest fleet that is tried."),
    fleet_options,
    traffic_options,
    option("--seed", type=int, default=0, help="Seed of the simulated runs' random draws."),
    option("--quiet", "-q", is_flag=True, help="Print only the number of workers."),
)  # fmt: skip


@click.command()
@click.argument("trace")
@_options
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
    """Find the smallest fleet that keeps a promise: a time to the first token of --ttft-ms at most.

    Doubles the number of workers until the fleet keeps the promise, then bisects. The next larger
    fleet must keep it, too, since more workers need not mean less waiting. TRACE is as for
    `kvroute replay`. Exit code 1: no fleet that was tried keeps the promise.
    """
    from rich.console import Console

    from simulator.study.capacity import capacity_table, promised_ttft_s, smallest_fleet
    from simulator.world import world

    traffic = traffic_of(trace, given)
    fleet = replace(fleet_of(policy, workers_min, given), seed=seed)
    warm_up = traffic.warm_up(rate)
    console = Console(quiet=quiet)
    console.print(about(traffic), highlight=False, soft_wrap=True, markup=False)

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
            write_json(json_file, msgspec.json.format(msgspec.json.encode(document)).decode())
        except OSError as error:
            raise click.ClickException(str(error)) from error
    if answer.alone_s is not None:
        click.echo(
            f"kvroute: {percentile} of the times to the first token is"
            f" {1e3 * answer.alone_s:,.0f} ms on these engines even if no request waits: no number"
            f" of workers keeps {ttft_ms:g} ms",
            err=True,
        )
        raise click.exceptions.Exit(1)
    if answer.workers is None:
        click.echo(
            f"kvroute: not even {workers_max} workers (--workers-max) keep the promise:"
            f" {percentile} of the times to the first token is above {ttft_ms:g} ms",
            err=True,
        )
        raise click.exceptions.Exit(1)
    if quiet:
        if json_file != STDOUT:
            click.echo(answer.workers)
    else:
        keep = "worker keeps" if answer.workers == 1 else "workers keep"
        console.print(f"{answer.workers} {keep} the promise with {fleet.policy}.", highlight=False)
