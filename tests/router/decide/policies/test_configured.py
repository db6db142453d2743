"""The numbers of policies as an operator sets them."""

from math import inf, nan

import pytest

from router.config.keys import ConfigError
from router.config.settings.routing_settings import RoutingSettings
from router.decide.policies import POLICIES
from router.decide.policies.configured import configured


def test_by_default_all_are_as_they_come() -> None:
    assert configured(RoutingSettings()) == POLICIES


def test_numbers_that_are_set_are_in_the_formula_and_the_others_stay() -> None:
    numbers = {"dynamo-blocks": {"temperature": 0.5}, "ttft": {"keep": 2}}
    policies = configured(RoutingSettings(parameters=numbers))
    assert policies["dynamo-blocks"].parameters == {
        **POLICIES["dynamo-blocks"].parameters,
        "temperature": 0.5,
    }
    assert policies["ttft"].parameters["keep"] == 2.0
    assert policies["round-robin"] is POLICIES["round-robin"]
    assert POLICIES["ttft"].parameters["keep"] == 1.0


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"dynamo-block": {}}, "unknown policy 'dynamo-block' at `$.routing.parameters`"),
        ({"ttft": {"keeps": 1}}, "unknown field `keeps` - at `$.routing.parameters.ttft`; known"),
        ({"round-robin": {"x": 1}}, "known parameters: none"),
        ({"ttft": {"keep": -1}}, ">= 0.0 - at `$.routing.parameters.ttft.keep`"),
        ({"ttft": {"keep": nan}}, "got nan - at `$.routing.parameters.ttft.keep`"),
        ({"ttft": {"step_tokens": inf}}, "`$.routing.parameters.ttft.step_tokens`"),
        ({"ttft": {"step_tokens": 0}}, "> 0.0 - at `$.routing.parameters.ttft.step_tokens`"),
        ({"session-sticky": {"load_factor": 1}}, "`$.routing.parameters.session-sticky.load_f"),
        ({"conductor": {"hit_ratio_min": 1.1}}, "<= 1.0 - at `$.routing.parameters.conductor.hit"),
    ],
)
def test_a_mistake_names_its_key(numbers: dict[str, dict[str, float]], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(RoutingSettings(parameters=numbers))
    assert told in str(refused.value)


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'best' at `\$\.routing\.policy`"):
        configured(RoutingSettings(policy="best"))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_number_has_a_meaning_and_a_range(policy: str) -> None:
    about = POLICIES[policy].described()
    assert about.keys() == POLICIES[policy].parameters.keys()
    for told in about.values():
        meaning, _, bounds = told.rpartition("; ")
        assert meaning
        assert bounds.startswith(("at least ", "more than "))
