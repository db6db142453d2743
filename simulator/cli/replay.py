"""`kvroute replay`: policies on a trace, in virtual time."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import (
    Count,
    File,
    Positive,
    Workers,
    as_output,
    as_rates,
    as_s,
    fleet_options,
    option,
    options,
    run_options,
    traffic_options,
    write_json,
)
from simulator.cli.runs import about, fleets_of, traffic_of

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.study.report import Comparison


_options = options(
    option("--workers", "-w", type=Workers, default=8, help="Number of simulated engines."),
    option("--rate", "rates", callback=as_rates, default="1",
           help="Factor by which requests arrive faster than in the recorded trace; several with"
           " commas, a run each: 1,3,6."),
    run_options,
    option("--compare", default="", show_default=False,
           help="Further policies, with commas between, that are run on the same traffic."),
    option("--order", "orders", default="", show_default=False, metavar="NAME[,NAME...]",
           help="Orders of the queue of requests that wait for a worker; each order is run with"
           " each policy. [queue.order of the file: priority]"),
    fleet_options,
    traffic_options,
    option("--seed", "seeds", type=int, multiple=True, default=(0,),
           help="Seed of a run's random draws. Repeatable: the results are then means over the"
           " seeds."),
    option("--shadow", "shadows", multiple=True,
           help="Policy that scores each request for comparison, without any effect on picks."
           " Repeatable."),
    option("--slo-ttft-ms", "slo_ttft_s", type=Positive, callback=as_s,
           help="Milliseconds within which the first token must come for a request to count in"
           " goodput. Requests without such a target in the trace send this one to the router as"
           " their ttft_slo_ms."),
    option("--slo-itl-ms", "slo_itl_s", type=Positive, callback=as_s,
           help="Most milliseconds between tokens, in the mean over a request, for the request to"
           " count in goodput. Requests without such a target in the trace send this one to the"
           " router as their tpot_slo_ms."),
    option("--csv", "csv_file", type=File, callback=as_output,
           help="CSV file that a row for each run is written to."),
    option("--html", "html_file", type=File, callback=as_output,
           help="HTML file that a page which compares the policies is written to; the page needs no"
           " network."),
    option("--open", "opens", is_flag=True,
           help="Show the page of --html in a browser; without --html the page is a temporary"
           " file."),
    option("--jobs", "-j", type=Count, default=1,
           help="Number of processes that share the runs."),
    option("--quiet", "-q", is_flag=True, help="Print nothing."),
)  # fmt: skip


@click.command()
@click.argument("trace")
@_options
def replay(
    trace: str,
    workers: int,
    rates: tuple[float, ...],
    policy: str | None,
    compare: str,
    orders: str,
    seeds: tuple[int, ...],
    slo_ttft_s: float | None,
    slo_itl_s: float | None,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    opens: bool,
    jobs: int,
    quiet: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Replay a trace on simulated engines, in virtual time, and compare policies.

    TRACE is an included slice (conversation, synthetic, agentic) or a file of requests in
    order of time: JSON lines or CSV with a header, with the columns of Mooncake's, Azure's,
    BurstGPT's or Bailian's traces, or arrival_s, input_tokens, output_tokens. The first lines of
    the output give the meaning of each column, and the columns that are not read;
    docs/simulate.md#traces lists them all.

    The router's own decision core picks, each policy from cold caches. Times are those of the
    profile's cost model, not of this machine.
    """
    from rich.console import Console

    from simulator.study.comparison import compare as compare_runs
    from simulator.study.progress import watch
    from simulator.study.report import to_json, write_csv
    from simulator.traffic.results import Slo
    from simulator.world import world

    slo = Slo(slo_ttft_s, slo_itl_s)
    traffic = traffic_of(trace, given, slo)
    fleets = fleets_of(policy, compare, orders, workers, given)
    console = Console(quiet=quiet)
    try:
        console.print(about(traffic), highlight=False, soft_wrap=True, markup=False)
        with watch(console) as watcher:
            runs = compare_runs(
                traffic,
                fleets,
                world.run,
                watcher,
                rates=rates,
                seeds=tuple(dict.fromkeys(seeds)),
                slo=slo,
                jobs=jobs,
            )
        for comparison in runs:
            _print_comparison(console, comparison)
        if json_file is not None:
            write_json(json_file, to_json(runs))
        if csv_file is not None:
            write_csv(runs, csv_file)
        if html_file is not None or opens:
            _write_page(console, runs, html_file, opens=opens)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _write_page(
    console: "Console", runs: "list[Comparison]", file: Path | None, *, opens: bool
) -> None:
    """Writes the HTML page of the runs; file None: to a temporary file. opens: also shows the page
    in a browser. Raises OSError."""
    import sys
    import tempfile
    import webbrowser

    from simulator.study.page import page

    if file is None:
        with tempfile.NamedTemporaryFile(prefix="kvroute-", suffix=".html", delete=False) as made:
            file = Path(made.name)
    file.write_text(page(runs, _command(sys.argv[1:])), encoding="utf-8")
    console.print(f"written: {file}", highlight=False, soft_wrap=True)
    if opens and not webbrowser.open(file.resolve().as_uri()):
        console.print("no browser can be started here: open the file yourself", highlight=False)


def _command(words: list[str]) -> str:
    """The command line that repeats a run, without --html and --open. words: its arguments."""
    import shlex

    kept, words = ["kvroute"], list(words)
    while words:
        word = words.pop(0)
        if word == "--html":
            del words[:1]
        elif word != "--open" and not word.startswith("--html="):
            kept.append(word)
    return shlex.join(kept)


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
