"""The policies and their settings, as configured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import fsum, isfinite

import msgspec

from router.config.keys import ConfigError
from router.config.own_functions import is_own
from router.config.settings.configurations import ModelSettings
from router.config.settings.routing_settings import ModelRoutingSettings, RoutingSettings
from router.decide.policies import POLICIES
from router.decide.policies.affinity import with_bonus
from router.decide.policies.own import own_policy
from router.decide.policies.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class PolicySettings:
    """The settings that decide one request."""

    routing: RoutingSettings
    policies: dict[str, Policy]
    """Policies by name, with the numbers of routing.parameters."""
    default: Policy = field(init=False)
    """The policy that routing.policy names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "default", self.policies[self.routing.policy])


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """The settings of all requests' decisions, after they were checked."""

    of_fleet: PolicySettings
    of_models: Mapping[str, PolicySettings]
    """Settings of models that have their own, by any name of the model."""

    @classmethod
    def of(cls, routing: RoutingSettings, models: Iterable[ModelSettings]) -> "DecisionSettings":
        """Makes the settings; raises ConfigError. models: only their `routing` is read."""
        fleet = PolicySettings(routing, configured(routing))
        return cls(fleet, configured_of_models(fleet, models))


def configured(routing: RoutingSettings) -> dict[str, Policy]:
    """All policies by name, with the parameters of routing.parameters; raises ConfigError."""
    policies = dict(POLICIES)
    for i, name in enumerate(routing.own_policies):
        policies[name] = _own(name, f"$.routing.own_policies[{i}]")
    named = {key: getattr(routing, key) for key in ("policy", "prefill_policy", "decode_policy")}
    for key, name in named.items():
        if is_own(name) and name not in policies:
            policies[name] = _own(name, f"$.routing.{key}")
    _set_numbers(policies, routing.parameters, "$.routing.parameters")
    for key, name in named.items():
        _check_known(policies, name, f"$.routing.{key}")
    _check_affinity(routing, policies)
    if (together := fsum(routing.label_shares.values())) > 1:
        raise ConfigError(
            f"the shares of all labels are at most 1 together, got {together:g} - at"
            " `$.routing.label_shares`"
        )
    return policies


def configured_of_models(
    fleet: PolicySettings, models: Iterable[ModelSettings]
) -> dict[str, PolicySettings]:
    """Settings of models that have routing settings of their own, by each of a model's names;
    raises ConfigError. fleet: the settings of all other models, from which missing values are
    taken.
    """
    by_name = {}
    for i, model in enumerate(models):
        if model.routing is not None:
            own = _of_model(fleet, model.routing, f"$.models[{i}].routing")
            by_name.update(dict.fromkeys((model.name, *model.aliases), own))
    return by_name


def _of_model(fleet: PolicySettings, own: ModelRoutingSettings, where: str) -> PolicySettings:
    policies = dict(fleet.policies)
    name = fleet.routing.policy if own.policy is None else own.policy
    if is_own(name) and name not in policies:
        policies[name] = _own(name, f"{where}.policy")
    _set_numbers(policies, own.parameters, f"{where}.parameters")
    _check_known(policies, name, f"{where}.policy")
    guard = fleet.routing.guard if own.guard is None else own.guard
    routing = msgspec.structs.replace(fleet.routing, policy=name, guard=guard)
    return PolicySettings(routing, policies)


def _check_affinity(routing: RoutingSettings, policies: Mapping[str, Policy]) -> None:
    """Raises ConfigError for affinity that could change no pick."""
    affinity = routing.affinity
    where = "$.routing.affinity"
    for name, bonus in affinity.bonus.items():
        _check_known(policies, name, f"{where}.bonus")
        if policies[name].draws:
            raise ConfigError(
                f"{name} draws its picks by chances, which no bonus changes - at"
                f" `{where}.bonus.{name}`"
            )
        if not isfinite(bonus):
            raise ConfigError(f"expected a finite number, got {bonus} - at `{where}.bonus.{name}`")


def shadow_policy(routing: RoutingSettings, policies: Mapping[str, Policy]) -> Policy | None:
    """The policy named by routing.shadow_policy, with its affinity; None: none is named. Raises
    ConfigError.

    A policy of the operator's own need not be among those that requests may name.
    """
    name = routing.shadow_policy
    if name is None or name in policies:
        return None if name is None else that_watches(routing, policies[name])
    if is_own(name):
        return _own(name, "$.routing.shadow_policy")
    raise ConfigError(
        f"unknown policy {name!r} at `$.routing.shadow_policy`; there are {', '.join(policies)}"
    )


def that_watches(routing: RoutingSettings, policy: Policy) -> Policy:
    """Returns a policy with its configured bonus for the worker of the request's session."""
    return with_bonus(policy, routing.affinity.bonus.get(policy.name, 0.0))


def _check_known(policies: Mapping[str, Policy], name: str, where: str) -> None:
    """Raises ConfigError for a name that no policy has."""
    if name not in policies:
        raise ConfigError(f"unknown policy {name!r} at `{where}`; there are {', '.join(policies)}")


def _set_numbers(
    policies: dict[str, Policy], parameters: Mapping[str, dict[str, float]], where: str
) -> None:
    """Sets parameters, by policy and name, in `policies`; raises ConfigError."""
    for name, numbers in parameters.items():
        _check_known(policies, name, where)
        policies[name] = _with(policies[name], numbers, f"{where}.{name}")


def _own(name: str, where: str) -> Policy:
    """The policy of the operator's function named module:function; raises ConfigError."""
    if not is_own(name):
        raise ConfigError(f"expected module:function, got {name!r} - at `{where}`")
    return own_policy(name, where)


def _with(policy: Policy, numbers: dict[str, float], where: str) -> Policy:
    """A policy with other parameters; raises ConfigError, which names the first invalid one."""
    for key, number in numbers.items():
        if not isfinite(number):
            raise ConfigError(f"expected a finite number, got {number} - at `{where}.{key}`")
    try:
        settings = msgspec.convert({**policy.parameters, **numbers}, type(policy.settings))
    except msgspec.ValidationError as error:
        sentence = str(error).replace("`$.", f"`{where}.")
        if sentence == str(error):
            known = ", ".join(policy.parameters) or "none"
            sentence = f"{sentence} - at `{where}`; known parameters: {known}"
        raise ConfigError(sentence) from error
    return replace(policy, settings=settings)
