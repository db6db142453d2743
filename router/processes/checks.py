"""What a process refuses to start with, beyond what a configuration's types say."""

import logging
import os
from pathlib import Path

from events.plane.broker import Broker
from events.plane.nats_check import without_secret
from events.plane.settings import EngineSettings, NatsSettings, unusable
from router.config.keys import ConfigError

log = logging.getLogger("kvroute")


def checked_broker(settings: NatsSettings, url: str, name: str) -> Broker:
    """A connection yet to be made; raises ConfigError for one that never could be."""
    broker = Broker(settings, url, name)
    try:
        if broker.check():
            log.warning(
                "nats.allow_plaintext is set: the network can read all that goes to and from %s,"
                " credentials and prompts included",
                without_secret(url),
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"nats: {error}") from error
    return broker


def check_engine(settings: EngineSettings) -> None:
    """Raises ConfigError when an engine can never be followed as it is configured."""
    if error := unusable(settings):
        raise ConfigError(f"worker {settings.id!r}: {error}")


def checked_file(name: str, key: str) -> Path:
    """A file that can be written in its folder; raises ConfigError."""
    path = Path(name)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"can't write to {name} - at `$.{key}`")
    return path
