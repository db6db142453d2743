"""Engines that a caller may have a router call."""

from typing import Any

import pytest

from events.plane.settings import EngineSettings
from router.config.keys import ConfigError
from router.net.keys.networks import check_engine_networks, networks_of
from router.request.refusal import Reason, Refusal

NETWORKS = networks_of("10.0.0.0/8, fd00::/8,169.254.0.0/16, 100.64.0.0/10")


def engine(**about: Any) -> EngineSettings:
    return EngineSettings(
        **{"id": "w", "engine": "vllm", "address": "http://10.0.0.1:8000"} | about
    )


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"events": "tcp://10.1.2.3:5557", "replay": "tcp://[fd00::1]:5558"},
        {"address": "http://[::ffff:10.0.0.1]:8000"},
        {"address": "grpc://10.0.0.1:1", "metrics": "http://10.0.0.2"},
    ],
)
def test_engines_in_listed_networks_are_taken(about: dict[str, Any]) -> None:
    check_engine_networks(engine(**about), NETWORKS)


@pytest.mark.parametrize(
    ("field", "endpoint"),
    [
        ("address", "http://127.0.0.1:8000"),
        ("address", "http://192.168.0.1:8000"),
        ("address", "http://engine.example:8000"),
        ("address", "http://localhost:8000"),
        ("address", "http://169.254.169.254/latest/meta-data"),
        ("address", "http://169.254.1.1"),
        ("address", "http://[fe80::1]:80"),
        ("address", "http://[::ffff:127.0.0.1]:80"),
        ("address", "http://[::ffff:169.254.169.254]:80"),
        ("address", "http://[fd00:ec2::254]"),
        ("address", "http://100.100.100.200"),
        ("address", "http://0.0.0.0:1"),
        ("address", "http://10.0.0.1@127.0.0.1:1"),
        ("address", "http://2130706433"),
        ("address", "http://0x7f000001"),
        ("metrics", "http://192.168.0.1"),
        ("events", "tcp://192.168.0.1:5557"),
        ("events", "ipc:///run/engine"),
        ("load", "tcp://127.0.0.1:5559"),
        ("bootstrap_host", "192.168.0.1"),
    ],
)
def test_every_other_address_is_refused_with_its_field(field: str, endpoint: str) -> None:
    with pytest.raises(Refusal) as refused:
        check_engine_networks(engine(**{field: endpoint}), NETWORKS)
    assert refused.value.reason is Reason.INVALID_FIELD
    assert refused.value.metadata == {"field": field}


def test_without_networks_no_engine_is_taken_and_the_key_is_named() -> None:
    with pytest.raises(Refusal, match=r"fleet\.register_networks") as refused:
        check_engine_networks(engine(), ())
    assert refused.value.reason is Reason.PERMISSION_DENIED


def test_a_wrong_network_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"register_networks"):
        networks_of("10.0.0.1/8")
