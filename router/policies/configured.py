"""The table of policies as an operator has set it up."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

import msgspec

from router.config import ConfigError, RoutingSettings
from router.policies import POLICIES
from router.policies.own import NoSuchPolicy, is_own, load_own
from router.policies.policy import Policy


def configured(routing: RoutingSettings) -> dict[str, Policy]:
    """All policies by name, with the numbers of routing.parameters; raises ConfigError."""
    policies = dict(POLICIES)
    for i, name in enumerate(routing.own_policies):
        policies[name] = _own(name, f"$.routing.own_policies[{i}]")
    named = {key: getattr(routing, key) for key in ("policy", "prefill_policy", "decode_policy")}
    for key, name in named.items():
        if is_own(name) and name not in policies:
            policies[name] = _own(name, f"$.routing.{key}")
    for name, numbers in routing.parameters.items():
        if name not in policies:
            raise ConfigError(
                f"unknown policy {name!r} at `$.routing.parameters`;"
                f" there are {', '.join(policies)}"
            )
        policies[name] = _with(policies[name], numbers)
    for key, name in named.items():
        if name not in policies:
            raise ConfigError(
                f"unknown policy {name!r} at `$.routing.{key}`; there are {', '.join(policies)}"
            )
    return policies


def shadow_policy(routing: RoutingSettings, policies: Mapping[str, Policy]) -> Policy | None:
    """The one of routing.shadow_policy, if there is one; raises ConfigError.

    One of the operator's own need not be among the policies that requests may name.
    """
    name = routing.shadow_policy
    if name is None or name in policies:
        return None if name is None else policies[name]
    if is_own(name):
        return _own(name, "$.routing.shadow_policy")
    raise ConfigError(
        f"unknown policy {name!r} at `$.routing.shadow_policy`; there are {', '.join(policies)}"
    )


def _own(name: str, where: str) -> Policy:
    """The operator's function; raises ConfigError."""
    if not is_own(name):
        raise ConfigError(f"expected module:function, got {name!r} - at `{where}`")
    try:
        return load_own(name)
    except NoSuchPolicy as error:
        raise ConfigError(f"policy {name!r}: {error} - at `{where}`") from error


def _with(policy: Policy, numbers: dict[str, float]) -> Policy:
    """A policy with other numbers; raises ConfigError that names the first that can't be."""
    for key, number in numbers.items():
        if not isfinite(number):
            raise ConfigError(
                f"expected a finite number, got {number} - at"
                f" `$.routing.parameters.{policy.name}.{key}`"
            )
    try:
        settings = msgspec.convert({**policy.parameters, **numbers}, type(policy.settings))
    except msgspec.ValidationError as error:
        where = f"$.routing.parameters.{policy.name}"
        told = str(error).replace("`$.", f"`{where}.")
        if told == str(error):
            known = ", ".join(policy.parameters) or "none"
            told = f"{told} - at `{where}`; it has {known}"
        raise ConfigError(told) from error
    return replace(policy, settings=settings)
