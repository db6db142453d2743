"""Shares of labels: how many requests their workers get, and that it costs no request."""

from collections import Counter

import pytest

from indexer.identity import WorkerKey
from router.config.keys import ConfigError
from router.config.settings.routing_settings import RoutingSettings
from router.decide.decision.label_shares import OTHER_SHARE
from router.decide.policies.configured import configured
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt

REQUESTS = 2000


def rollout(**shares: float) -> Fleet:
    """Four workers, of which one is new: w3."""
    fleet = Fleet(label_shares={f"revision={name}": share for name, share in shares.items()})
    for i in range(4):
        fleet.add(f"w{i}", labels={"revision": "v2"} if i == 3 else {})
    return fleet


def worker_of(fleet: Fleet, **about: str) -> str:
    """The worker of a request, which ends at once."""
    pick = fleet.route(prompt(64), **about)
    fleet.core.withdraw(pick.reservation, fleet.now_s)
    return pick.reservation.worker.worker_id


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_a_label_gets_its_share_of_the_requests(share: float) -> None:
    fleet = rollout(v2=share)
    new = sum(worker_of(fleet) == "w3" for _ in range(REQUESTS))
    assert new == pytest.approx(share * REQUESTS, abs=3 * (REQUESTS * share * (1 - share)) ** 0.5)


def test_several_labels_have_a_share_each() -> None:
    fleet = rollout(v2=0.2, v3=0.3)
    fleet.add("w4", labels={"revision": "v3"})
    counts = Counter(worker_of(fleet) for _ in range(REQUESTS))
    assert counts["w3"] / REQUESTS == pytest.approx(0.2, abs=0.04)
    assert counts["w4"] / REQUESTS == pytest.approx(0.3, abs=0.04)


def test_a_session_stays_in_its_share_and_with_it_as_the_share_grows() -> None:
    fleets = [rollout(v2=share) for share in (0.1, 0.4)]
    sessions = [f"s{i}" for i in range(200)]
    before, after = (
        {name for name in sessions if worker_of(fleet, session_id=name) == "w3"} for fleet in fleets
    )
    assert before == {name for name in sessions if worker_of(fleets[0], session_id=name) == "w3"}
    assert before < after


def test_the_others_are_named_in_the_receipt() -> None:
    pick = rollout(v2=1.0).route(prompt(64))
    assert pick.decision.exclusions() == {OTHER_SHARE: 3}


def test_workers_that_are_full_or_drained_or_not_there_cost_no_request() -> None:
    fleet = rollout(v2=1.0)
    fleet.say(WorkerKey("w3", 0), running=100)
    assert worker_of(fleet) != "w3"
    fleet.say(WorkerKey("w3", 0), running=0)
    assert worker_of(fleet) == "w3"
    fleet.core.drain("w3")
    assert worker_of(fleet) != "w3"
    assert worker_of(rollout(v9=1.0)) in {"w0", "w1", "w2", "w3"}


def test_where_all_others_are_full_the_labelled_take_more() -> None:
    fleet = rollout(v2=0.0)
    for i in range(3):
        fleet.say(WorkerKey(f"w{i}", 0), running=100)
    assert worker_of(fleet) == "w3"


def test_both_halves_of_a_pair_are_of_one_share() -> None:
    fleet = Fleet(label_shares={"revision=v2": 0.3})
    for revision in ("v1", "v2"):
        for half in ("prefill", "decode"):
            fleet.add(f"{half}-{revision}", role=half, labels={"revision": revision})
    pairs = Counter[tuple[str, str]]()
    for i in range(200):
        pick = fleet.route(prompt(1600, 9_000 * i), role=Role.PAIR)
        reservation = pick.reservation
        pairs[reservation.where_computed().worker.worker_id, reservation.worker.worker_id] += 1
        fleet.core.withdraw(reservation, fleet.now_s)
    assert set(pairs) == {("prefill-v1", "decode-v1"), ("prefill-v2", "decode-v2")}
    assert pairs["prefill-v2", "decode-v2"] / 200 == pytest.approx(0.3, abs=0.1)


def test_shares_of_more_than_all_requests_are_refused() -> None:
    shares = {"revision=v2": 0.7, "revision=v3": 0.4}
    with pytest.raises(ConfigError, match=r"at most 1 together, got 1\.1 - at .*label_shares"):
        configured(RoutingSettings(label_shares=shares))
