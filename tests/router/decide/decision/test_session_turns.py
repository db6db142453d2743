"""Sessions that begin go in turn over ranks that are alike, and go on at their ranks."""

from typing import Any

import pytest

from indexer.kernel import NativeIndex
from indexer.reference import ReferenceIndex
from router.config.settings.routing_settings import AffinitySettings
from tests.stage.fleet import Fleet, prompt

RANKS = 4
STORY = """\
begin a           rank 0
begin b           rank 1
begin c           rank 2
begin d           rank 3
begin e           rank 0
begin f           rank 1
end a b d f       ranks 1 0 1 0
begin g           rank 3
begin h           rank 1
begin i           rank 2
go on a           rank 0
go on b           rank 1
go on c           rank 3: rank 2 is full
end g h i         ranks 2 1 1 1
go on c           rank 3: c has gone on there
"""
"""Each rank has two slots. `end` shows the requests that are left on each rank."""


def ranks(fleet: Fleet, **about: Any) -> None:
    """One engine with data-parallel ranks."""
    for rank in range(RANKS):
        fleet.add("engine", rank, multi_rank=True, **about)


class Sessions:
    """Requests of sessions, by names, under least-loaded and hard affinity."""

    def __init__(self) -> None:
        self.fleet = Fleet(policy="least-loaded", affinity=AffinitySettings(hard=True))
        ranks(self.fleet, total_slots=2)
        self.last: dict[str, str] = {}
        """Session -> the reservation of its last request."""

    def goes(self, session: str) -> int:
        pick = self.fleet.route(prompt(40), session_id=session)
        self.last[session] = pick.reservation.id
        return pick.reservation.worker.dp_rank

    def end(self, sessions: str) -> list[int]:
        for session in sessions.split():
            self.fleet.report(self.last[session], "finished")
        loads = {key.dp_rank: load[0] for key, load in self.fleet.loads().items()}
        return [loads.get(rank, 0) for rank in range(RANKS)]


def test_sessions_are_assigned_in_turn_kept_and_capped_by_rank() -> None:
    stage, played = Sessions(), []
    for line in STORY.splitlines():
        told = line[:18].strip()
        if told.startswith("end"):
            came = "ranks " + " ".join(map(str, stage.end(told.removeprefix("end "))))
        else:
            came = f"rank {stage.goes(told[-1])}"
        _, colon, why = line.partition(":")
        played.append(f"{told:18}{came}{colon}{why}")
    assert "\n".join(played) + "\n" == STORY


@pytest.mark.parametrize("index", [NativeIndex, ReferenceIndex])
@pytest.mark.parametrize("policy", ["dynamo-adaptive", "dynamo-blocks", "ttft"])
def test_sessions_that_begin_on_an_idle_fleet_go_in_turn(
    policy: str, index: type[NativeIndex | ReferenceIndex]
) -> None:
    fleet = Fleet(policy=policy, index=index())
    ranks(fleet)
    came = []
    for number in range(2 * RANKS):
        pick = fleet.route(prompt(40, 1000 * number), session_id=f"s{number}")
        came.append(pick.reservation.worker.dp_rank)
        fleet.report(pick.reservation, "finished")
        fleet.turn(30.0)  # nothing is under way or remembered as work
    assert came == [0, 1, 2, 3, 0, 1, 2, 3]
