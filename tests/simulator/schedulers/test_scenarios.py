"""The stories of the schedulers in tests/simulator/scenarios, by the beginnings of their names.

vLLM, `place STATE NAME ...`:
- running NAME prompt=N output=N computed=N [known=N] [drafts=N]: in the batch, with `computed`
  tokens done of the `known` ones (default: the prompt), and drafted tokens to verify.
- cached NAME prompt=N [text=T]: its full blocks, which nobody uses.

SGLang, `place waiting NAME count=N`: N requests like this one, each with a text of its own.

Chitu, `state`: of each rank the block threshold, blocks in use and who holds them: `p:A/3` holds
three and needs a prefill next, `d:A*/3` a decode, and is in flight. Besides it prints who is owned
by a rank, what stands in the skew scheduler's slots, and which groups are free.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.engines.content import ChainContent
from simulator.engines.scheduler import Sequence, Submission
from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.chitu.task import ChituConfig, Task
from simulator.schedulers.sglang.config import SglangConfig
from simulator.schedulers.sglang.scheduler import SglangScheduler
from simulator.schedulers.vllm.config import VllmConfig, VllmSequence
from simulator.schedulers.vllm.scheduler import VllmScheduler
from tests.simulator.scenario import FOLDER, EngineUnderTest, Options, play


def place_at_vllm(
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


def place_at_sglang(
    scheduler: SglangScheduler, state: str, submission: Submission, options: Options
) -> None:
    assert state == "waiting", state
    for i in range(int(options["count"])):
        name = f"{submission.request_id}-{i}"
        scheduler.add(replace(submission, request_id=name, content=ChainContent([], name)), 0.0)


def state_of_chitu(scheduler: ChituScheduler) -> str:
    lines = []
    tasks = {task.sequence.request_id: task for task in scheduler.pool.values()}
    for rank in scheduler.ranks:
        holders = " ".join(f"{_name(task)}/{len(task.sequence.blocks)}" for task in rank.holders)
        lines.append(
            f"rank {rank.dp_rank}: threshold {rank.block_threshold}, "
            f"{rank.pool.in_use_count} of {rank.pool.block_count} blocks in use, "
            f"held by {holders or '-'}"
        )
        owned = [name for name, task in tasks.items() if task.owner == rank.dp_rank]
        if owned:
            lines.append(f"  owns {' '.join(owned)}")
    if isinstance(scheduler, SkewScheduler):
        for number, slot in enumerate(scheduler.slots):
            lines.append(f"slot {number}: {' '.join(map(_name, slot)) or '-'}")
    free = " ".join(map(str, scheduler.free_groups))
    return "\n".join([*lines, f"free groups: {free or '-'}"])


def _name(task: Task) -> str:
    flight = "*" if task.in_flight else ""
    return f"{task.type.value[0]}:{task.sequence.request_id}{flight}"


ENGINES = {
    "vllm": EngineUnderTest(VllmConfig, VllmScheduler, place_at_vllm),
    "sglang": EngineUnderTest(SglangConfig, SglangScheduler, place_at_sglang),
    "chitu_skew": EngineUnderTest(ChituConfig, SkewScheduler, state=state_of_chitu),
    "chitu_dp": EngineUnderTest(ChituConfig, DpFifoScheduler, state=state_of_chitu),
    "chitu": EngineUnderTest(ChituConfig, ChituScheduler, state=state_of_chitu),
}
"""Beginning of a file's name -> whose story it is; the first that fits."""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    play(path, next(of for name, of in ENGINES.items() if path.stem.startswith(name)))
