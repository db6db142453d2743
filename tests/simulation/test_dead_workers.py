"""How soon nobody is sent to a worker that is dead, in virtual time: the router's own core, two
replicas, relays that beat, clients that report what they meet."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from typing_extensions import override

from simulator.engines.scheduler import SchedulerConfig
from simulator.traffic.results import Outcome
from simulator.traffic.trace import Trace, TraceRequest
from simulator.world.options import Failure, RunOptions
from simulator.world.run_record import Happened, RunRecord
from simulator.world.world import World

LATE_S = 0.5
"""From the first request that a dead worker refuses until none is sent there."""
RATE = 60.0
AT_S, DOWN_S, END_S = 4.0, 8.0, 16.0
ENGINES = SchedulerConfig(block_count=4096, block_size=64, max_num_seqs=64, joined_steps_max=10_000)


class PickRecord(RunRecord):
    """Remembers when each worker was picked."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.picks: dict[int, list[float]] = defaultdict(list)

    @override
    def note(self, what: Happened, now_s: float, first: int = 0, second: int = 0) -> None:
        if what is Happened.PICKED:
            self.picks[second].append(now_s)
        super().note(what, now_s, first, second)


def traffic(seed: int) -> Trace:
    """Short prompts at a steady rate; half of them begin as others do."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / RATE, int(RATE * END_S)))
    return Trace(
        "steady",
        [
            TraceRequest(
                arrival_s=float(arrival_s),
                prompt_tokens=1024,
                output_tokens=8,
                hash_ids=np.array([rng.choice([rng.integers(20), 10**6 + i]), 1000 + i], np.uint64),
            )
            for i, arrival_s in enumerate(arrivals)
        ],
    )


def played(seed: int, dead: tuple[int, ...], **options: object) -> tuple[PickRecord, World]:
    """A run in which these workers die at once and come back."""
    failures = tuple(Failure(AT_S, worker, DOWN_S) for worker in dead)
    whole = RunOptions(workers=8, replicas=2, seed=seed, scheduler=ENGINES, failures=failures)
    world = World(replace(whole, **options), traffic(seed))  # type: ignore[arg-type]
    record = PickRecord(world.record.request_count, 8, ENGINES.block_size)
    for part in (world, world.clients, world.fleet):
        part.record = part._record = record  # type: ignore[attr-defined]  # where each keeps it
    world.clients._columns = record.columns
    world.run()
    return record, world


DEAD = {"one of eight": (3,), "five of eight": (0, 1, 3, 6, 7)}


@pytest.mark.parametrize("inflight", [True, False], ids=["verdicts travel", "each for itself"])
@pytest.mark.parametrize("name", DEAD)
def test_a_dead_worker_gets_nothing_half_a_second_after_its_first_refusal(
    name: str, inflight: bool
) -> None:
    dead = DEAD[name]
    record, _ = played(1, dead, inflight=inflight)
    for worker in dead:
        there = [when_s for when_s in record.picks[worker] if AT_S <= when_s < AT_S + DOWN_S]
        assert there, "nothing was sent there, so nothing was refused"
        assert [when_s for when_s in there if when_s > there[0] + LATE_S] == []


@pytest.mark.parametrize("name", DEAD)
def test_nothing_is_lost_and_the_dead_are_used_again_when_they_are_back(name: str) -> None:
    # A request may meet each dead worker once before anything is known of any of them.
    record, _ = played(2, DEAD[name], resends_max=len(DEAD[name]) + 1)
    assert set(record.columns.outcome.tolist()) == {int(Outcome.SERVED)}
    for worker in DEAD[name]:
        assert record.picks[worker][-1] > AT_S + DOWN_S
