"""How soon nobody is sent to a worker that is dead, in virtual time: the router's own core, two
replicas, relays that beat, clients that report what they meet."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from simulator.engines.scheduler import SchedulerConfig
from simulator.traffic.results import Outcome, RunResult
from simulator.traffic.trace import Trace, TraceRequest
from simulator.world.options import Failure, RunOptions
from simulator.world.run_record import Happened
from simulator.world.world import World

LATE_S = 0.5
"""From the first request that a dead worker refuses until none is sent there."""
RATE = 60.0
AT_S, DOWN_S, END_S = 4.0, 8.0, 16.0
ENGINES = SchedulerConfig(block_count=4096, block_size=64, max_num_seqs=64, joined_steps_max=10_000)


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


def played(
    seed: int, dead: tuple[int, ...], **options: object
) -> tuple[dict[int, list[float]], RunResult]:
    """When each worker was picked, in a run in which these workers die at once and come back."""
    failures = tuple(Failure(AT_S, worker, DOWN_S) for worker in dead)
    whole = RunOptions(workers=8, replicas=2, seed=seed, scheduler=ENGINES, failures=failures)
    world = World(replace(whole, **options), traffic(seed))  # type: ignore[arg-type]
    picks: dict[int, list[float]] = defaultdict(list)
    note = world.record.note

    def noting(what: Happened, now_s: float, first: int = 0, second: int = 0) -> None:
        if what is Happened.PICKED:
            picks[second].append(now_s)
        note(what, now_s, first, second)

    world.record.note = noting  # type: ignore[method-assign]
    return picks, world.run()


DEAD = {"one of eight": (3,), "five of eight": (0, 1, 3, 6, 7)}


@pytest.mark.parametrize("inflight", [True, False], ids=["verdicts travel", "each for itself"])
@pytest.mark.parametrize("name", DEAD)
def test_a_dead_worker_gets_nothing_half_a_second_after_its_first_refusal(
    name: str, inflight: bool
) -> None:
    dead = DEAD[name]
    picks, _ = played(1, dead, inflight=inflight)
    for worker in dead:
        there = [when_s for when_s in picks[worker] if AT_S <= when_s < AT_S + DOWN_S]
        assert there, "nothing was sent there, so nothing was refused"
        assert [when_s for when_s in there if when_s > there[0] + LATE_S] == []


@pytest.mark.parametrize("name", DEAD)
def test_nothing_is_lost_and_the_dead_are_used_again_when_they_are_back(name: str) -> None:
    # A request may meet each dead worker once before anything is known of any of them.
    picks, result = played(2, DEAD[name], resends_max=len(DEAD[name]) + 1)
    assert set(result.outcome.tolist()) == {int(Outcome.SERVED)}
    for worker in DEAD[name]:
        assert picks[worker][-1] > AT_S + DOWN_S
