"""Models with settings of their own: whose settings decide a request."""

from typing import Any

import pytest

from indexer.hashing import pack_tokens
from kvroute.v1 import router_pb2
from router.config.keys import ConfigError
from router.config.settings.configurations import ModelSettings
from router.config.settings.routing_settings import (
    GuardSettings,
    ModelRoutingSettings,
    RoutingSettings,
)
from router.request.refusal import Reason, Refusal
from tests.stage.fleet import Fleet, prompt
from tests.stage.twins import Twins


def model(name: str, *aliases: str, **routing: Any) -> ModelSettings:
    return ModelSettings(name, aliases, routing=ModelRoutingSettings(**routing))


def fleet_of(*models: ModelSettings, **routing: Any) -> Fleet:
    """Workers of the models `chat` and `code`; the latter's has a LoRA, too."""
    fleet = Fleet(models=models, **routing)
    fleet.add("w0", model="chat")
    fleet.add("w1", model="code", lora_names=("tuned",))
    return fleet


def policy_of(fleet: Fleet, **about: Any) -> str:
    decision = fleet.route(prompt(64), **about).decision
    return decision.policy.name


def test_the_policy_is_the_requests_else_the_models_else_the_fleets() -> None:
    fleet = fleet_of(model("code", policy="ttft"), policy="least-loaded")
    assert policy_of(fleet, model="code", policy="round-robin") == "round-robin"
    assert policy_of(fleet, model="code") == "ttft"
    assert policy_of(fleet, model="chat") == "least-loaded"


def test_an_alias_and_a_lora_have_the_settings_of_their_model() -> None:
    fleet = fleet_of(model("code", "coder", policy="ttft"), ModelSettings("chat", ("talk",)))
    assert policy_of(fleet, model="coder") == "ttft"
    assert policy_of(fleet, model="tuned") == "ttft"
    assert policy_of(fleet, model="talk") == "dynamo-adaptive"


def test_a_configured_name_of_what_engines_call_otherwise_has_its_own_settings() -> None:
    fleet = fleet_of(model("fast", "tuned", policy="round-robin"), model("code", policy="ttft"))
    assert policy_of(fleet, model="fast") == "round-robin"
    assert policy_of(fleet, model="code") == "ttft"


def test_a_request_without_a_model_has_the_settings_of_the_only_one() -> None:
    fleet = Fleet(models=(model("code", policy="ttft"),))
    fleet.add("w0", model="code")
    assert policy_of(fleet) == "ttft"


def test_a_policy_per_request_is_measured_by_the_models() -> None:
    fleet = fleet_of(model("code", policy="ttft"), policy_per_request=False)
    assert policy_of(fleet, model="code", policy="ttft") == "ttft"
    with pytest.raises(Refusal) as refused:
        fleet.route(prompt(64), model="code", policy="dynamo-adaptive")
    assert refused.value.reason is Reason.POLICY_NOT_ALLOWED


def test_numbers_of_a_model_lie_over_those_of_the_fleet() -> None:
    fleets = {"dynamo-adaptive": {"gamma": 0.2, "alpha_cache": 0.2}, "ttft": {"keep": 2.0}}
    own = model("code", parameters={"dynamo-adaptive": {"gamma": 0.5}})
    fleet = fleet_of(own, parameters=fleets)

    def parameters_of(name: str, **about: Any) -> dict[str, float]:
        return dict(fleet.route(prompt(64), model=name, **about).decision.policy.parameters)

    assert parameters_of("chat")["gamma"] == 0.2
    assert parameters_of("code")["gamma"] == 0.5
    assert parameters_of("code")["alpha_cache"] == 0.2
    assert parameters_of("code", policy="ttft")["keep"] == 2.0


def test_a_models_guard_is_its_own() -> None:
    """A worker with a long queue that holds a little is left by the guard alone."""
    own = model("code", guard=GuardSettings(policies=()))
    for models, guarded in (((), True), ((own,), False)):
        fleet = Fleet(models=models)
        busy = fleet.add("busy", model="code", running=0, waiting=20)
        fleet.add("idle", model="code", running=0)
        fleet.cache(busy, prompt(1600), 1584)
        decision = fleet.route(prompt(1600), model="code").decision
        assert (decision.guarded is not None) == guarded
        assert (decision.guard is not None) == guarded


@pytest.mark.parametrize(
    ("routing", "told"),
    [
        ({"policy": "best"}, "unknown policy 'best' at `$.models[1].routing.policy`"),
        ({"policy": ""}, "unknown policy '' at `$.models[1].routing.policy`"),
        ({"policy": "no.such:one"}, "`$.models[1].routing.policy`"),
        ({"parameters": {"best": {}}}, "'best' at `$.models[1].routing.parameters`"),
        (
            {"parameters": {"ttft": {"kep": 1}}},
            "`$.models[1].routing.parameters.ttft`; known parameters: keep",
        ),
    ],
)
def test_a_mistake_names_its_key(routing: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fleet_of(ModelSettings("chat"), model("code", **routing))
    assert told in str(refused.value)


def test_settings_change_while_a_router_runs_and_wrong_ones_change_nothing() -> None:
    fleet = fleet_of(model("code", policy="ttft"))
    fleet.core.reconfigure(fleet.core.routing, (model("code", policy="round-robin"),))
    assert policy_of(fleet, model="code") == "round-robin"
    with pytest.raises(ConfigError):
        fleet.core.reconfigure(RoutingSettings(policy="ttft"), (model("code", policy="best"),))
    assert policy_of(fleet, model="code") == "round-robin"
    assert policy_of(fleet, model="chat") == "dynamo-adaptive"
    fleet.core.reconfigure(fleet.core.routing)
    assert policy_of(fleet, model="code") == "dynamo-adaptive"


def request(name: str, number: int, **about: Any) -> router_pb2.RouteRequest:
    return router_pb2.RouteRequest(
        request_id=f"{name}-{number}",
        model=name,
        token_bytes=pack_tokens(range(16 * (1 + number % 5))),
        **about,
    )


def test_a_kernel_has_the_numbers_of_the_requests_model() -> None:
    own = model("code", "coder", parameters={"dynamo-adaptive": {"gamma": 0.9}})
    other = model("chat", policy="round-robin")
    twins = Twins(models=(own, other))
    for i, name in enumerate(("code", "chat", "plain") * 2):
        twins.tell("add", f"w{i}", model=name, lora_names=("tuned",) if name == "code" else ())
    for number in range(6):
        for name in ("code", "coder", "tuned", "chat", "plain"):
            twins.route(request(name, number))
    items = [
        router_pb2.RouteItem(index=i, request=request(name, 10 + i))
        for i, name in enumerate(("plain", "code", "plain", "chat", "coder", "plain"))
    ]
    twins.decide(router_pb2.RouteBatch(items=items))
