"""How runs are seen while they go on."""

import io

import pytest
from rich.console import Console

from simulator.study.progress import Unwatched, watch
from simulator.traffic.results import Aggregates, Distribution, RunProgress

_SOME = Distribution(300.0, 200.0, 500.0, 900.0)
NUMBERS = Aggregates(
    policy="p",
    order="fcfs",
    requests=40,
    served=40,
    failed=0,
    shed=0,
    block_hit_rate=0.25,
    token_hit_rate=0.25,
    ttft_ms=_SOME,
    wait_ms=_SOME,
    queue_ms=_SOME,
    itl_ms=_SOME,
    e2e_ms=_SOME,
    load_cv=0.1,
    goodput_rps=1.0,
    goodput_share=0.5,
    queued=3,
    queue_timeouts=2,
    queue_full=1,
    preemptions=0,
    copies=0,
    wall_s=1.5,
)


@pytest.mark.parametrize("terminal", [True, False])
def test_runs_are_seen_while_they_go_on(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    numbers = NUMBERS
    with watch(console) as watcher:
        on_progress = watcher.begin("p")
        for done in range(0, 41, 5):
            on_progress(RunProgress(40, done, 0, 3, 0.125))
        watcher.end("p", numbers)
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
    quiet = Unwatched()
    quiet.begin("p")(RunProgress(1, 1, 0, 0, 0.0))
    quiet.end("p", NUMBERS)
    assert capsys.readouterr() == ("", "")
