"""Makes the configuration of an engine's scheduler from a profile and from options by name, as a
command line gives them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from simulator.engines.profile import Profile
from simulator.engines.scheduler import SchedulerConfig
from simulator.schedulers import SCHEDULERS
from simulator.schedulers.chitu.task import ChituConfig

_GIVEN_OTHERWISE = ("block_size", "block_count", "cost", "hash_seed", "lora_names")


def scheduler_config(
    engine: str,
    profile: Profile,
    *,
    block_size: int,
    block_count: int | None = None,
    ranks: int = 1,
    joined_steps_max: int = 1,
    options: Mapping[str, str] | None = None,
) -> SchedulerConfig:
    """The configuration of an engine's scheduler. block_count: blocks of the engine, or of each
    rank; None: as many as the profile's memory holds.

    options: fields of the engine's configuration, as text, such as policy: lpm for SGLang. Raises
    ValueError for options that the engine doesn't have, and for numbers that don't fit together.
    """
    config = SCHEDULERS[engine].config
    blocks = profile.engine.blocks_of(block_size) if block_count is None else block_count
    values: dict[str, Any] = {
        "block_count": blocks,
        "block_size": block_size,
        "max_num_seqs": profile.engine.max_num_seqs,
        "step_tokens_max": profile.engine.max_num_batched_tokens,
        "joined_steps_max": joined_steps_max,
        "cost": profile.cost_model(blocks * block_size),
    }
    if config is ChituConfig:
        values["dp_size"] = ranks
    hints = get_type_hints(config)
    known = [option.name for option in fields(config) if option.name not in _GIVEN_OTHERWISE]
    for name, text in (options or {}).items():
        if name not in known:
            raise ValueError(f"{engine} has no option {name!r}; there are {', '.join(known)}")
        try:
            values[name] = msgspec.convert(text, hints[name], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}={text}: expected {_expected(hints[name])}") from error
    return config(**values)


def _expected(hint: Any) -> str:
    """A phrase for the values that an option of this type takes."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(hint) or " or ".join(
        "null" if choice is type(None) else words[choice] for choice in get_args(hint)
    )
