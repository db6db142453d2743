"""Flags of commands: one for each key of a configuration, and those that several commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from events.plane.settings import Settings
from router.config.settings import Config, Key, keys, load

Command = TypeVar("Command", bound=Callable[..., Any])
ENGINE = "engine_"
"""Prefix of the parameters that describe a relay's one engine."""

target_flag = click.option(
    "--target",
    "-t",
    default="127.0.0.1:50051",
    envvar="KVROUTE_TARGET",
    show_default=True,
    help="The router's gRPC address.",
)
model_flag = click.option("--model", "-m", default="", help="Model name.")
timeout_flag = click.option(
    "--timeout", "timeout_s", default=5.0, show_default=True, help="Seconds."
)


def settings_flags(config: type[Settings]) -> Callable[[Command], Command]:
    """One flag for each scalar key of a configuration, and --config."""

    def decorate(command: Command) -> Command:
        for key in reversed([one for one in keys(config) if _is_scalar(one.type)]):
            command = _flag(key)(command)
        return click.option(
            "--config",
            "-c",
            "config_file",
            type=click.Path(path_type=Path),
            envvar="KVROUTE_CONFIG",
            help="YAML file.",
        )(command)

    return decorate


def _flag(key: Key) -> Callable[[Command], Command]:
    names = [key.flag]
    if key.path == ("nats", "url"):
        names.append("--nats")
    if key.path == ("fleet", "name"):
        names.append("--fleet")
    shown = f"{key.default}" if key.default is not None else "none"
    told = key.description[:1].upper() + key.description[1:]
    kind: Any = str
    options = [one for one in get_args(key.type) if one is not type(None)] or [key.type]
    if get_origin(key.type) is Literal:
        kind = click.Choice([str(choice) for choice in get_args(key.type)])
    elif bool in options:
        kind = bool
    elif any(one is float or get_args(one)[:1] == (float,) for one in options):
        kind = float
    elif any(one is int or get_args(one)[:1] == (int,) for one in options):
        kind = int
    return click.option(
        *names, "__".join(key.path), type=kind, default=None, help=f"{told}. [{shown}]"
    )


def _is_scalar(hint: Any) -> bool:
    options = [hint, *get_args(hint)]
    return not any((get_origin(one) or one) in (tuple, dict) for one in options)


def read_config(config: type[Config], file: Path | None, given: dict[str, Any]) -> Config:
    """The configuration of file, environment and flags; raises ConfigError."""
    return load(config, file, os.environ, given_flags(given))


def given_flags(given: dict[str, Any]) -> dict[tuple[str, ...], object]:
    """The flags that were given, by the paths of their keys."""
    return {
        tuple(name.split("__")): value
        for name, value in given.items()
        if value is not None and not name.startswith(ENGINE)
    }
