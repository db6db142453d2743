"""The simulator's commands of `kvroute`, each of which imports what it needs when it runs."""

from pathlib import Path

import click

from router.app.cli.run import run
from router.app.processes.logs import set_up
from router.config.settings.serving_settings import LogSettings
from simulator.cli.capacity import capacity
from simulator.cli.options import File, as_output, option, options
from simulator.cli.replay import replay
from simulator.cli.simulate import simulate

__all__ = ["capacity", "demo", "replay", "simulate"]


@click.command()
@options(
    option("--json", "json_file", type=File, callback=as_output,
           help="JSON file that the table's numbers are written to."),
    option("--policy", "chosen", multiple=True,
           help="Policy to compare, repeatable. [default: round-robin and dynamo-adaptive]"),
    option("--speed", type=click.FloatRange(min=0.1, max=20),
           help="Seconds of the trace and of the engines' simulated time in one real second."
           " [default: 2.5]"),
    option("--verbose", "-v", is_flag=True,
           help="Show the log lines of the router and the relays."),
)  # fmt: skip
def demo(json_file: Path | None, chosen: tuple[str, ...], speed: float | None,
         verbose: bool) -> None:  # fmt: skip
    """Watch kvroute route to stand-in engines.

    Real NATS, real relays, the router and eight engines without GPUs, all on loopback: replays a
    slice of a public trace through gRPC, once for each policy, each from cold caches, and compares
    the policies.
    """
    from simulator.cli.demo import run_demo

    set_up(LogSettings(format="plain", level="info" if verbose else "error"))
    run(run_demo(chosen or ("round-robin", "dynamo-adaptive"), speed, json_file, verbose))
