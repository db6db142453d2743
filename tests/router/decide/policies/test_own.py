"""A policy of the operator's own: it decides; when it fails, `dynamo-adaptive` does."""

import sys
from pathlib import Path

import pytest

from indexer.hashing import pack_tokens
from router.config.keys import ConfigError
from router.config.settings.routing_settings import AffinitySettings
from router.decide.decision.decision import Decision
from router.request.prompt import Prompt
from tests.stage.fleet import Fleet, prompt

HERE = "tests.router.decide.policies.own_policies"


def fleet_of(policy: str) -> Fleet:
    fleet = Fleet(policy=f"{HERE}:{policy}")
    asked = prompt(64)
    fleet.add("empty")
    fleet.cache(fleet.add("holder"), asked, 32)
    fleet.say(fleet.add("busy"), running=50, used_blocks=900.0)
    return fleet


def decide(fleet: Fleet) -> Decision:
    return fleet.decide(prompt(64))


@pytest.mark.parametrize(
    ("policy", "picked"), [("longest_overlap", "holder"), ("in_python", "empty")]
)
def test_its_costs_decide(policy: str, picked: str) -> None:
    fleet = fleet_of(policy)
    decision = decide(fleet)
    assert decision.policy.name == f"{HERE}:{policy}"
    assert decision.rows.workers[decision.order[0]].worker_id == picked
    assert decision.scores.row_terms["cost"].tolist() == decision.scores.costs.tolist()
    assert fleet.picked(prompt(64)) == picked
    assert not fleet.core.decider.policy_failures
    assert fleet.core.decider.take_policy_error() == ""


def test_its_terms_are_in_the_receipt_and_its_first_line_sums_it_up() -> None:
    decision = decide(fleet_of("with_terms"))
    assert decision.scores.row_terms["running"].tolist() == [0, 0, 50]
    assert decision.scores.shared_terms == {"one": 1.0}
    assert decide(fleet_of("longest_overlap")).policy.summary == "Whoever holds most of the prompt."


def test_its_chances_are_drawn_by() -> None:
    fleet = fleet_of("drawn")
    assert {decide(fleet).order[0] for _ in range(40)} == {1, 2}


def test_its_predicted_times_are_in_the_answer_and_held_against_measured_ones() -> None:
    fleet = fleet_of("predicts")
    pick = fleet.route(prompt(64))
    row = pick.decision.order[0]
    assert pick.decision.ttft_s == row + 1
    assert fleet.core.ttft_check.predicted_s == {pick.reservation.id: row + 1}


@pytest.mark.parametrize(
    ("policy", "kind", "told"),
    [
        ("raises", "raised", "AttributeError"),
        ("text", "raised", "ValueError"),
        ("infinite", "not_a_number", "costs are not all finite"),
        ("nothing", "shape", "costs have shape ()"),
        ("not_a_number_in_a_term", "not_a_number", "ratio are not all finite"),
        ("not_a_number_for_all", "not_a_number", "terms are not all finite"),
        ("too_short", "shape", "costs have shape (2,) for 3 rows"),
        ("a_matrix", "shape", "costs have shape (3, 2) for 3 rows"),
        ("predicts_nothing_to_wait_for", "not_a_number", "ttft_s are not all above 0"),
        ("predicts_for_some", "shape", "ttft_s have shape (2,) for 3 rows"),
        ("chances_below_zero", "not_a_number", "chances are below 0"),
        ("no_chances", "not_a_number", "chances are below 0, or 0 for all"),
    ],
)
def test_when_it_fails_dynamo_adaptive_decides_and_it_is_counted(
    policy: str, kind: str, told: str
) -> None:
    fleet = fleet_of(policy)
    for _ in range(3):
        decision = decide(fleet)
        assert decision.policy.name == "dynamo-adaptive"
        assert decision.rows.workers[decision.order[0]].worker_id == "holder"
    assert fleet.core.decider.policy_failures == {(f"{HERE}:{policy}", kind): 3}
    assert told in fleet.core.decider.take_policy_error()
    assert fleet.core.decider.take_policy_error() == "", "told once"
    assert fleet.picked(prompt(64)) == "holder"


def test_dynamo_adaptive_decides_by_its_configured_numbers() -> None:
    fleet = Fleet(
        "w0",
        policy=f"{HERE}:raises",
        parameters={"dynamo-adaptive": {"alpha_cache": 0.25, "alpha_balance": 0.25}},
    )
    assert decide(fleet).scores.shared_terms["alpha"] == 0.25


def test_dynamo_adaptive_decides_as_it_does_for_requests_that_name_it() -> None:
    """Of a session: with its soft affinity, and with invested tokens."""
    failing, invested = f"{HERE}:raises", 0
    affinity = AffinitySettings(bonus={"dynamo-adaptive": 0.5})
    fleet = Fleet("a", "b", own_policies=(failing,), affinity=affinity)
    fleet.add("c", running=3)
    for number in range(20):
        of = Prompt.from_tokens(pack_tokens([*range(3200), *range(5000 + number, 5033 + number)]))
        named = fleet.decide(of, session_id="s", policy="dynamo-adaptive")
        failed = fleet.decide(of, session_id="s", policy=failing)
        assert (failed.policy, failed.policy.affinity_bonus) == (named.policy, 0.5)
        assert failed.scores.costs.tolist() == named.scores.costs.tolist()
        assert failed.order == named.order
        invested += failed.invested_tokens is not None
        fleet.route(of, session_id="s" if number == 0 else f"s{number}")
        fleet.turn(0.5)
    assert invested > 0


def test_requests_may_name_those_that_are_configured_and_no_others() -> None:
    name = f"{HERE}:longest_overlap"
    fleet = Fleet("w0", own_policies=(name,))
    request = fleet.request(prompt(64), policy=name)
    assert fleet.core.decide(request, fleet.now_s).policy.name == name
    with pytest.raises(Exception, match="unknown policy 'os:getcwd'"):
        fleet.decide(prompt(64), policy="os:getcwd")


@pytest.mark.parametrize(
    ("routing", "told"),
    [
        ({"policy": "no_such_module:score"}, "'no_such_module' can't be imported"),
        ({"policy": f"{HERE}:no_such_function"}, "has no function 'no_such_function'"),
        ({"policy": f"{HERE}:not_a_function"}, "has no function 'not_a_function'"),
        ({"policy": ":"}, "can't be imported"),
        ({"own_policies": ("round-robin",)}, "expected module:function, got 'round-robin'"),
        ({"own_policies": (f"{HERE}:drawn", "x:y")}, "`$.routing.own_policies[1]`"),
    ],
)
def test_a_name_that_leads_to_no_function_stops_the_start_and_names_the_key(
    routing: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Fleet(**routing)
    assert told in str(refused.value)
    assert f"`$.routing.{next(iter(routing))}" in str(refused.value)


def test_a_module_that_breaks_when_it_is_imported_does_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaking_policy.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"ZeroDivisionError.*`\$\.routing\.policy`"):
        Fleet(policy="breaking_policy:score")
    assert "breaking_policy" not in sys.modules


def test_it_reads_the_operators_numbers_of_each_worker() -> None:
    fleet = fleet_of("coolest")
    fleet.say(fleet.add("cool"), own_numbers={"chip_celsius": -3.5})
    fleet.say(fleet.add("warm"), own_numbers={"chip_celsius": 61.0})
    assert decide(fleet).scores.costs.tolist() == [100.0, 100.0, 100.0, -3.5, 61.0]
    assert fleet.picked(prompt(64)) == "cool"


def test_a_number_that_some_engine_lacks_is_for_the_policy_to_fill() -> None:
    fleet = fleet_of("unsaid")
    assert decide(fleet).policy.name == "dynamo-adaptive"
    assert "not all finite numbers" in fleet.core.decider.take_policy_error()
