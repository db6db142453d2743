"""What of a configuration takes effect while a router runs, and what waits for a restart. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from router.config.settings import ServeConfig

RELOADED = (
    "preset",
    "policy",
    "own_policies",
    "parameters",
    "policy_per_request",
    "prefill_policy",
    "decode_policy",
    "local_prefill_tokens",
    "local_prefill_percent",
    "expected_output_tokens",
    "prompt_tokens_max",
    "alternatives",
    "shadow_policy",
    "shadow_share",
    "hot_prefixes",
    "outliers",
    "capacity",
    "guard",
    "affinity",
)
"""Of `routing`: what each decision reads again, and what can be switched on and off. The whole of
`decision_log` and of `queue` is as good, and so is `routing` of each model in `models` that was
there at the start. Everything else is built into what runs."""


def reloaded(running: ServeConfig, read: ServeConfig) -> tuple[ServeConfig, list[str], list[str]]:
    """The configuration to run with from now on; the keys that changed; those that can't yet."""
    changes = {name: getattr(read.routing, name) for name in RELOADED}
    routing = msgspec.structs.replace(running.routing, **changes)
    of_model = {model.name: model.routing for model in read.models}
    models = tuple(
        msgspec.structs.replace(model, routing=of_model.get(model.name)) for model in running.models
    )
    config = msgspec.structs.replace(
        running,
        routing=routing,
        models=models,
        decision_log=read.decision_log,
        queue=read.queue,
    )
    return config, list(_differing(running, config)), list(_differing(config, read))


def _differing(one: ServeConfig, other: ServeConfig) -> Iterator[str]:
    yield from _keys(msgspec.to_builtins(one), msgspec.to_builtins(other), "")


def _keys(one: Any, other: Any, where: str) -> Iterator[str]:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict) and where.count(".") < 2:
        for name in dict.fromkeys([*one, *other]):
            yield from _keys(one.get(name), other.get(name), f"{where}.{name}" if where else name)
    else:
        yield where
