"""Settings that must be turned to be safe are named by a sentence that begins with their key."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.plane.settings import Settings
from router.app.main import cli
from router.app.processes.checks import WRITTEN, check_extras, check_files
from router.app.processes.gateway_process import GatewayApp
from router.app.processes.picker_process import PickerApp
from router.app.processes.relay_process import RelayApp
from router.app.processes.risks import RISKS, warnings_of
from router.app.processes.router_process import RouterApp
from router.config.keys import ConfigError, keys, put_value
from router.config.settings.configurations import (
    GatewayConfig,
    PickerConfig,
    RelayConfig,
    ServeConfig,
)

ENGINE = {"id": "a", "engine": "vllm", "address": "http://127.0.0.1:1"}
OPEN = "0.0.0.0:1"
FAR = "tls://nats.example:4222"
KEYED = {"keys": {"file": "keys.yaml"}}
TLS = {"tls": {"certificate_file": "c", "key_file": "k"}}
QUIET = {"gateway": {"cors_origins": [], "salt": "tenant"}}
CASES: dict[str, tuple[type[Settings], dict[str, Any], dict[str, Any]]] = {
    "grpc.any_address": (
        ServeConfig,
        {"grpc": {"listen": OPEN, "any_address": True}},
        {"grpc": {"listen": "127.0.0.1:1", "any_address": True}},
    ),
    "gateway.any_address": (
        GatewayConfig,
        {"gateway": {"listen": OPEN, "any_address": True, "cors_origins": []}} | TLS,
        {"gateway": {"listen": OPEN, "any_address": True}} | TLS | KEYED,
    ),
    "tls.certificate_file": (
        ServeConfig,
        {"grpc": {"listen": "[::]:1"}} | KEYED,
        {"grpc": {"listen": "[::]:1"}} | KEYED | TLS,
    ),
    "metrics.tls": (
        ServeConfig,
        {"metrics": {"listen": OPEN}} | KEYED | TLS,
        {"metrics": {"listen": OPEN, "tls": "server"}} | KEYED | TLS,
    ),
    "picker.tls": (
        PickerConfig,
        {"picker": {"listen": OPEN, "tls": "server"}} | TLS,
        {"picker": {"listen": OPEN, "tls": "mutual"}} | TLS,
    ),
    "nats.allow_plaintext": (
        RelayConfig,
        {"nats": {"url": "nats://h:1", "user": "u", "allow_plaintext": True}},
        {"nats": {"url": FAR, "user": "u", "allow_plaintext": True}},
    ),
    "nats.credentials_file": (
        RelayConfig,
        {"nats": {"url": FAR}},
        {"nats": {"url": FAR, "credentials_file": "s"}},
    ),
    "fleet.register_networks": (
        ServeConfig,
        {"fleet": {"register_networks": "10.0.0.0/8, ::/0"}},
        {"fleet": {"register_networks": "10.0.0.0/8, fd00::/8"}},
    ),
    "grpc.unix_socket_mode": (
        ServeConfig,
        {"grpc": {"unix_socket": "s", "unix_socket_mode": "0666"}},
        {"grpc": {"unix_socket": "s", "unix_socket_mode": "0660"}},
    ),
    "gateway.pass_keys": (
        GatewayConfig,
        {"gateway": {"pass_keys": True, "salt": "tenant"}} | KEYED,
        {"gateway": {"pass_keys": True}},
    ),
    "gateway.salt": (
        ServeConfig,
        {"gateway": {"listen": OPEN}} | KEYED | TLS,
        {"gateway": {"listen": OPEN, "salt": "tenant"}} | KEYED | TLS,
    ),
    "gateway.cors_origins": (
        GatewayConfig,
        {"gateway": {"cors_origins": ["https://a.example", "*"]}},
        {"gateway": {"cors_origins": ["https://a.example"]}},
    ),
    "to_router.tls": (
        GatewayConfig,
        {"router": "127.0.0.1:1, router.example:1"} | QUIET,
        {"router": "router.example:1", "to_router": {"ca_file": "c"}},
    ),
    "tracing.endpoint": (
        PickerConfig,
        {"tracing": {"endpoint": "http://c.example:4317"}},
        {"tracing": {"endpoint": "https://c.example:4317"}},
    ),
    "decision_log.hashes": (
        ServeConfig,
        {"decision_log": {"file": "d", "hashes": True}},
        {"decision_log": {"hashes": True}},
    ),
    "workers": (ServeConfig, {"workers": []}, {"workers": [ENGINE]}),
}


def named(config: type[Settings], tree: dict[str, Any]) -> list[str]:
    if config is ServeConfig and "workers" not in tree:
        tree = {**tree, "workers": [ENGINE]}
    return [sentence.split(" ")[0] for sentence in warnings_of(msgspec.convert(tree, config))]


def test_every_risk_has_a_case() -> None:
    assert {risk.key for risk in RISKS} == CASES.keys()


@pytest.mark.parametrize("key", CASES)
def test_a_risk_is_named_where_it_is_one_and_nowhere_else(key: str) -> None:
    config, risky, safe = CASES[key]
    assert named(config, risky) == [key]
    assert key not in named(config, safe)


def test_the_gateways_plain_text_is_named_too() -> None:
    tree = {"gateway": {"listen": OPEN, "salt": "tenant"}} | KEYED
    assert named(GatewayConfig, tree) == ["tls.certificate_file"]
    assert named(ServeConfig, tree) == ["tls.certificate_file"]


@pytest.mark.parametrize("config", [RelayConfig, PickerConfig])
def test_the_defaults_are_safe(config: type[Settings]) -> None:
    assert named(config, {}) == []


def test_a_gateways_defaults_are_those_of_vllms_own_server_to_browsers() -> None:
    assert named(GatewayConfig, {}) == ["gateway.cors_origins"]


def test_the_routers_defaults_lack_workers_alone() -> None:
    assert [line.split(" ")[0] for line in warnings_of(ServeConfig())] == ["workers"]
    nats = {"nats": {"url": "nats://127.0.0.1:4222"}}
    discovery = {"discovery": {"kubernetes": {"enabled": True}}}
    networks = {"fleet": {"register_networks": "10.0.0.0/8"}}
    for tree in (nats, discovery, networks):
        assert warnings_of(msgspec.convert(tree, ServeConfig)) == []


LISTENS = st.sampled_from(["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/s", OPEN, "[::]:1", ""])


@given(grpc=LISTENS, gateway=LISTENS, picker=LISTENS, metrics=LISTENS)
def test_only_addresses_that_a_network_reaches_are_risks(**listens: str) -> None:
    tree: dict[str, Any] = {"workers": [ENGINE], "picker": {}} | KEYED
    for name, listen in listens.items():
        tree.setdefault(name, {})["listen"] = listen
    far = [name for name, listen in listens.items() if listen in (OPEN, "[::]:1")]
    seen = warnings_of(msgspec.convert(tree, ServeConfig))
    expected = ("grpc" in far) + 2 * ("gateway" in far) + ("metrics" in far) + 2 * ("picker" in far)
    assert len(seen) == expected
    assert all(OPEN in line or "[::]:1" in line or "gateway.salt" in line for line in seen)


@pytest.mark.parametrize(
    ("text", "key"),
    [("", "workers"), ("workers: []\n", "workers")],
)
def test_check_config_prints_risks_on_stderr(
    text: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text(text)
    cli(["check-config", "--config", str(file)], standalone_mode=False)
    printed = capsys.readouterr()
    assert f"kvroute: warning: {key}" in printed.err
    assert "warning" not in printed.out


FILES = [
    (config, key)
    for config in (ServeConfig, RelayConfig, GatewayConfig, PickerConfig)
    for key in keys(config)
    if key.path[-1] == "file" or key.path[-1].endswith("_file")
]
APPS: dict[type[Settings], Any] = {
    ServeConfig: RouterApp,
    RelayConfig: RelayApp,
    GatewayConfig: GatewayApp,
    PickerConfig: PickerApp,
}


@pytest.mark.parametrize(
    "place", [f for f in FILES if f[1].dotted not in WRITTEN], ids=lambda f: f[1].flag
)
def test_a_missing_file_is_named_with_its_key(place: Any, tmp_path: Path) -> None:
    config, key = place
    tree: dict[str, Any] = {}
    if config is RelayConfig:
        tree = {"workers": [ENGINE], "nats": {"url": "nats://127.0.0.1:1"}}
    put_value(tree, key.path, str(tmp_path / "none"))
    with pytest.raises(ConfigError) as refused:
        APPS[config](msgspec.convert(tree, config))
    assert str(refused.value) == (
        f"{tmp_path / 'none'}: No such file or directory - at `$.{key.dotted}`"
    )


def test_files_that_are_written_need_not_be_there(tmp_path: Path) -> None:
    check_files(
        msgspec.convert(
            {"fleet": {"state_file": "s"}, "decision_log": {"file": str(tmp_path / "d")}},
            ServeConfig,
        )
    )
    assert {*WRITTEN} <= {key.dotted for _, key in FILES}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"jinja2"}, "jinja2 not installed: pip install 'kvroute[prompts]'"),
        ({"fastokens", "tokenizers"}, "fastokens not installed"),
        ({"jinja2", "fastokens", "tokenizers"}, "jinja2 and fastokens not installed"),
        ({"fastokens"}, ""),
        ({"tokenizers"}, ""),
    ],
)
def test_prompts_of_a_folder_need_their_extra(
    missing: set[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from router.app.processes import checks

    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in missing else name)
    tree = {"models": [{"name": "a"}, {"name": "b", "prompts": {"folder": "/f"}}]}
    config = msgspec.convert(tree, ServeConfig)
    if not said:
        check_extras(config.models)
        return
    with pytest.raises(ConfigError) as refused:
        RouterApp(config)
    assert said in str(refused.value)
    assert str(refused.value).endswith("at `$.models[1].prompts.folder`")
