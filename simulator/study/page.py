"""A comparison as one HTML page, which needs nothing else: no script, no font, no network.

Its table is the one that `kvroute replay` prints. Curves and maps are those of the run with the
first seed, warm-up included; means over the rates are those of the tables. The page is bounded:
curves have series.QUANTILES points, heat maps series.CELLS_MAX columns and a row a worker, and
groups are series.GROUPS_MAX.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from math import isnan

import numpy as np
from rich.text import Text

from simulator.study.report import Comparison, Run, milliseconds, table_of
from simulator.study.series import (
    hit_rates_over_time,
    load_by_worker,
    quantiles,
    time_edges,
    waits_by_group,
)
from simulator.study.svg import Axis, Line, heat_map, lines_picture, ramp
from simulator.traffic.results import Floats

_STUDY = files("simulator.study")


def page(comparisons: Sequence[Comparison], command: str) -> str:
    """The HTML page of comparisons, one for each rate. command: the command line that made them,
    which the page shows."""
    first = comparisons[0]
    title = f"{first.trace}: {len(first.runs)} policies on {first.workers} workers"
    style = _picture_style() + _STUDY.joinpath("page.css").read_text()
    parts = [part for comparison in comparisons for part in _sections(comparison)]
    if len(comparisons) > 1:
        over_rates = f"<h2>All rates</h2>{ttft_over_rates(comparisons)}"
        parts.insert(0, f"<section>{over_rates}</section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>Simulated {escape(first.engine)} engines in virtual"
        " time; every policy starts with cold caches and gets the same requests. Times are those of"
        f" the engines' cost model.</p><p><code>{escape(command)}</code></p></header>"
        f"<main>{''.join(parts)}</main></body></html>\n"
    )


def picture_file(picture: str) -> str:
    """The text of an SVG file with this picture and its style."""
    head, end, rest = picture.partition(">")
    return f"{head}{end}<style>{_picture_style()}</style>{rest}\n"


def _picture_style() -> str:
    return _STUDY.joinpath("picture.css").read_text()


def ttft_over_rates(comparisons: Sequence[Comparison]) -> str:
    """A picture (SVG) of the mean time to first token of each policy at each rate."""
    by_rate = sorted(comparisons, key=lambda comparison: comparison.rate)
    rates = np.array([comparison.rate for comparison in by_rate])
    lines = []
    for number, run in enumerate(by_rate[0].runs):
        means = [comparison.runs[number].numbers.ttft_ms.mean for comparison in by_rate]
        lines.append(Line(run.label, rates, np.array(means), number))
    known = [mean for line in lines for mean in line.y.tolist() if not isnan(mean)]
    low, high = max(0.1, min(known, default=1.0)), max(known, default=1.0)
    return lines_picture(
        "Mean time to first token by rate",
        "; ".join(f"{line.label}: {_times(line.y)}" for line in lines),
        Axis(float(rates[0]), float(rates[-1]), "rate", lambda rate: f"{rate:g}x"),
        Axis(low, max(2 * low, high), "mean time to first token (ms)", _ms, is_log=True),
        lines,
    )


def _times(values_ms: Floats) -> str:
    return ", ".join(milliseconds(value) for value in values_ms.tolist())


def _ms(value: float) -> str:
    return f"{value:,.10g}"


def _sections(comparison: Comparison) -> Iterator[str]:
    yield f"<section><h2>{escape(comparison.trace)} at {comparison.rate:g}x</h2>"
    yield "<h3>Time to first token</h3><p>The share of requests whose first token came within a"
    yield " time. Further left is better.</p>"
    yield _first_tokens(comparison)
    yield "<h3>Hit rate over time</h3><p>Prompt blocks that came from a cache, by the requests'"
    yield " arrival. The wide line is the ceiling: a single cache without end.</p>"
    yield _hit_rates(comparison)
    yield from _maps(comparison)
    yield from _groups(comparison)
    yield "<h3>All numbers</h3><p>Over the requests after the warm-up, as the command prints"
    yield " them.</p>"
    yield _numbers(comparison)
    yield "</section>"


def _numbers(comparison: Comparison) -> str:
    """The table that `kvroute replay` prints, as HTML."""
    table = table_of(comparison, comparison.runs)
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    heads = [Text.from_markup(str(column.header)).plain for column in table.columns]
    return _table(heads, zip(*columns, strict=True), "The numbers of each policy")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], about: str) -> str:
    """An HTML table; the first cell of each row is the row's name. about: label for screen
    readers."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = []
    for name, *cells in rows:
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body.append(f'<tr><th scope="row">{escape(name)}</th>{rest}</tr>')
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(about)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _first_tokens(comparison: Comparison) -> str:
    curves = [quantiles(run.first.ttft_s) * 1e3 for run in comparison.runs]
    known = [curve for curve in curves if len(curve)]
    if not known:
        return "<p>No request got a first token.</p>"
    low = max(0.1, min(float(curve[0]) for curve in known))
    high = max(2 * low, *(float(curve[-1]) for curve in known))
    lines = [
        Line(run.label, curve, np.linspace(0.0, 1.0, len(curve)), number)
        for number, (run, curve) in enumerate(zip(comparison.runs, curves, strict=True))
    ]
    return lines_picture(
        "Time to first token",
        "; ".join(_of_ttft(run) for run in comparison.runs),
        Axis(low, high, "time to first token (ms)", _ms, is_log=True),
        Axis(0.0, 1.0, "share of requests", lambda share: f"{share:.0%}"),
        lines,
    )


def _of_ttft(run: Run) -> str:
    of = run.numbers.ttft_ms
    return f"{run.label}: mean {milliseconds(of.mean)}, p90 {milliseconds(of.p90)}"


def _hit_rates(comparison: Comparison) -> str:
    first = comparison.runs[0].first
    edges_s = time_edges(first.arrival_s)
    middles = (edges_s[:-1] + edges_s[1:]) / 2
    best = hit_rates_over_time(first, comparison.reusable, edges_s)
    lines = [Line(f"ceiling, {comparison.ceiling.blocks:.1%}", middles, best, None)]
    for number, run in enumerate(comparison.runs):
        rates = hit_rates_over_time(run.first, run.first.cached_blocks, edges_s)
        label = f"{run.label}, {run.numbers.block_hit_rate:.1%}"
        lines.append(Line(label, middles, rates, number))
    return lines_picture(
        "Block hit rate over time",
        "; ".join(line.label for line in lines),
        Axis(0.0, float(edges_s[-1]), "arrival (s)", lambda second: f"{second:,g}"),
        Axis(0.0, 1.0, "block hit rate", lambda share: f"{share:.0%}"),
        lines,
    )


def _maps(comparison: Comparison) -> Iterator[str]:
    most = max(int(run.first.in_flight.max(initial=1)) for run in comparison.runs)
    colours = ",".join(f"rgb{ramp(step / 8)}" for step in range(9))
    yield "<h3>Load by worker</h3><p>Requests at each worker over time, a row for each. "
    scale = f"background:linear-gradient(to right,{colours})"
    yield f'0 <span class="scale" style="{scale}"></span> {most} requests.'
    yield " Rows of one colour are an even load.</p>"
    for run in comparison.runs:
        in_flight = run.first.in_flight
        means = in_flight.sum(axis=0) / max(run.first.seconds, 1)
        about = (
            f"requests at a worker: {means.min():.1f} on average at the least loaded,"
            f" {means.max():.1f} at the most loaded, {in_flight.max(initial=0)} at most"
        )
        yield f"<p>{escape(run.label)}: {about}</p>"
        cells = load_by_worker(run.first)
        yield heat_map(f"Load by worker, {run.label}", about, cells, most, run.first.seconds)


def _groups(comparison: Comparison) -> Iterator[str]:
    by = comparison.grouped_by or "request"
    yield f"<h3>Waits by {escape(by)}</h3><p>Time to first token of each group's served"
    yield " requests, and the mean wait in the router before a worker was picked.</p>"
    names = ("policy", "requests", "TTFT p50", "TTFT p90", "in the router", "not served")
    groups = comparison.groups or ["all requests"] * comparison.runs[0].first.request_count
    of_runs = [waits_by_group(run.first, groups) for run in comparison.runs]
    rows = [
        (
            waits.group,
            run.label,
            f"{waits.requests:,}",
            _seconds(waits.p50_s),
            _seconds(waits.p90_s),
            _seconds(waits.in_router_s),
            f"{waits.unserved:,}",
        )
        for of_group in zip(*of_runs, strict=True)
        for run, waits in zip(comparison.runs, of_group, strict=True)
    ]
    yield _table((comparison.grouped_by, *names), rows, f"Waits by {by}")


def _seconds(value: float) -> str:
    return "-" if isnan(value) else milliseconds(1e3 * value)
