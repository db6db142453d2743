"""The stories of vLLM's scheduler in tests/simulator/scenarios/vllm_*.txt."""

from pathlib import Path

import pytest

from simulator.scheduler import SchedulerConfig
from simulator.schedulers.vllm import VllmScheduler
from tests.simulator.scenario import EngineUnderTest, play, scenarios

VLLM = EngineUnderTest(SchedulerConfig, VllmScheduler)


@pytest.mark.parametrize("path", scenarios("vllm_*.txt"), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    play(path, VLLM)
