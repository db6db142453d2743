"""The progress of runs: a table on a terminal, else lines."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from typing_extensions import override

from simulator.study.report import milliseconds
from simulator.traffic.results import Aggregates, OnProgress, RunProgress

_REDRAWS_PER_S = 4


class Watcher:
    """Is called when a run begins, progresses and ends; shows nothing, for --quiet."""

    def begin(self, label: str) -> OnProgress:
        return lambda now: None

    def end(self, label: str, numbers: Aggregates) -> None:
        pass


@contextmanager
def watch(console: Console) -> Iterator[Watcher]:
    """Shows the progress of runs: a live table on a terminal, else a line for each quarter; nothing
    on a quiet console."""
    if console.quiet:
        yield Watcher()
        return
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=_REDRAWS_PER_S, transient=True) as live:
        yield _LiveTable(live)


class _LiveTable(Watcher):
    def __init__(self, live: Live) -> None:
        self._live = live
        self._now: dict[str, RunProgress | None] = {}
        self._ended: dict[str, Aggregates] = {}

    @override
    def begin(self, label: str) -> OnProgress:
        self._now[label] = None

        def show(now: RunProgress) -> None:
            self._now[label] = now
            self._live.update(self._table())

        return show

    @override
    def end(self, label: str, numbers: Aggregates) -> None:
        self._ended[label] = numbers
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        shown = Table()
        for name in ("run", "requests", "in flight", "failed", "hit rate", "TTFT mean"):
            shown.add_column(name, justify="left" if name == "run" else "right")
        for label, now in self._now.items():
            done = self._ended.get(label)
            if done is not None:
                hit_rate, ttft = f"{done.block_hit_rate:.1%}", milliseconds(done.ttft_ms.mean)
                shown.add_row(
                    label, f"{done.requests}", "", f"{done.failed + done.shed}", hit_rate, ttft
                )
            elif now is not None:
                shown.add_row(
                    label,
                    f"{now.done} of {now.total}",
                    f"{now.in_flight}",
                    f"{now.failed}",
                    f"{now.block_hit_rate:.1%}",
                    "",
                )
        return shown


class _Lines(Watcher):
    def __init__(self, console: Console) -> None:
        self._console = console

    @override
    def begin(self, label: str) -> OnProgress:
        quarters = 0

        def show(now: RunProgress) -> None:
            nonlocal quarters
            if now.total and now.done * 4 // now.total > quarters:
                quarters = now.done * 4 // now.total
                self._print(
                    f"{label}: {now.done} of {now.total} requests, {now.failed} failed, "
                    f"{now.in_flight} in flight, hit rate {now.block_hit_rate:.1%}"
                )

        return show

    @override
    def end(self, label: str, numbers: Aggregates) -> None:
        self._print(
            f"{label}: done in {numbers.wall_s:.1f} s, hit rate {numbers.block_hit_rate:.1%}, "
            f"TTFT mean {milliseconds(numbers.ttft_ms.mean)}"
        )

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
