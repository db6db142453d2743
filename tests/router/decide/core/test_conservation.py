"""Reserved load is the sum over open reservations, after any story."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from indexer.identity import WorkerKey
from router.decide.core.progress import ProgressResult, ProgressState, Repeated
from router.decide.policies import POLICIES
from router.request.prompt import Prompt
from router.request.refusal import Refusal
from tests.router.decide.core.outcomes import report
from tests.stage.fleet import Fleet, prompt

PROMPTS = [prompt(8), prompt(40), prompt(64), prompt(100), prompt(48, first=500), prompt(70, 500)]


class Conservation(RuleBasedStateMachine):
    """Whatever happens, the load we count is the sum over the reservations that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(lease_s=20.0, reservations_max=11)
        self.made: list[Any] = []
        self.asked = Counter[str]()

    @initialize()
    def some_workers(self) -> None:
        for i in range(3):
            self.fleet.add(f"w{i}", total_slots=4, total_blocks=60)

    @rule(
        asked=st.sampled_from(PROMPTS),
        request_id=st.none() | st.sampled_from("abc"),
        policy=st.sampled_from(sorted(POLICIES)),
        unwanted=st.frozensets(st.sampled_from(["w0", "w1"]), max_size=1),
    )
    def route(
        self, asked: Prompt, request_id: str | None, policy: str, unwanted: frozenset[str]
    ) -> None:
        named = {"request_id": request_id} if request_id else {}
        request = self.fleet.request(asked, policy=policy, excluded_workers=unwanted, **named)
        before = self.fleet.loads()
        try:
            outcome = self.fleet.core.route(request, self.fleet.now_s)
        except Refusal as refusal:
            self.asked[refusal.reason] += 1
            assert self.fleet.loads() == before
            return
        if isinstance(outcome, Repeated):
            self.asked["repeated"] += 1
            assert self.fleet.loads() == before
            return
        self.asked["picked"] += 1
        assert outcome.reservation.worker.worker_id not in unwanted
        self.made.append(outcome.reservation)

    @rule(i=st.integers(0, 30), state=st.sampled_from(ProgressState), output=st.integers(0, 9))
    def report(self, i: int, state: ProgressState, output: int) -> None:
        known = [one for one in self.made if one.ended is None] or self.made
        if known:
            report(self.fleet, known[i % len(known)].id, state, output_tokens=output)

    @rule(i=st.integers(0, 30), state=st.sampled_from(ProgressState))
    def report_late(self, i: int, state: ProgressState) -> None:
        if i < len(self.made) and (late := self.made[i]).ended is not None:
            assert report(self.fleet, late.id, state) is not ProgressResult.APPLIED

    @rule(worker=st.integers(0, 2), running=st.integers(0, 5), used=st.integers(0, 50))
    def sample(self, worker: int, running: int, used: int) -> None:
        key = WorkerKey(f"w{worker}", 0)
        if key in self.fleet.view.sources:
            self.fleet.say(key, running=running, used_blocks=float(used))

    @rule(seconds=st.sampled_from([0.25, 1, 5, 12]), silent=st.sampled_from(["", "w0", "w1"]))
    def time_goes_by(self, seconds: float, silent: str) -> None:
        self.fleet.turn(seconds, silent=[WorkerKey(silent, 0)])

    @rule(worker=st.just("w2"))
    def remove_and_come_back(self, worker: str) -> None:
        self.fleet.core.remove(worker, 0.01, self.fleet.now_s)
        self.fleet.now_s += 1
        self.fleet.tick()
        self.fleet.add(worker, total_slots=4, total_blocks=60)

    @invariant()
    def ours_is_the_sum_over_open_reservations(self) -> None:
        expected: dict[WorkerKey, tuple[int, int, int]] = {}
        still_open = [one for one in self.made if one.ended is None]
        for key in {one.worker for one in still_open}:
            here = [one for one in still_open if one.worker == key]
            blocks = {block for one in here for block in one.prefixes.tolist()}
            expected[key] = (
                len(here),
                len(blocks) + sum(one.own_blocks for one in here),
                sum(one.new_tokens for one in here if not one.prefill_done),
            )
        assert self.fleet.loads() == expected
        assert len(self.fleet.core.reservations) == len(still_open)

    @invariant()
    def every_reservation_that_was_made_is_open_or_ended_once(self) -> None:
        still_open = sum(one.ended is None for one in self.made)
        assert len(self.made) == still_open + self.fleet.core.endings.total()
        assert self.asked["picked"] == len(self.made)

    @invariant()
    def no_load_is_negative(self) -> None:
        for load in self.fleet.core.fleet.loads.values():
            assert load.active_requests() >= load.requests >= 0
            assert load.active_blocks() >= load.blocks >= 0
            assert load.prefill_tokens >= 0

    @invariant()
    def nothing_is_kept_of_workers_that_are_gone(self) -> None:
        assert set(self.fleet.core.fleet.loads) <= set(self.fleet.view.sources)


TestConservation = Conservation.TestCase


TestConservation.settings = settings(
    derandomize=True, deadline=None, max_examples=200, stateful_step_count=50
)
