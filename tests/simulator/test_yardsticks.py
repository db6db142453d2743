"""Policies of the simulator's own, and functions of anybody's, in runs and as shadows."""

from collections import Counter

import pytest

from router.config.keys import ConfigError
from router.decide.policies.candidates import Candidates
from router.fleet.table import Column
from simulator.world.options import RunOptions
from tests.stage.fleet import Fleet, prompt

RANDOM = "simulator.world.yardsticks:random"


def fewest_tokens(rows: Candidates) -> Column:
    """A policy of one's own."""
    return rows.new_tokens


@pytest.mark.parametrize("session_id", ["", "s"])
def test_random_spreads_evenly_whatever_workers_do_and_hold(session_id: str) -> None:
    fleet = Fleet(policy=RANDOM)
    for i in range(8):
        fleet.say(fleet.add(f"w{i}", total_blocks=None, total_slots=None), running=i)
    fleet.cache(next(iter(fleet.relays)), prompt(64))
    picks: Counter[str] = Counter()
    for i in range(1600):
        request = fleet.request(prompt(64), session_id=session_id and f"s{i}")
        decision = fleet.core.decide(request, fleet.now_s)
        picks[decision.rows.workers[decision.order[0]].worker_id] += 1
    assert len(picks) == 8
    assert all(count == pytest.approx(200, abs=66) for count in picks.values()), "5 deviations"


def test_a_run_goes_by_any_function_without_a_configuration() -> None:
    own = f"{__name__}:fewest_tokens"
    known = RunOptions(policy=RANDOM, shadows=(own,)).policies()
    assert {RANDOM, own, "ttft"} <= known.keys()
    with pytest.raises(ConfigError, match="has no function 'none'"):
        RunOptions(policy="simulator.world.yardsticks:none")
