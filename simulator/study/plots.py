"""Pictures of a comparison, as PNG. Needs matplotlib, which `kvroute[plots]` installs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.study.report import Comparison
from simulator.study.series import hit_rates_over_time, time_edges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _HEIGHT_IN, _DPI = 8.0, 4.5, 120


class PlotsMissing(RuntimeError):
    """matplotlib is not installed."""


def check_plots() -> None:
    """Raises PlotsMissing, with the command that installs matplotlib; call before the runs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotsMissing(
            "plots need matplotlib, which is not installed: pip install 'kvroute[plots]'"
        ) from error


def write_plots(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Draws into `folder`, which is created; returns the files. Raises PlotsMissing and OSError.

    ttft_over_rate.png, and for each rate hit_rate_over_time_1x.png and load_per_worker_1x.png.
    """
    check_plots()
    folder.mkdir(parents=True, exist_ok=True)
    written = [_save(_ttft_over_rate(comparisons), folder / "ttft_over_rate.png")]
    for comparison in comparisons:
        rate = f"{comparison.rate:g}x"
        written += [
            _save(_hit_rate_over_time(comparison), folder / f"hit_rate_over_time_{rate}.png"),
            _save(_load_per_worker(comparison), folder / f"load_per_worker_{rate}.png"),
        ]
    return written


def _ttft_over_rate(comparisons: Sequence[Comparison]) -> "Figure":
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure, axes = _figure()
    by_rate = sorted(comparisons, key=lambda comparison: comparison.rate)
    rates = [comparison.rate for comparison in by_rate]
    for i, run in enumerate(by_rate[0].runs):
        numbers = [comparison.runs[i].numbers.ttft_ms for comparison in by_rate]
        means, p90s = [ttft.mean for ttft in numbers], [ttft.p90 for ttft in numbers]
        (line,) = axes.plot(rates, means, marker="o", label=run.label)
        axes.plot(rates, p90s, ":", marker=".", color=line.get_color())
    axes.set(xlabel="rate (times the trace's clock)", ylabel="time to first token (ms)")
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_title(f"{_about(by_rate[0])}\ntime to first token: mean (solid) and p90 (dotted)")
    _legend_below(figure, axes)
    return figure


def _hit_rate_over_time(comparison: Comparison) -> "Figure":
    figure, axes = _figure()
    first = comparison.runs[0].first
    edges_s = time_edges(first.arrival_s)
    middles = (edges_s[:-1] + edges_s[1:]) / 2
    best = hit_rates_over_time(first, comparison.reusable, edges_s)
    label = f"ceiling ({comparison.ceiling.blocks:.1%})"
    # Under the lines, and wider, so that it shows where a policy reaches it.
    axes.plot(middles, 100 * best, c="lightgray", lw=5, label=label)
    for run in comparison.runs:
        rates = hit_rates_over_time(run.first, run.first.cached_blocks, edges_s)
        label = f"{run.label} ({run.numbers.block_hit_rate:.1%})"
        axes.plot(middles, 100 * rates, label=label)
    axes.set(xlabel="arrival (s)", ylabel="block hit rate (%)", ylim=(0, 100))
    axes.set_title(f"{_about(comparison)} at {comparison.rate:g}x\nprompt blocks from a cache")
    _legend_below(figure, axes)
    return figure


def _load_per_worker(comparison: Comparison) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    count = len(comparison.runs)
    figure = Figure(figsize=(_WIDTH_IN, 2.0 * count + 1), dpi=_DPI, layout="constrained")
    rows = figure.subplots(count, 1, sharex=True, sharey=True, squeeze=False)
    figure.suptitle(f"{_about(comparison)} at {comparison.rate:g}x\nrequests at each worker")
    most = max(run.first.in_flight.max(initial=1) for run in comparison.runs)
    for run, axes in zip(comparison.runs, rows[:, 0], strict=True):
        seconds, workers = run.first.in_flight.shape
        axes.imshow(
            run.first.in_flight.T,
            aspect="auto",
            extent=(0.0, max(seconds, 1), workers - 0.5, -0.5),
            interpolation="nearest",
            vmin=0,
            vmax=most,
        )
        axes.set_title(run.label, fontsize="medium")
        axes.set_ylabel("worker")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    rows[-1, 0].set_xlabel("time (s)")
    bar = figure.colorbar(rows[0, 0].images[0], ax=rows[:, 0].tolist(), label="requests")
    bar.locator = MaxNLocator(integer=True)
    return figure


def _figure() -> "tuple[Figure, Axes]":
    # Without pyplot there is no window, no global state, and no backend to choose.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, layout="constrained")
    return figure, figure.add_subplot()


def _legend_below(figure: "Figure", axes: "Axes") -> None:
    """Draws the legend below the axes, where it hides no line."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _save(figure: "Figure", path: Path) -> Path:
    figure.savefig(path)
    return path


def _about(comparison: Comparison) -> str:
    return f"{comparison.trace}, {comparison.workers} workers ({comparison.engine})"
