"""The stories of SGLang's scheduler in tests/simulator/scenarios/sglang_*.txt.

place waiting NAME count=N: N requests like this one, each with a text of its own.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.engines.content import ChainContent
from simulator.engines.scheduler import Submission
from simulator.schedulers.sglang.config import SglangConfig
from simulator.schedulers.sglang.scheduler import SglangScheduler
from tests.simulator.scenario import EngineUnderTest, Options, play, scenarios


def place(scheduler: SglangScheduler, state: str, submission: Submission, options: Options) -> None:
    if state != "waiting":
        raise ValueError(f"no such state: {state}")
    for i in range(int(options["count"])):
        name = f"{submission.request_id}-{i}"
        scheduler.add(replace(submission, request_id=name, content=ChainContent([], name)), 0.0)


SGLANG = EngineUnderTest(SglangConfig, SglangScheduler, place)


@pytest.mark.parametrize("path", scenarios("sglang_*.txt"), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    play(path, SGLANG)
