"""The configuration from file, environment and flags, in rising precedence.

An unknown key is refused with its name. A preset (router/config/settings/presets.py) lies between
the defaults and these three: it sets keys of `routing` that none of them sets.
"""

import re
import types
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from events.plane.mistakes import nearest, of_value
from events.plane.settings import Settings, shared_socket, unusable
from router.config.keys import (
    ENVIRONMENT_PREFIX,
    ConfigError,
    Key,
    flag_of,
    keys,
    put_value,
    value_at,
)
from router.config.settings.configurations import ServeConfig
from router.config.settings.presets import PRESETS
from router.config.sources import KeyPath, Sources
from router.config.yaml_text import parse_yaml

FILE_BYTES_MAX = 4 << 20
"""Most bytes of a configuration file, enough for thousands of workers."""


INTEGER_MAX = 1 << 53
"""Largest integer of a key, whatever its own bound: a float holds it exactly."""


Config = TypeVar("Config", bound=Settings)


def load(
    config: type[Config],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[tuple[str, ...], object],
) -> Config:
    """The configuration of all three sources; raises ConfigError.

    file: YAML; None: no file. flags: path of a key -> value. A variable of the environment that
    begins with KVROUTE_ must name a key, too.
    """
    return load_with_sources(config, file, environment, flags)[0]


def load_with_sources(
    config: type[Config],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[tuple[str, ...], object],
) -> tuple[Config, Sources]:
    """The configuration of `load`, and the origin of each value; raises ConfigError."""
    tree = _read(file) if file else {}
    where = f"{file}: " if file else ""
    _convert(tree, config, where)  # blames the file for what the file says
    known = {key.variable: key for key in keys(config)}
    variables: dict[KeyPath, str] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        key = known.get(variable)
        if key is None:
            if _is_no_key(variable, text):
                continue
            raise ConfigError(
                f"environment: {variable} names no key of the configuration"
                f"{nearest(variable, known)}"
            )
        put_value(tree, key.path, _read_variable(key, text))
        variables[key.path] = variable
        _convert(tree, config, f"environment: {variable}: ")
    for path, value in flags.items():
        put_value(tree, path, value)
    where = "flags: " if flags else where
    read = _convert(tree, config, where)
    preset = read.routing.preset if isinstance(read, ServeConfig) else None
    sets = {"routing": PRESETS[preset].sets} if preset else {}
    flag_names: dict[KeyPath, str] = {path: flag_of(path) for path in flags}
    sources = Sources(str(file or ""), tree, variables, flag_names, f"preset {preset}", sets)
    return _convert(_laid_over(sets, tree), config, where), sources


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees of keys merged into one; where both have a value, that of `above`."""
    tree = {**below, **above}
    for name in below.keys() & above.keys():
        lower, upper = below[name], above[name]
        if isinstance(lower, Mapping) and isinstance(upper, Mapping):
            tree[name] = _laid_over(lower, upper)
    return tree


TARGET_VARIABLES = (
    "KVROUTE_TARGET_TLS",
    "KVROUTE_TARGET_CA",
    "KVROUTE_TARGET_CERTIFICATE",
    "KVROUTE_TARGET_KEY",
    "KVROUTE_TARGET_NAME",
    "KVROUTE_TARGET_TOKEN_FILE",
)
"""Variables of the flags --tls, --tls-ca and so on, in the order of the flags
(router/app/calls/dialing.py)."""
_OTHER_VARIABLES = frozenset({"KVROUTE_CONFIG", "KVROUTE_TARGET", *TARGET_VARIABLES})
"""Variables of the command line that are no keys of a configuration."""


_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")


def _is_no_key(variable: str, text: str) -> bool:
    """Whether a variable belongs to the command line, or is set by Kubernetes for a Service.

    A Service called `kvroute` gives every pod beside it KVROUTE_PORT=tcp://... and its like.
    """
    if variable in _OTHER_VARIABLES:
        return True
    link = _SERVICE_LINK.search(variable)
    return link is not None and (link[0] != "_PORT" or "://" in text)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except ValueError as error:  # a path with a zero byte
        raise ConfigError(f"{str(file)!r}: {error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: the file has more than {FILE_BYTES_MAX >> 20} MiB")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    tree = parse_yaml(text, f"{file}: ")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a mapping of sections, not {type(tree).__name__}")
    return tree


def _read_variable(key: Key, text: str) -> object:
    """Value of a key from the text of its environment variable; raises ConfigError."""
    if _takes_text(key.type):
        may_be_absent = types.NoneType in get_args(key.type)
        return None if may_be_absent and not text else text
    return parse_yaml(text, f"environment: {key.variable}: ")


def _takes_text(hint: Any) -> bool:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return str in options or any(get_origin(option) is Literal for option in options)


def _convert(tree: dict[str, Any], config: type[Config], where: str) -> Config:
    try:
        value = msgspec.convert(tree, config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{of_value(error, config)}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}the values are nested too deep") from error
    _check(value, where)
    return value


def _check(config: Settings, where: str) -> None:
    """Checks what types can't express, such as ids that are used twice; raises ConfigError."""
    tree = msgspec.to_builtins(config)
    for key in keys(type(config)):
        value = value_at(tree, key.path)
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{where}expected a finite number - at `$.{key.dotted}`")
        if isinstance(value, int) and value > INTEGER_MAX:
            raise ConfigError(f"{where}expected at most {INTEGER_MAX} - at `$.{key.dotted}`")
    workers = getattr(config, "workers", ())
    seen: set[str] = set()
    for i, worker in enumerate(workers):
        if worker.id in seen:
            raise ConfigError(f"{where}the id {worker.id!r} is used twice - at `$.workers[{i}].id`")
        seen.add(worker.id)
        if error := unusable(worker):
            name, _, sentence = error.partition(": ")
            raise ConfigError(f"{where}{sentence} - at `$.workers[{i}].{name}`")
    if (twice := shared_socket(workers)) is not None:
        i, error = twice
        name, _, sentence = error.partition(": ")
        raise ConfigError(f"{where}{sentence} - at `$.workers[{i}].{name}`")
    if isinstance(config, ServeConfig):
        names: set[str] = set()
        for i, model in enumerate(config.models):
            for name in (model.name, *model.aliases):
                if name in names:
                    raise ConfigError(
                        f"{where}the name {name!r} is used twice - at `$.models[{i}]`"
                    )
                names.add(name)
