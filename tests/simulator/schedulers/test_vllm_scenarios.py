"""The stories of vLLM's scheduler in tests/simulator/scenarios/vllm_*.txt.

States to begin with (`place STATE NAME ...`):
- running NAME prompt=N output=N computed=N [known=N] [drafts=N]: in the batch, with `computed`
  tokens done of the `known` ones (default: the prompt), and drafted tokens to verify.
- cached NAME prompt=N [text=T]: its full blocks, which nobody uses.
"""

from pathlib import Path
from typing import Any

import pytest

from simulator.engines.scheduler import Sequence, Submission
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence
from simulator.schedulers.vllm.scheduler import VllmScheduler
from tests.simulator.scenario import EngineUnderTest, Options, play, scenarios


def place(
    scheduler: VllmScheduler, state: str, submission: Submission, options: Options
) -> Sequence | None:
    """Puts a request into the batch, or its blocks into the cache, as its past would have."""
    told: dict[str, Any] = {key: int(value) for key, value in options.items()}
    size, pool = scheduler.config.block_size, scheduler.pool
    computed = told.get("computed", submission.prompt_tokens)
    fresh = pool.take((), -(-computed // size))
    assert fresh is not None, "no room for the state"
    full = computed // size
    if full:
        pool.store(fresh[:full], submission.content.stored(0, full))
    pool.take_events()
    if state == "cached":
        pool.release(fresh)
        return None
    assert state == "running", state
    sequence = VllmSequence(submission, told.get("known", submission.prompt_tokens), 0.0)
    sequence.computed_tokens = computed
    sequence.draft_tokens = told.get("drafts", 0)
    sequence.blocks = fresh
    sequence.stored_count = full
    sequence.cached_tokens = 0
    scheduler._running.append(sequence)
    return sequence


VLLM = EngineUnderTest(VllmConfig, VllmScheduler, place)


@pytest.mark.parametrize("path", scenarios("vllm_*.txt"), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    play(path, VLLM)
