"""Flags that describe an engine: one for each key of EngineSettings, made of the key's type."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, get_origin

import click
from msgspec import NODEFAULT

from events.plane.settings import (
    DynamoSettings,
    EngineSettings,
    Settings,
    UnusableEngine,
    read_engine,
)
from router.app.cli.flags import Command, KeyOption, kind_of
from router.config.keys import ConfigError, Key, keys

ENGINE = "engine_"
"""Prefix of these flags' parameters, which keeps them apart from those of a configuration."""
_NAMES = {"id": "--worker-id", "labels": "--label", "model_aliases": "--model-alias"}
"""Flags whose name is not that of their key, by key."""
_DYNAMO_NAMES = {
    "subject": "--subject",
    "load_subject": "--load-subject",
    "nats_url": "--dynamo-nats",
    "nats_credentials_file": "--dynamo-nats-credentials",
    "max_model_len": "--max-model-len",
    "worker_timeout_s": "--worker-timeout-s",
}
"""Flags for the keys that a Dynamo fleet has and an engine has not, by key."""


def flag_of(key: str) -> str:
    """Name of the flag of a key of EngineSettings."""
    return _NAMES.get(key) or "--" + key.replace("_", "-")


def engine_flags(
    *, without: Collection[str] = (), required: bool = False, engines: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Returns a decorator that adds a flag for each key of EngineSettings.

    without: keys that the command takes in another form. required: whether click refuses a command
    line that lacks a key without a default. engines: kinds of engines beyond those of
    EngineSettings.
    """

    def decorate(command: Command) -> Command:
        for key in reversed([key for key in keys(EngineSettings) if key.dotted not in without]):
            kind = kind_of(key.type)
            if key.dotted == "engine" and isinstance(kind, click.Choice):
                kind = click.Choice([*kind.choices, *engines])
            is_required = required and key.default is NODEFAULT and not _is_multiple(key)
            command = _option(flag_of(key.dotted), key, kind, is_required, of=EngineSettings)(
                command
            )
        return command

    return decorate


def dynamo_flags(command: Command) -> Command:
    """Adds a flag to a command for each key that DynamoSettings has and EngineSettings has not."""
    by_name = {key.dotted: key for key in keys(DynamoSettings)}
    for name, flag in reversed(_DYNAMO_NAMES.items()):
        key = by_name[name]
        command = _option(flag, key, kind_of(key.type), about="Dynamo: ")(command)
    return command


def given_engine(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of the engine that flags gave; raises ConfigError for an invalid label."""
    fields = {
        name.removeprefix(ENGINE): value
        for name, value in given.items()
        if name.startswith(ENGINE) and value not in (None, ())
    }
    if "labels" in fields:
        fields["labels"] = dict(map(_label, fields["labels"]))
    return fields


def engine_settings(fields: dict[str, Any], *, id_name: str = "--worker-id") -> EngineSettings:
    """Settings of the engine that flags describe; raises ConfigError with the flag's name."""
    try:
        return read_engine(fields)
    except UnusableEngine as error:
        flag = id_name if error.key == "id" else flag_of(error.key)
        raise ConfigError(f"{flag}: {error.sentence}" if error.key else str(error)) from error


def _option(
    flag: str,
    key: Key,
    kind: Any,
    required: bool = False,
    about: str = "",
    of: type[Settings] | None = None,
) -> Callable[[Command], Command]:
    description = key.description if about else key.description[:1].upper() + key.description[1:]
    text = f"{about}{description}."
    multiple = _is_multiple(key)
    if multiple:
        text += " Repeatable."
    elif key.default not in (NODEFAULT, None, "", False):
        text += f" [{key.default}]"
    about_key: dict[str, Any] = {"cls": KeyOption, "config": of, "key": key} if of else {}
    return click.option(
        flag,
        ENGINE + key.dotted,
        type=str if multiple else kind,
        is_flag=kind is bool,
        **(
            {"default": None} if kind is bool else {}
        ),  # a default of None would fill a required one
        multiple=multiple,
        required=required,
        metavar="NAME=VALUE" if get_origin(key.type) is dict else None,
        help=text,
        **about_key,
    )


def _is_multiple(key: Key) -> bool:
    return get_origin(key.type) in (tuple, dict)


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--label {text!r}: write NAME=VALUE")
    return name, value
