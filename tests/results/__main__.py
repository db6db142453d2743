"""Makes simulator/RESULTS.md, every number of it, and the pictures beside it.

python -m tests.results [--traces FOLDER] [--jobs N] [--only SECTION ...] [--draft] [--again]

Finished runs are kept (tests/results/kept.py): an interrupted call goes on where it stopped.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType

from rich.console import Console

from tests.results import bar, claims, dynamo, exact_events, grid, hot_prefixes, low_reuse, presets
from tests.results.cases import run_all
from tests.results.fleets import BLOCK_COUNT, BLOCK_SIZE, PROFILE, WORKERS, Traces
from tests.results.kept import Kept

STATION = Path(__file__).parents[2] / "simulator"
SECTIONS: dict[str, tuple[str, ModuleType]] = {
    "grid": ("Policies, traces, rates", grid),
    "presets": ("Presets", presets),
    "bar": ("The bar: traffic on which a default could lose", bar),
    "dynamo": ("Beside Dynamo's simulator", dynamo),
    "low-reuse": ("Where nothing can be reused", low_reuse),
    "exact-events": ("What exact events are worth", exact_events),
    "hot-prefixes": ("Mooncake's claims, as a scenario", hot_prefixes),
    "claims": ("Balancing and reuse, as scenarios", claims),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.results")
    parser.add_argument("--traces", type=Path, help="folder with the whole traces; else slices")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--draft", action="store_true", help="print the page, write nothing")
    parser.add_argument("--again", action="store_true", help="forget the runs that are kept")
    asked = parser.parse_args(arguments)
    console = Console()
    traces = Traces.of(asked.traces)
    sections = {name: SECTIONS[name] for name in asked.only}
    cases = [case for _, module in sections.values() for case in module.cases(traces)]
    kept = Kept()
    if asked.again:
        kept.forget()
    results = run_all(cases, asked.jobs, console, kept)
    parts = [_opening(traces)]
    for title, module in sections.values():
        parts += [f"## {title}\n", module.__doc__.strip() + "\n", module.page(traces, results)]
    runs = {id(done.result): done.result.wall_s for done in results.values()}
    minutes = sum(runs.values()) / 60
    parts.append(f"{len(runs)} runs, which took {minutes:.0f} minutes in sum.")
    page = "\n".join(parts)
    if asked.draft:
        sys.stdout.write(page + "\n")
        return
    if "grid" in sections:
        grid.draw(results, STATION / "results")
    (STATION / "RESULTS.md").write_text(page + "\n", encoding="utf-8")
    console.print(f"written: {STATION / 'RESULTS.md'}")


def _opening(traces: Traces) -> str:
    which = "the whole traces" if traces.whole else "the slices that ship, not the whole traces"
    return f"""# Results

Every number here is made by one command, `make results TRACES=folder`, with {which}
(data/README.md says where they come from). Times are virtual: what policies do to one another is
what counts, not what the milliseconds would be on your GPUs.

Unless a section says otherwise: {WORKERS} engines with vLLM's scheduler and the prices of the
profile `{PROFILE}` (the engine that Dynamo's own simulator has), {BLOCK_COUNT:,} blocks of
{BLOCK_SIZE} tokens each, one router, events 5 ms behind, policies with their defaults, cold caches,
seed 0. The weights of `ttft` were chosen on these three traces; those of evictions
and room on half of the agents' sessions. No trace was held out.
"""


if __name__ == "__main__":
    main(sys.argv[1:])
