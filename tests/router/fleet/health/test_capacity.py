"""What is learned of workers' capacity: laws, golden steps, and what it means for picks."""

from math import isnan, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.plane.facts import Epoch, Heartbeat
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.config.settings.health_settings import CapacitySettings
from router.decide.core.progress import Pick
from router.fleet.health.capacity import AGREEING, BLOCK_PERCENT_MIN, Capacities
from router.fleet.reservations.reservations import Ending
from router.fleet.table import COLUMNS
from router.request.refusal import Reason, Refusal
from tests.stage.fleet import START_S, Fleet, prompt

KEY = WorkerKey("w0", 0)
SLOTS = COLUMNS.index("total_slots")


class Worker:
    """One worker's samples, one a second."""

    def __init__(self) -> None:
        self.capacities = Capacities(CapacitySettings())
        self.heartbeat = Heartbeat(
            epoch=Epoch(1, 0),
            address="",
            engine="vllm",
            used_blocks=10.0,
            total_blocks=100,
            sampled_at_s=START_S,
            sent_at_s=START_S,
        )

    def say(self, running: int = 0, waiting: int = 0, **changes: Any) -> None:
        assert self.heartbeat.sampled_at_s is not None
        changes = {"sampled_at_s": self.heartbeat.sampled_at_s + 1} | changes
        self.heartbeat = msgspec.structs.replace(
            self.heartbeat, running=running, waiting=waiting, **changes
        )
        self.capacities.on_heartbeat(KEY, self.heartbeat)

    @property
    def slots(self) -> int | None:
        return self.capacities.slots(KEY, self.heartbeat)

    @property
    def share(self) -> float:
        return self.capacities.block_share(KEY, self.heartbeat)

    @property
    def room(self) -> tuple[float, float, float]:
        return self.capacities.room(KEY, self.heartbeat)


SAMPLES = st.lists(
    st.fixed_dictionaries(
        {"running": st.integers(0, 5), "waiting": st.integers(0, 2)},
        optional={
            "used_blocks": st.sampled_from([None, 0.0, 89.0, 90.0, 100.0]),
            "total_slots": st.sampled_from([None, None, 0, 3]),
            "preemptions": st.integers(0, 30),
            "epoch": st.sampled_from([Epoch(1, 0), Epoch(2, 0)]),
            "sampled_at_s": st.sampled_from([START_S, None]),
        },
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(samples=SAMPLES, served=st.integers(0, 60))
def test_laws_of_what_is_learned(samples: list[dict[str, Any]], served: int) -> None:
    worker = Worker()
    most, agreed = 0, 0
    for sample in samples:
        if "epoch" in sample and sample["epoch"] != worker.heartbeat.epoch:
            most, agreed = 0, 0
        at_s, fixed = worker.heartbeat.sampled_at_s or START_S, "sampled_at_s" in sample
        worker.heartbeat = msgspec.structs.replace(worker.heartbeat, sampled_at_s=at_s)
        worker.say(**sample)
        if not fixed or sample["sampled_at_s"] is not None:
            most = max(most, sample["running"])
        agreed += sample["waiting"] > 0
        if worker.slots is not None:
            assert worker.slots >= most > 0, "never fewer than ran together"
            assert not worker.heartbeat.total_slots, "what is known is not estimated"
            assert agreed >= AGREEING
        assert BLOCK_PERCENT_MIN / 100 <= worker.share <= 1.0
        slots, known, blocks = worker.room[:3]
        assert not slots < 2, "an estimate leaves an idle worker room"
        if worker.heartbeat.total_slots:
            assert slots == known == worker.heartbeat.total_slots
        assert blocks == worker.share * (worker.heartbeat.total_blocks or 0)
        # A share can be below 1 and not count, by the settings or by another epoch.
        assert worker.share == 1.0 or KEY in worker.capacities.preempted
    for _ in range(served):
        before = worker.share
        worker.capacities.on_served(KEY)
        assert before <= worker.share <= 1.0
    if served * 1.0 >= 100 - BLOCK_PERCENT_MIN:
        assert worker.share == pytest.approx(1.0)
    worker.capacities.on_forgotten([KEY])
    assert (len(worker.capacities), worker.slots, worker.share) == (0, None, 1.0)
    assert not worker.capacities.preempted


def test_slots_are_estimated_once_two_samples_agree() -> None:
    worker = Worker()
    worker.say(running=7)
    worker.say(running=8, waiting=3)
    assert worker.slots is None
    worker.say(running=8, waiting=3, sampled_at_s=worker.heartbeat.sampled_at_s)
    assert worker.slots is None, "the same sample again is no second one"
    worker.say(running=5)
    worker.say(running=8, waiting=1)
    assert worker.slots == 8
    assert worker.room[0] == 9, "one more is picked, which would show more slots"


def test_an_estimate_is_disproved_by_a_request_more() -> None:
    worker = Worker()
    for _ in range(3):  # a long prompt takes all tokens of each step, so that others wait
        worker.say(running=3, waiting=5)
    assert worker.slots == 3
    worker.say(running=4)
    assert worker.slots is None
    worker.say(running=4, waiting=1)
    worker.say(running=4, waiting=1)
    assert worker.slots == 4


def test_fewer_that_run_say_nothing() -> None:
    worker = Worker()
    worker.say(running=8)
    for _ in range(5):
        worker.say(running=3, waiting=5)
    assert worker.slots is None, "more ran before, so that something else binds"


@pytest.mark.parametrize(
    "about",
    [
        {"used_blocks": 90.0},
        {"used_blocks": None},
        {"total_blocks": None},
        {"role": "decode"},
        {"kv_connector": "NixlConnector"},
        {"total_slots": 64},
    ],
    ids=str,
)
def test_what_else_may_bind_is_no_estimate(about: dict[str, Any]) -> None:
    worker = Worker()
    for _ in range(5):
        worker.say(running=8, waiting=5, **about)
    assert worker.slots is None


def test_samples_with_preemptions_between_them_say_nothing_of_slots() -> None:
    worker = Worker()
    for i in range(5):
        worker.say(running=8, waiting=5, preemptions=i + 1)
    assert worker.slots is None


def test_another_epoch_starts_from_nothing() -> None:
    worker = Worker()
    for i in range(4):
        worker.say(running=8, waiting=5, preemptions=0 if i < 3 else 4)
    assert (worker.slots, worker.share) == (8, 0.8)
    worker.say(running=2, waiting=1, preemptions=7, epoch=Epoch(2, 0))
    assert (worker.slots, worker.share) == (None, 1.0), "what was preempted before is no news"


def test_preemptions_lower_the_share_and_requests_that_are_served_raise_it() -> None:
    worker = Worker()
    worker.say(preemptions=40)
    assert worker.share == 1.0, "nobody knows when these were"
    worker.say(preemptions=41)
    assert worker.share == pytest.approx(0.95)
    worker.say(preemptions=43)
    assert worker.share == pytest.approx(0.85)
    worker.capacities.on_served(KEY)
    assert worker.share == pytest.approx(0.86)
    worker.say(preemptions=1000)
    assert worker.share == 0.5
    worker.say(preemptions=0)
    assert worker.share == 0.5, "a counter that fell has begun again"
    worker.say(preemptions=1)
    for _ in range(100):
        worker.capacities.on_served(KEY)
    assert worker.share == 1.0
    assert not worker.capacities.preempted


def test_workers_that_are_configured_alike_share_an_estimate() -> None:
    fleet = Fleet()
    about: dict[str, Any] = {"total_slots": None, "used_blocks": 1.0}
    alike, larger = fleet.add("w0", **about), fleet.add("w1", total_blocks=2000, **about)
    busier = fleet.add("w2", running=3, **about)
    learns = saturated(fleet, "w3")
    core = fleet.core

    def estimates() -> list[int | None]:
        keys = (alike, larger, busier, learns)
        return [core.fleet.capacities.slots(key, fleet.relays[key].heartbeat) for key in keys]

    def total_slots(key: WorkerKey) -> float:
        core.fleet.pools.refresh()
        return float(core.fleet.pools.columns[SLOTS, fleet.view.sources[key].slot])

    assert estimates() == [2, None, None, 2]
    assert total_slots(alike) == 3
    fleet.now_s += 1
    fleet.say(learns, running=3, waiting=0)
    assert estimates() == [None, None, None, None]
    assert isnan(total_slots(alike))
    for _ in range(AGREEING):
        fleet.now_s += 1
        fleet.say(learns, running=4, waiting=1)
    assert estimates() == [4, None, 4, 4]
    core.remove("w3", 0.001, fleet.now_s)
    assert estimates() == [None, None, None, None], "what is shared goes with its worker, too"
    assert isnan(total_slots(alike))


def test_what_an_engine_says_of_itself_late_makes_it_like_those_that_said_it_before() -> None:
    fleet = Fleet()
    learns = saturated(fleet, "w0", slots=8)
    alike = fleet.add("w1", total_slots=None, used_blocks=1.0, engine_version="1")
    other = fleet.add("w2", total_slots=None, used_blocks=1.0)
    core = fleet.core

    def total_slots() -> list[float]:
        core.fleet.pools.refresh()
        slots = [fleet.view.sources[key].slot for key in (learns, alike, other)]
        return core.fleet.pools.columns[SLOTS, slots].tolist()

    assert total_slots() == pytest.approx([9, nan, 9], nan_ok=True)
    fleet.say(learns, engine_version="1")
    assert total_slots() == pytest.approx([9, 9, nan], nan_ok=True)
    fleet.say(other, engine_version="1")
    assert total_slots() == [9, 9, 9]


def saturated(fleet: Fleet, worker_id: str, slots: int = 2) -> WorkerKey:
    """A worker of which the slots are estimated, and which is full by that."""
    key = fleet.add(worker_id, total_slots=None, used_blocks=1.0)
    for _ in range(AGREEING):
        fleet.now_s += 1
        fleet.say(key, running=slots, waiting=1)
    return key


@pytest.mark.parametrize("native", [False, True])
def test_a_worker_over_its_estimate_yields_to_others_and_takes_what_none_of_them_can(
    native: bool,
) -> None:
    fleet = Fleet(index=NativeIndex() if native else None)
    key = saturated(fleet, "w0")
    fleet.cache(key, prompt(160))
    fleet.core.fleet.pools.refresh()
    slot = fleet.view.sources[key].slot
    assert fleet.core.fleet.pools.columns[SLOTS, slot] == 3
    assert fleet.core.fleet.pools.written.full
    assert fleet.picked(prompt(160)) == "w0", "nobody is refused for an estimate"
    assert fleet.core.over_estimate_picks == 1
    fleet.add("w1", total_slots=2)
    assert [fleet.picked(prompt(160)) for _ in range(2)] == ["w1", "w1"]
    assert fleet.core.over_estimate_picks == 1
    assert fleet.picked(prompt(160)) == "w0", "the other one is full by what it says"
    fleet.say(key, running=1, waiting=0, used_blocks=1.0)
    assert fleet.core.over_estimate_picks == 2


def test_slots_that_are_known_refuse_as_before() -> None:
    fleet = Fleet()
    key = saturated(fleet, "w0")
    fleet.say(key, total_slots=2)
    with pytest.raises(Refusal) as caught:
        fleet.route(prompt(160))
    assert caught.value.reason is Reason.ALL_WORKERS_FULL


def test_idle_workers_with_estimates_take_requests() -> None:
    fleet = Fleet()
    keys = [saturated(fleet, f"w{i}", slots=1) for i in range(2)]
    for key in keys:
        fleet.say(key, running=0, waiting=0)
    for i in range(4):
        fleet.route(prompt(32, first=1000 * i))
    assert fleet.core.over_estimate_picks == 0


def served(fleet: Fleet, pick: Pick) -> None:
    fleet.report(pick.reservation, "finished")
    assert pick.reservation.ended is Ending.FINISHED


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("policy", ["dynamo-adaptive", "ttft", "round-robin"])
def test_a_worker_that_preempts_gets_nothing_above_its_share(native: bool, policy: str) -> None:
    fleet = Fleet(index=NativeIndex() if native else None, policy=policy)
    preempts = fleet.add("w0", used_blocks=0.0)
    fleet.now_s += 1
    fleet.say(preempts, preemptions=100, used_blocks=480.0)
    picks = [fleet.route(prompt(320))]
    fleet.add("w1", used_blocks=960.0)
    picks += [fleet.route(prompt(320, first=1000 * i)) for i in (1, 2, 3)]
    # 480 blocks and 20 more are half of w0's; w1 takes 20 twice, and then is full and w0 over it.
    assert [one.reservation.worker.worker_id for one in picks] == ["w0", "w1", "w1", "w0"]
    assert fleet.core.over_estimate_picks == 1
    served(fleet, picks[1])
    heartbeat = fleet.relays[preempts].heartbeat
    assert fleet.core.fleet.capacities.block_share(preempts, heartbeat) == 0.5
    served(fleet, picks[3])
    assert fleet.core.fleet.capacities.block_share(preempts, heartbeat) == 0.51


def test_what_is_learned_goes_with_its_worker() -> None:
    fleet = Fleet()
    key = saturated(fleet, "w0")
    assert len(fleet.core.fleet.capacities) == 1
    fleet.core.remove("w0", 0.001, fleet.now_s)
    fleet.core.fleet.pools.refresh()
    assert len(fleet.core.fleet.capacities) == 0
    assert not fleet.core.fleet.pools.written.full
    assert fleet.core.fleet.capacities.slots(key, fleet.relays[key].heartbeat) is None
