"""Checks of the configuration at a process's start, beyond those of its types."""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from events.plane.broker import Broker
from events.plane.settings import EngineSettings, NatsSettings, Settings, unusable
from router.config.keys import ConfigError, keys, value_at
from router.config.settings.configurations import ModelSettings
from router.net.keys.followed import reason_of

WRITTEN = ("fleet.state_file", "decision_log.file")
"""Keys of files that a process writes; they need not exist."""


def checked_broker(settings: NatsSettings, url: str, name: str) -> Broker:
    """A Broker that is not connected yet; raises ConfigError for settings that can never
    connect.
    """
    broker = Broker(settings, url, name)
    try:
        broker.check()
    except (OSError, ValueError) as error:
        raise ConfigError(f"nats: {error}") from error
    return broker


def check_engine(settings: EngineSettings) -> None:
    """Raises ConfigError when a relay can never read an engine as configured."""
    if error := unusable(settings):
        raise ConfigError(f"worker {settings.id!r}: {error}")


def checked_file(name: str, key: str) -> Path:
    """The path of a file that can be written in its folder; raises ConfigError."""
    path = Path(name)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"can't write to {name} - at `$.{key}`")
    return path


def check_files(config: Settings) -> None:
    """Raises ConfigError, with its key, for the first configured file that can't be read."""
    tree = msgspec.to_builtins(config)
    for key in keys(type(config)):
        name = value_at(tree, key.path)
        is_file = key.path[-1] == "file" or key.path[-1].endswith("_file")
        if not is_file or key.dotted in WRITTEN or not isinstance(name, str):
            continue
        try:
            Path(name).open("rb").close()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{reason_of(error)} - at `$.{key.dotted}`") from error


def check_extras(models: Iterable[ModelSettings]) -> None:
    """Raises ConfigError for a model with prompts.folder where a package that reads the folder is
    missing."""
    for i, model in enumerate(models):
        if model.prompts is None or not model.prompts.folder:
            continue
        missing = [name for name in ("jinja2",) if find_spec(name) is None]
        if not any(map(find_spec, ("fastokens", "tokenizers"))):
            missing.append("fastokens")
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not installed: pip install 'kvroute[prompts]'"
                f" - at `$.models[{i}].prompts.folder`"
            )
