"""A run's own bookkeeping, where a process has ended meanwhile."""

import sys
from pathlib import Path

import pytest

from tests.chaos.run import cores, cpu_of
from tests.chaos.stage import Child, Options, Stage


async def test_a_process_that_has_ended_is_left_out_of_the_cpu_times(tmp_path: Path) -> None:
    nats = Child("nats", "nats", [sys.executable, "-c", ""], tmp_path / "nats.log")
    await nats.start(answers=False)
    assert nats.process is not None
    await nats.process.wait()
    found = cpu_of(Stage(Options(seed=1), tmp_path, nats, 0))
    assert [kind for kind, _ in found] == ["proxies"]


def test_cores_are_of_processes_that_were_there_all_the_time() -> None:
    before = {("relay", 1): 1.0, ("relay", 2): 5.0, ("router", 3): 2.0}
    after = {("relay", 1): 3.0, ("relay", 4): 9.0, ("router", 3): 7.0}
    assert cores(before, after, 10.0) == {
        "cores of relay": pytest.approx(0.2),
        "cores of router": pytest.approx(0.5),
    }
