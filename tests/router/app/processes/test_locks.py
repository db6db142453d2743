"""Addresses to listen on that are none are refused before anything starts."""

import random
from typing import Any

import msgspec
import pytest

from router.app.processes.locks import Locks
from router.config.keys import ConfigError
from router.config.settings.configurations import ServeConfig
from router.net.keys.exposure import split_address

KEYS = ("grpc.listen", "gateway.listen", "picker.listen", "metrics.listen", "probes.listen")
PORTS = ("", "-1", "+1", "65536", "9" * 5000, "1 ", "1_0", "0x1", "\u0665\u0660", "\u00b2", "x")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("port", PORTS, ids=map(ascii, range(len(PORTS))))
def test_a_port_that_is_none_is_refused_with_its_key(key: str, port: str) -> None:
    section, name = key.split(".")
    written: dict[str, Any] = {section: {name: f"127.0.0.1:{port}"}}
    with pytest.raises(ConfigError, match=f"is no address.*{key}"):
        Locks(msgspec.convert(written, ServeConfig))


def test_any_text_is_an_address_or_is_refused() -> None:
    rng = random.Random(20261126)
    for _ in range(5000):
        text = "".join(rng.choices("[]:.019a\u00b2\u0665 -", k=rng.randrange(12)))
        try:
            _, port = split_address(text)
        except ConfigError:
            continue
        assert 0 <= port <= 65535
