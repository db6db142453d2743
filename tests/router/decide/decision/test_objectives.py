"""The objectives of a request: which workers keep them, and what follows where none does."""

from math import inf
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from indexer.identity import WorkerKey
from router.api.desk.answers import Answered, Waiting
from router.api.desk.counters import Metrics
from router.api.desk.desk import Desk
from router.config.settings.queue_settings import QueueSettings
from router.decide.core.core import RouterCore
from router.decide.decision.nobody_fits import NobodyFits
from router.decide.decision.objectives import (
    ERROR,
    NO_HEADROOM,
    held_from,
    least_missed,
    missed_at,
    none_keeps,
)
from router.fleet.eligibility import Barred
from router.fleet.token_times import TokenTime
from router.request.refusal import Reason, Refusal
from router.request.request import Objective, Role
from tests.stage.fleet import Fleet, prompt
from tests.stage.rows import NOW_S, RATE, rows
from tests.stage.served import asked, desk_of, raised


def objective(
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    *,
    since_s: float = NOW_S,
    sheddable: bool = False,
) -> Objective:
    """Of a request that came at since_s."""
    return Objective(ttft_s, inf if ttft_s is None else since_s + ttft_s, tpot_s, sheddable)


def missed(wanted: Objective, *workers: dict[str, Any], **about: Any) -> list[float]:
    does = {name: about.pop(name, True) for name in ("computes", "answers")}
    return missed_at(rows(1000, *workers, **about), wanted, wanted.due_s, **does).tolist()


def none(wanted: Objective, *workers: dict[str, Any], room: Any = True, **does: bool) -> bool:
    does = {"computes": True, "answers": True} | does
    return none_keeps(rows(1000, *workers), wanted, np.full(len(workers), room), **does)


def test_a_worker_misses_by_what_its_time_between_tokens_is_over_the_wanted() -> None:
    workers = [{"tpot_s": seconds} for seconds in (0.01, 0.04 / ERROR, 0.05 / ERROR, 0.08 / ERROR)]
    assert missed(objective(tpot_s=0.04), *workers) == pytest.approx([0, 0, 0.25, 1])


def test_what_is_not_known_is_not_missed() -> None:
    assert missed(objective(tpot_s=0.001), {}) == [0]


def test_a_worker_misses_by_what_its_first_token_is_late() -> None:
    # 1000 tokens take 1.51 s, and as long again behind a prompt of that length
    behind = {"prefills": [(1000, 1000)]}
    assert missed(objective(2.0), {}, behind) == pytest.approx([0, (3.02 - 2) / 2])
    late = objective(2.0, since_s=NOW_S - 1)
    assert missed(late, {}, behind) == pytest.approx([0.51 / 2, 2.02 / 2])
    assert RATE == 1000


def test_of_a_pair_each_half_counts_where_it_is_done() -> None:
    slow = {"tpot_s": 1.0, "prefills": [(5000, 5000)]}
    both = objective(0.1, 0.01)
    (prefill,) = missed(both, slow, answers=False)
    (decode,) = missed(both, slow, computes=False)
    assert missed(objective(0.1), slow) == [prefill]
    assert missed(objective(tpot_s=0.01), slow) == [decode]
    assert missed(both, slow) == [prefill + decode]
    assert decode == pytest.approx(100 * ERROR - 1)


def test_those_that_keep_the_objectives_are_left_and_else_those_near_the_least() -> None:
    none, room = Barred.of(["", "", ""]), np.zeros(3)
    kept = least_missed(np.array([0, 0.01, 0]), none, room)
    assert list(kept.reasons) == ["", NO_HEADROOM, ""]
    near = 2 * ERROR - 1
    kept = least_missed(np.array([1.0, near, near + 0.01]), none, room)
    assert list(kept.reasons) == ["", "", NO_HEADROOM]


def test_a_worker_that_has_no_room_is_no_measure_for_others() -> None:
    kept = least_missed(np.array([0, 1.0]), Barred.of(["", ""]), np.array([1.0, 0.0]))
    assert not kept.counts
    kept = least_missed(np.array([0, 1.0]), Barred.of(["drained", ""]), np.zeros(2))
    assert kept.counts == {"drained": 1}
    full = Barred.of(["", ""])
    assert least_missed(np.array([0, 1.0]), full, np.ones(2)) is full


def test_objectives_cover_those_that_want_no_longer_times() -> None:
    both = objective(2.0, 0.05)
    assert both.covers(both)
    assert both.covers(objective(1.0, 0.05))
    assert not both.covers(objective(2.0, 0.06))
    assert not both.covers(objective(tpot_s=0.05))
    assert objective(tpot_s=0.05).covers(both)


def test_no_worker_keeps_what_its_load_alone_misses() -> None:
    behind, slow = {"running": 1, "prefills": [(5000, 5000)]}, {"running": 1, "tpot_s": 0.1}
    assert none(objective(2.0), behind)
    assert not none(objective(2.0), behind, computes=False)
    assert not none(objective(tpot_s=0.05), behind)
    assert none(objective(tpot_s=0.05), slow)
    assert not none(objective(tpot_s=0.05), slow, answers=False)
    assert not none(objective(1.0), slow)  # this prompt alone takes too long
    assert none(objective(2.0, 0.05), behind, slow)
    assert not none(objective(2.0, 0.05), behind, slow, {})
    assert none(objective(tpot_s=0.05), slow, {}, room=[True, False])


def test_a_sheddable_request_waits_for_no_idle_worker() -> None:
    of_rows = rows(1000, {"running": 1}, {}, {"running": 1})
    assert held_from(np.array([0.1, 0.1, 0]), of_rows).tolist() == [True, False, False]


class Told(Fleet):
    """Two workers; their times between tokens are those that a test says."""

    def __init__(self, **routing: Any) -> None:
        super().__init__(**{"policy": "least-loaded", **routing})
        self.line = TokenTime(0.01, 0.01, 0.0)
        self.core.fleet.token_times.of = lambda key, heartbeat: self.line  # type: ignore[method-assign]
        self.keys = [self.add("w0"), self.add("w1")]

    def busy(self, *requests: int) -> None:
        for key, running in zip(self.keys, requests, strict=True):
            self.say(key, running=running)


def test_the_cheapest_worker_with_headroom_is_picked() -> None:
    fleet = Told(policy="cache-threshold")
    fleet.cache(fleet.keys[0], prompt(320))
    fleet.busy(6, 2)
    assert fleet.picked(prompt(321)) == "w0"
    assert fleet.picked(prompt(321), objective=objective(tpot_s=0.2)) == "w0"
    assert fleet.picked(prompt(321), objective=objective(tpot_s=0.06)) == "w1"


def test_where_none_has_headroom_the_least_violation_is_picked() -> None:
    fleet = Told(policy="cache-threshold")
    fleet.cache(fleet.keys[0], prompt(320))
    fleet.busy(9, 4)
    assert fleet.picked(prompt(321), objective=objective(tpot_s=0.01)) == "w1"


def test_the_answer_names_the_predicted_time_between_tokens() -> None:
    fleet = Told()
    fleet.busy(5, 3)
    answer = fleet.answer(prompt(32))
    assert answer.estimated_tpot_ms == pytest.approx(40)
    assert answer.receipt.picked.estimated_tpot_ms == pytest.approx(40)
    assert answer.receipt.runner_up.estimated_tpot_ms == pytest.approx(60)


def test_the_receipt_counts_the_workers_without_headroom() -> None:
    fleet = Told()
    fleet.busy(6, 2)
    answer = fleet.answer(prompt(32), objective=objective(tpot_s=0.06))
    assert answer.receipt.excluded == {NO_HEADROOM: 1}


def test_nothing_known_leaves_the_pick_to_the_policy() -> None:
    fleet = Told()
    fleet.line = TokenTime(float("nan"), 0.0, 0.0)
    fleet.busy(6, 2)
    assert fleet.picked(prompt(32), objective=objective(tpot_s=0.001)) == "w1"
    assert not fleet.answer(prompt(32)).HasField("estimated_tpot_ms")


def pair(**about: Any) -> Told:
    """A prefill worker and two decode workers, of which the first has more to do."""
    fleet = Told(**about)
    for key in fleet.keys:
        fleet.say(key, role="decode", kv_connector="NixlConnector")
    fleet.add("p", role="prefill", kv_connector="NixlConnector", kv_engine_id="e")
    fleet.busy(6, 3)
    return fleet


def test_of_a_pair_the_decode_worker_keeps_the_time_between_tokens() -> None:
    fleet = pair(decode_policy="cache-threshold")
    fleet.cache(fleet.keys[0], prompt(800))
    assert fleet.route(prompt(801), role=Role.PAIR).reservation.worker.worker_id == "w0"
    request = {"role": Role.PAIR, "objective": objective(tpot_s=0.06)}
    picked = fleet.route(prompt(801), **request).reservation
    assert picked.worker.worker_id == "w1"
    assert picked.prefill is not None
    assert picked.prefill.worker.worker_id == "p"


def test_a_sheddable_pair_waits_for_a_decode_worker_with_headroom() -> None:
    fleet = pair()
    wanted = {"role": Role.PAIR, "objective": objective(tpot_s=0.02, sheddable=True)}
    assert shed(fleet.core, fleet, **wanted).reason is Reason.ALL_WORKERS_FULL
    fleet.busy(6, 0)
    assert fleet.picked(prompt(32), **wanted) == "w1"


def shed(core: RouterCore, fleet: Fleet, **about: Any) -> Refusal:
    with pytest.raises(NobodyFits) as refused:
        core.route(fleet.request(prompt(32), **about), fleet.now_s)
    return refused.value


def test_a_sheddable_request_is_refused_where_it_may_not_wait() -> None:
    fleet = Told()
    fleet.busy(6, 6)
    wanted = objective(tpot_s=0.02, sheddable=True)
    refusal = shed(fleet.core, fleet, objective=wanted)
    assert refusal.reason is Reason.ALL_WORKERS_FULL
    assert fleet.picked(prompt(32), objective=objective(tpot_s=0.02)) in ("w0", "w1")


def test_an_observed_request_is_never_shed() -> None:
    fleet = Told()
    fleet.busy(6, 6)
    wanted = objective(tpot_s=0.02, sheddable=True)
    assert fleet.picked(prompt(32), objective=wanted, observed=True) in ("w0", "w1")


def test_the_wait_of_a_sheddable_request_is_not_the_workers_miss() -> None:
    fleet = Told(prefill_rate=1e6)
    fleet.busy(2, 2)
    late = objective(1.0, since_s=fleet.now_s - 100, sheddable=True)
    assert fleet.picked(prompt(32), objective=late) in ("w0", "w1")


def desk(fleet: Fleet) -> Desk:
    made: Desk = desk_of(fleet, Metrics(CollectorRegistry()), raised, queue=QueueSettings())
    return made


def test_a_waiting_sheddable_request_keeps_no_other_from_its_worker() -> None:
    fleet = Told()
    fleet.busy(6, 6)
    router = desk(fleet)

    def ask(request_id: str, **about: Any) -> Answered | Waiting:
        return router.route(asked(32, request_id=request_id, **about).SerializeToString())

    sheddable = [ask(f"shed{n}", priority=-1, tpot_slo_ms=20) for n in range(5)]
    assert all(isinstance(one, Waiting) and one.outcome is None for one in sheddable)
    other = ask("other", tpot_slo_ms=20)
    router.dispatch()
    assert isinstance(other, Waiting)
    assert isinstance(other.outcome, tuple)
    before = router.admission.sheddable_in_vain.count
    fleet.core.undrain("w0")  # which may be news to all that wait
    router.dispatch()
    assert router.admission.sheddable_in_vain.count == before + 1
    fleet.busy(0, 6)
    router.dispatch()
    first = sheddable[0]
    assert isinstance(first, Waiting)
    assert isinstance(first.outcome, tuple)
    assert first.outcome[1].worker == WorkerKey("w0", 0)
    loose = ask("loose", priority=-1, tpot_slo_ms=100)
    assert isinstance(loose, Waiting)
    router.dispatch()
    assert isinstance(loose.outcome, tuple)  # which the others do not keep back


def test_sheddable_requests_use_up_their_own_attempts_and_no_others() -> None:
    fleet = Told()
    fleet.busy(6, 6)
    router = desk(fleet)
    shed = router.route(asked(32, priority=-1, tpot_slo_ms=20).SerializeToString())
    assert isinstance(shed, Waiting)
    router.admission.sheddable_in_vain.add(1 << 30)
    plain = router.route(asked(32).SerializeToString())
    assert isinstance(plain, Waiting)  # behind the other
    router.dispatch()
    assert isinstance(plain.outcome, tuple)
    assert shed.outcome is None


def test_no_time_between_tokens_is_refused_with_its_bound() -> None:
    with pytest.raises(Refusal, match="tpot_slo_ms is 0; it is at least 1 millisecond") as refused:
        desk(Told()).route(asked(32, tpot_slo_ms=0).SerializeToString())
    assert refused.value.reason is Reason.INVALID_FIELD
