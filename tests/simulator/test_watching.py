"""How runs are seen while they go on."""

import io

import pytest
from rich.console import Console

from simulator.study.progress import Watcher, watch
from simulator.traffic.results import RunProgress, aggregate
from tests.simulator.made_results import result

NUMBERS = aggregate(result("p"))


@pytest.mark.parametrize("terminal", [True, False])
def test_runs_are_seen_while_they_go_on(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with watch(console) as watcher:
        on_progress = watcher.begin("p")
        watcher.begin("not yet")
        for done in range(0, 41, 5):
            on_progress(RunProgress(40, done, 0, 3, 0.125))
        watcher.end("p", NUMBERS)
    shown = file.getvalue()
    if terminal:
        assert "TTFT mean" in shown
        return
    lines = shown.splitlines()
    assert lines[0] == "p: 10 of 40 requests, 0 failed, 3 in flight, hit rate 12.5%"
    assert len(lines) == 5
    assert lines[-1].startswith("p: done in 1.5 s, hit rate 25.0%, TTFT mean ")


def test_progress_of_nothing_and_progress_that_nobody_watches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = io.StringIO()
    with watch(Console(file=shown)) as watcher:
        watcher.begin("p")(RunProgress(0, 0, 0, 0, 0.0))
    assert shown.getvalue() == "", "where there is no terminal, a line each second, and the end"
    quiet = Watcher()
    quiet.begin("p")(RunProgress(1, 1, 0, 0, 0.0))
    quiet.end("p", NUMBERS)
    assert capsys.readouterr() == ("", "")
