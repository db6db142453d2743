"""The example engine and the relay beside it."""

import json
from collections.abc import Callable
from pathlib import Path

import helm_python as helm
import pytest

from events.relay.ledger_file import FILE_BYTES_MAX
from router.config.keys import keys
from router.config.settings.configurations import RelayConfig
from tests.helm.quantities import bytes_of
from tests.helm.rendered import Rendered, program_config, values_of

# --- example-engine.yaml --------------------------------------------------------------------------


def test_example_engine_is_optional_and_needs_a_nats_server(
    default: Rendered, chart: helm.Chart
) -> None:
    assert "example-engine.yaml" not in default
    with pytest.raises(
        helm.HelmRenderError, match=r"exampleEngine\.enabled needs config\.nats\.url"
    ):
        chart.render({"exampleEngine": {"enabled": True}})


def test_example_engine_publishes_where_its_relay_listens(with_engine: Rendered) -> None:
    (engine,) = with_engine["example-engine.yaml"]["spec"]["template"]["spec"]["containers"]
    assert engine["command"] == ["vllm", "serve"]
    args = engine["args"]
    assert args[0] == "Qwen/Qwen3-0.6B"
    assert "--enable-prompt-tokens-details" in args
    assert "--max-num-seqs=256" in args
    events = json.loads(args[args.index("--kv-events-config") + 1])
    assert events == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "kv-events",
    }
    relay = relay_flags(with_engine)
    assert relay["--slots"] == "256", "or dynamo-adaptive knows no full worker"
    assert relay["--events"] == events["endpoint"].replace("*", "127.0.0.1")
    assert relay["--replay"] == events["replay_endpoint"].replace("*", "127.0.0.1")
    assert relay["--address"].endswith(f":{engine['ports'][0]['containerPort']}")


def relay_flags(rendered: Rendered) -> dict[str, str]:
    command, *flags = rendered.relay["args"]
    assert command == "relay"
    return dict(flag.split("=", 1) for flag in flags)


def test_relay_takes_its_identity_from_the_pod(with_engine: Rendered) -> None:
    flags = relay_flags(with_engine)
    assert flags["--worker-id"] == "$(POD_NAME)"
    assert flags["--address"] == "http://$(POD_IP):8000"
    fields = {
        variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in with_engine.relay["env"]
        if "fieldRef" in variable.get("valueFrom", {})
    }
    assert fields == {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}


def test_relay_joins_the_routers_fleet(with_engine: Rendered, tmp_path: Path) -> None:
    flags = relay_flags(with_engine)
    config = program_config(with_engine, tmp_path)
    assert flags["--fleet"] == config.fleet.name
    assert flags["--nats"] == config.nats.url
    assert with_engine.relay["image"] == with_engine.router["image"]


def test_relay_starts_before_its_engine_and_leaves_after_it(with_engine: Rendered) -> None:
    assert with_engine.relay["restartPolicy"] == "Always"
    assert "startupProbe" not in with_engine.relay


def test_relay_keeps_its_map_for_as_long_as_the_pod_lives(with_engine: Rendered) -> None:
    assert "--state-dir" in {key.flag for key in keys(RelayConfig)}
    folder = relay_flags(with_engine)["--state-dir"]
    mounts = {m["mountPath"]: m["name"] for m in with_engine.relay["volumeMounts"]}
    pod = with_engine["example-engine.yaml"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (kind,) = set(volumes[mounts[folder]]) - {"name"}
    assert kind == "emptyDir"
    # A pod over the limit is evicted, with its engine: so no file, written again, may come near it.
    assert bytes_of(volumes[mounts[folder]][kind]["sizeLimit"]) >= 2 * FILE_BYTES_MAX


def test_relay_can_do_without_its_map(render: Callable[..., Rendered]) -> None:
    values = values_of("vllm-with-relay")
    values["exampleEngine"]["relay"] = {"state": {"enabled": False}}
    rendered = render(**values)
    assert "--state-dir" not in relay_flags(rendered)
    assert "relay-state" not in json.dumps(rendered["example-engine.yaml"])


def test_relay_is_as_confined_as_the_router(with_engine: Rendered) -> None:
    confined = with_engine.router["securityContext"].items()
    assert with_engine.relay["securityContext"].items() >= confined
    assert with_engine.relay["securityContext"]["runAsNonRoot"] is True
    pod = with_engine["example-engine.yaml"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
