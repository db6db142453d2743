"""Second opinions: sums over logged decisions, by hand."""

from math import inf

import numpy as np
import pytest

from router.decide.policies import POLICIES
from router.decide.policies.candidates import Candidates
from router.decide.policies.own import own_policy
from router.decide.policies.policy import Parameters, Policy, Scores
from router.observe.audit.log_replay import SecondOpinion
from router.observe.audit.logged_decision import LoggedDecision, capture
from router.observe.audit.logged_refusal import LoggedRefusal, capture_refusal
from router.observe.audit.shadow_policy import Agreement
from router.request.refusal import Reason, Refusal, Refused
from tests.stage.fleet import Fleet, prompt


def decided(policy: str) -> list[LoggedDecision]:
    """Two decisions about 1600 tokens, between a holder with 9 requests and an idle worker."""
    told: list[LoggedDecision] = []
    fleet = Fleet(policy=policy, prefill_rate=1000.0, predicted_ttl_s=0.0)
    fleet.cache(fleet.add("holder"), prompt(1600), 1584)
    fleet.say(next(iter(fleet.relays)), running=9)
    fleet.cache(fleet.add("idle"), prompt(64, first=5000))
    for _ in range(2):
        fleet.core.route(
            fleet.request(prompt(1600)),
            fleet.now_s,
            watch=lambda one: told.append(capture(one, "here", hashes=False)),
        )
    return told


def opinion(policy: str, lines: list[LoggedDecision]) -> SecondOpinion:
    made = SecondOpinion(POLICIES[policy])
    for line in lines:
        made.add(line)
    return made


def test_the_policy_that_decided_agrees_with_itself() -> None:
    made = opinion("least-loaded", decided("least-loaded"))
    assert made.agreements == {Agreement.SAME: 2}
    assert made.more_overlap_tokens == made.sooner_s == made.more_active_slots == 0


def test_differences_are_means_over_decisions() -> None:
    told = opinion("dynamo-logit", decided("least-loaded")).as_dict()
    assert told["decided_by"] == {"least-loaded": 2}
    assert told["agreement"] == {"same": 0, "tied": 0, "other": 2, "failed": 0}
    assert told["hit_ratio"] == {"picked": 0.0, "would_be": 1584 / 1600}
    # idle, and then with one request under way, against nine on the holder
    assert told["active_slots"] == {"picked": 0.5, "would_be": 9.0}
    # work of 500 + 1600 * 1.016 and of 500 + 16 * 1.03184 tokens, the first one twice in line
    assert told["ttft_s"]["picked"] == pytest.approx(1.5 * 2.1256, abs=0.3)
    assert told["ttft_s"]["would_be"] == pytest.approx(0.5165, abs=0.001)


def test_a_policy_that_fails_is_counted_and_changes_no_mean() -> None:
    made = SecondOpinion(own_policy("tests.router.decide.policies.own_policies:raises", "$"))
    for line in decided("least-loaded"):
        made.add(line)
    assert made.agreements == {Agreement.FAILED: 2}
    assert (made.decisions, made.prompt_tokens) == (0, 0)
    assert made.as_dict()["hit_ratio"] == {"picked": 0.0, "would_be": 0.0}


def refusal(fleet: Fleet, policy: str = "") -> LoggedRefusal:
    with pytest.raises(Refusal) as caught:
        fleet.core.route(fleet.request(prompt(100), policy=policy), fleet.now_s)
    seen = Refused(caught.value, fleet.now_s)
    return capture_refusal(seen, "here", hashes=False)


def test_refusals_are_counted_apart_and_those_it_would_have_taken_are_told() -> None:
    def nowhere(rows: Candidates, _: Parameters) -> Scores:
        return Scores(np.full(len(rows), inf))

    fleet = Fleet()
    lost = refusal(fleet)
    key = fleet.add("w0")
    fleet.core.policies["nowhere"] = nothing = Policy("nowhere", "", "", Parameters(), nowhere)
    policys_doing = refusal(fleet, "nowhere")
    fleet.say(key, total_slots=1, running=1)
    full = refusal(fleet)
    for policy, taken in ((POLICIES["ttft"], 1), (nothing, 0)):
        made = SecondOpinion(policy)
        for line in (lost, policys_doing, full, full):
            made.add_refusal(line)
        assert made.refusals == {
            Reason.NO_WORKER: 1, Reason.NO_ELIGIBLE_WORKER: 1, Reason.ALL_WORKERS_FULL: 2,
        }  # fmt: skip
        told = made.as_dict()
        assert (told["refusals_taken"], sum(told["refusals"].values())) == (taken, 4)
        assert (made.decisions, made.decided_by.total()) == (0, 0)


def test_a_policy_that_fails_at_a_refusal_would_not_have_taken_it() -> None:
    fleet = Fleet()
    fleet.add("w0", total_slots=1, running=1)
    made = SecondOpinion(own_policy("tests.router.decide.policies.own_policies:raises", "$"))
    made.add_refusal(refusal(fleet))
    assert made.taken == 0
