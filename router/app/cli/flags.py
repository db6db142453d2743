"""Flags of commands: one for each key of a configuration, and those that several commands share."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from typing_extensions import override

from events.plane.settings import Settings
from router.config.keys import Key, keys
from router.config.reading import Config, load

Command = TypeVar("Command", bound=Callable[..., Any])


class Seconds(click.FloatRange):
    """Type of an option in seconds, more than 0 and up to a bound."""

    def __init__(self, seconds_max: float) -> None:
        super().__init__(0, seconds_max, min_open=True)

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if isnan(number):  # which no comparison refuses
            self.fail(f"{value} is not in the range 0<x<={self.max:g}.", param, ctx)
        return number


class SharedOption(click.Option):
    """An option of several commands, which the reference of commands describes once."""

    def __init__(self, *names: Any, shared_as: str, **about: Any) -> None:
        super().__init__(*names, **about)
        self.shared_as = shared_as
        """Heading of the table of the reference that describes the option."""


class KeyOption(click.Option):
    """The flag of a configuration key, which the reference of the configuration describes."""

    def __init__(self, *names: Any, config: type[Settings], key: Key, **about: Any) -> None:
        super().__init__(*names, **about)
        self.config = config
        self.key = key


def shared_option(shared_as: str) -> Callable[..., Callable[[Command], Command]]:
    """click.option for SharedOption. shared_as: heading of the table of the reference that
    describes the option."""
    return partial(click.option, cls=SharedOption, shared_as=shared_as)


model_flag = click.option("--model", "-m", default="", help="Name of the model.")
timeout_flag = click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(86_400),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the router's answer.",
)


def http_base(_context: click.Context, _option: click.Parameter, text: str) -> str:
    """Callback of an option with an engine's HTTP address; adds http:// to an address without a
    scheme."""
    base = text.strip().rstrip("/")
    if not base or base.startswith(("http://", "https://")):
        return base
    if "://" in base:
        raise click.BadParameter("expected http://HOST:PORT or https://HOST:PORT")
    return f"http://{base}"


def settings_flags(
    config: type[Settings],
    short: Mapping[str, str] | None = None,
    *,
    first_week: bool = False,
) -> Callable[[Command], Command]:
    """Returns a decorator that adds --config and one flag for each scalar key of a configuration.

    short: second names of flags, by the dotted names of their keys. first_week: whether help lists
    only the keys that are marked first_week; the other flags work all the same.
    """

    def decorate(command: Command) -> Command:
        for key in reversed([key for key in keys(config) if _is_scalar(key.type)]):
            is_hidden = first_week and not key.first_week
            command = _flag(config, key, (short or {}).get(key.dotted), is_hidden)(command)
        return click.option(
            "--config",
            "-c",
            "config_file",
            type=click.Path(path_type=Path),
            envvar="KVROUTE_CONFIG",
            help="YAML file of the configuration.",
        )(command)

    return decorate


def _flag(
    config: type[Settings], key: Key, short: str | None, is_hidden: bool
) -> Callable[[Command], Command]:
    names = [key.flag]
    if short is not None:
        names.append(short)
    if key.path == ("nats", "url"):
        names.append("--nats")
    if key.path == ("fleet", "name"):
        names.append("--fleet")
    shown = f"{key.default}" if key.default is not None else "none"
    sentence = key.description[:1].upper() + key.description[1:]
    return click.option(
        *names,
        "__".join(key.path),
        cls=KeyOption,
        config=config,
        key=key,
        type=kind_of(key.type),
        default=None,
        hidden=is_hidden,
        help=f"{sentence}. [{shown}]",
    )


def kind_of(hint: Any) -> Any:
    """The click type of a setting's values."""
    options = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is Literal:
        return click.Choice([str(choice) for choice in options])
    for option in options or [hint]:
        if get_origin(option) is Literal:
            return kind_of(option)
        for kind in (bool, float, int):
            if option is kind or get_args(option)[:1] == (kind,):
                return kind
    return str


def _is_scalar(hint: Any) -> bool:
    options = [hint, *get_args(hint)]
    return not any((get_origin(option) or option) in (tuple, dict) for option in options)


def read_config(config: type[Config], file: Path | None, given: dict[str, Any]) -> Config:
    """The configuration made of file, environment and flags; raises ConfigError."""
    return load(config, file, os.environ, given_flags(given))


def given_flags(given: dict[str, Any]) -> dict[tuple[str, ...], object]:
    """The flags that were given, by the paths of their keys."""
    return {tuple(name.split("__")): value for name, value in given.items() if value is not None}
