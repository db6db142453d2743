"""The stories of Chitu's schedulers in tests/simulator/scenarios/chitu_*.txt.

`state` prints of each rank the block threshold, blocks in use and who holds them: `p:A/3` holds
three and needs a prefill next, `d:A*/3` a decode, and is in flight. Besides it prints who is owned
by a rank, what stands in the skew scheduler's slots, and which groups are free.
"""

from pathlib import Path

import pytest

from simulator.schedulers.chitu.dp import DpFifoScheduler
from simulator.schedulers.chitu.scheduler import ChituScheduler
from simulator.schedulers.chitu.skew import SkewScheduler
from simulator.schedulers.chitu.task import ChituConfig, Task
from tests.simulator.scenario import EngineUnderTest, play, scenarios

KINDS = {
    "chitu_skew": SkewScheduler,
    "chitu_dp": DpFifoScheduler,
    "chitu": ChituScheduler,
}
"""Beginning of a file's name -> whose story it is; the first that fits."""


def state(scheduler: ChituScheduler) -> str:
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


@pytest.mark.parametrize("path", scenarios("chitu_*.txt"), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    kind = next(kind for name, kind in KINDS.items() if path.stem.startswith(name))
    play(path, EngineUnderTest(ChituConfig, kind, state=state))
