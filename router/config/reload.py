"""Keys that take effect while a router runs, and keys that need a restart. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from router.config.settings.configurations import ModelSettings, ServeConfig

RELOADED = (
    "preset",
    "policy",
    "own_policies",
    "parameters",
    "policy_per_request",
    "prefill_policy",
    "decode_policy",
    "local_prefill_tokens",
    "pair_labels",
    "label_shares",
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
"""Keys of `routing` that take effect while a router runs. All keys of `decision_log` and of `queue`
take effect, too, and so do `routing` and `prompts` of each model in `models` that was there at the
start. Every other key needs a restart."""


def reloaded(running: ServeConfig, read: ServeConfig) -> tuple[ServeConfig, list[str], list[str]]:
    """Applies a configuration that was read again. Returns the one to run with, the keys that take
    effect, and the changed keys that need a restart."""
    changes = {name: getattr(read.routing, name) for name in RELOADED}
    routing = msgspec.structs.replace(running.routing, **changes)
    of_model = {model.name: model for model in read.models}
    models = tuple(_reloaded_model(model, of_model.get(model.name)) for model in running.models)
    config = msgspec.structs.replace(
        running,
        routing=routing,
        models=models,
        decision_log=read.decision_log,
        queue=read.queue,
    )
    return config, list(_differing(running, config)), list(_differing(config, read))


def _reloaded_model(running: ModelSettings, read: ModelSettings | None) -> ModelSettings:
    """A running model's settings, with `routing` and `prompts` as they were read again. read: None:
    the model is not in the configuration any more, and both are unset."""
    routing, prompts = (None, None) if read is None else (read.routing, read.prompts)
    return msgspec.structs.replace(running, routing=routing, prompts=prompts)


def _differing(before: ServeConfig, after: ServeConfig) -> Iterator[str]:
    yield from _keys(msgspec.to_builtins(before), msgspec.to_builtins(after), "")


def _keys(before: Any, after: Any, where: str) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict) and where.count(".") < 2:
        for name in dict.fromkeys([*before, *after]):
            yield from _keys(
                before.get(name), after.get(name), f"{where}.{name}" if where else name
            )
    else:
        yield where
