"""Reserved load is the sum over open reservations and their halves, after any story."""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from indexer.identity import WorkerKey
from router.decide.core.progress import ProgressResult, ProgressState, Repeated
from router.decide.policies import POLICIES
from router.fleet.reservations.reservations import Reservation
from router.request.prompt import Prompt
from router.request.refusal import Refusal
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt

PROMPTS = [prompt(8), prompt(40), prompt(64), prompt(100), prompt(48, first=500), prompt(70, 500)]
PROMPTS += [prompt(600), prompt(608), prompt(1600), prompt(1600, 100_000)]
"""Those of the second line are long enough for two workers."""
ROLES = {"p": "prefill", "d": "decode", "w": "both"}
WORKERS = ("p0", "p1", "d0", "d1", "w0", "w1")
ABLE = {Role.BOTH: "w", Role.PREFILL: "pw", Role.DECODE: "dw", Role.PAIR: "dw"}
"""First letters of the workers that may answer."""


class Conservation(RuleBasedStateMachine):
    """Whatever happens, the load we count is the sum over the halves of reservations that are
    open."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(lease_s=20.0, reservations_max=13)
        self.made: list[Reservation] = []
        self.asked = Counter[str]()

    @initialize()
    def some_workers(self) -> None:
        for name in WORKERS:
            self.join(name)

    def join(self, name: str) -> None:
        connector = "NixlConnector" if name == "w0" else ""
        about = {"role": ROLES[name[0]], "kv_connector": connector}
        self.fleet.add(name, total_slots=4, total_blocks=400, **about)

    @rule(
        asked=st.sampled_from(PROMPTS),
        role=st.sampled_from([Role.PAIR, Role.PAIR, Role.BOTH, Role.PREFILL, Role.DECODE]),
        request_id=st.none() | st.sampled_from("abc"),
        policy=st.sampled_from(sorted(POLICIES)),
        unwanted=st.frozensets(st.sampled_from(["p0", "d0", "w0"]), max_size=2),
    )
    def route(
        self,
        asked: Prompt,
        role: Role,
        request_id: str | None,
        policy: str,
        unwanted: frozenset[str],
    ) -> None:
        about: dict[str, Any] = {"request_id": request_id} if request_id else {}
        about |= {"role": role, "policy": policy, "excluded_workers": unwanted}
        before = self.fleet.loads()
        try:
            outcome = self.fleet.core.route(self.fleet.request(asked, **about), self.fleet.now_s)
        except Refusal as refusal:
            self.asked[refusal.reason] += 1
            assert self.fleet.loads() == before
            return
        if isinstance(outcome, Repeated):
            self.asked["repeated"] += 1
            assert self.fleet.loads() == before
            return
        self.asked["picked"] += 1
        made = outcome.reservation
        assert made.worker.worker_id not in unwanted
        assert made.worker.worker_id[0] in ABLE[role]
        if made.prefill is not None:
            assert role is Role.PAIR
            assert made.prefill.worker != made.worker
            assert made.prefill.worker.worker_id not in unwanted
            assert made.prefill.worker.worker_id[0] in "pw"
        self.made.append(made)

    @rule(i=st.integers(0, 30), state=st.sampled_from(ProgressState), output=st.integers(0, 9))
    def report(self, i: int, state: ProgressState, output: int) -> None:
        known = [one for one in self.made if one.ended is None] or self.made
        if known:
            self.fleet.report(known[i % len(known)], state, output_tokens=output)

    @rule(i=st.integers(0, 30), state=st.sampled_from(ProgressState))
    def report_late(self, i: int, state: ProgressState) -> None:
        if i < len(self.made) and (late := self.made[i]).ended is not None:
            assert self.fleet.report(late, state) is not ProgressResult.APPLIED

    @rule(worker=st.sampled_from(WORKERS), running=st.integers(0, 5), used=st.integers(0, 350))
    def sample(self, worker: str, running: int, used: int) -> None:
        key = WorkerKey(worker, 0)
        if key in self.fleet.view.sources:
            self.fleet.say(key, running=running, used_blocks=float(used))

    @rule(seconds=st.sampled_from([0.25, 1, 5, 12]), silent=st.sampled_from(["", "p0", "w1"]))
    def time_goes_by(self, seconds: float, silent: str) -> None:
        self.fleet.turn(seconds, silent=[WorkerKey(silent, 0)])

    @rule(worker=st.sampled_from(["p0", "d0", "w0"]))
    def remove_and_come_back(self, worker: str) -> None:
        self.fleet.core.remove(worker, 0.01, self.fleet.now_s)
        self.fleet.now_s += 1
        self.fleet.tick()
        self.join(worker)

    @invariant()
    def ours_is_the_sum_over_open_halves(self) -> None:
        still_open = [one for one in self.made if one.ended is None]
        parts: dict[WorkerKey, list[Reservation]] = {}
        tokens = Counter[WorkerKey]()
        for one in still_open:
            parts.setdefault(one.worker, []).append(one)
            tokens[one.worker] += 0 if one.prefill_done else one.new_tokens
            if one.prefill is not None and one.prefill.open:
                assert not one.prefill_done
                parts.setdefault(one.prefill.worker, []).append(one)
                tokens[one.prefill.worker] += one.prefill.new_tokens
        expected = {}
        for key, here in parts.items():
            blocks = {block for one in here for block in one.prefixes.tolist()}
            own_blocks = sum(one.own_blocks for one in here)
            expected[key] = len(here), len(blocks) + own_blocks, tokens[key]
        assert self.fleet.loads() == expected
        assert len(self.fleet.core.reservations) == len(still_open)
        assert not any(one.prefill and one.prefill.open for one in self.made if one.ended)

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
