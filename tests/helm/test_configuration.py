"""Values become the configuration that the program loads; secrets stay in Secrets."""

from collections.abc import Callable
from pathlib import Path

import helm_python as helm
import pytest

from router.app.processes.risks import warnings_of
from router.config.reading import load
from router.config.settings.configurations import ServeConfig
from router.config.settings.presets import PRESETS
from tests.helm.rendered import EXAMPLES, Rendered, program_config, values_of


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_the_program_loads_the_rendered_configuration(
    render: Callable[..., Rendered], name: str, tmp_path: Path
) -> None:
    rendered = render(**values_of(name))
    config = program_config(rendered, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in rendered.router["ports"]}
    assert config.grpc.listen == f"[::]:{ports['grpc']}"
    assert config.metrics.listen == f"[::]:{ports['metrics']}"
    assert config.log.format == "json"


LEFT_TO_THE_CLUSTER = {
    "metrics.tls",  # NetworkPolicy, and `kubectl port-forward` to the console
    "picker.tls",  # NetworkPolicy, networkPolicy.pickerFrom
    "nats.credentials_file",  # a Secret, in the environment
    "gateway.salt",  # the token that the chart makes is of one tenant
}


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_the_chart_leaves_few_settings_to_be_turned(
    render: Callable[..., Rendered], name: str, tmp_path: Path
) -> None:
    warnings = warnings_of(program_config(render(**values_of(name)), tmp_path))
    chosen = {"default": "workers", "vllm-with-relay": "nats.allow_plaintext"}
    expected = {*LEFT_TO_THE_CLUSTER, chosen.get(name, "")}
    assert {line.split(" ")[0] for line in warnings} <= expected


# --- configmap.yaml, and how the broker is reached ------------------------------------------------


def test_configuration_arrives_in_the_program_as_it_was_given(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    rendered = render(
        config={
            "fleet": {"workers_max": 1_000_000},
            "routing": {
                "policy": "least-loaded",
                "alternatives": 7,
                "prompt_tokens_max": 10_000_000,
            },
            "models": [{"name": "m", "aliases": ["a", "b"], "block_size": 64}],
        }
    )
    config = program_config(rendered, tmp_path)
    assert config.fleet.workers_max == 1_000_000
    assert config.routing.policy == "least-loaded"
    assert config.routing.alternatives == 7
    assert config.routing.prompt_tokens_max == 10_000_000
    (model,) = config.models
    assert (model.name, model.aliases, model.block_size) == ("m", ("a", "b"), 64)


def test_engines_without_a_relay_are_named_in_the_configuration(
    small_fleet: Rendered, tmp_path: Path
) -> None:
    config = program_config(small_fleet, tmp_path)
    assert [(w.id, w.engine, w.ranks) for w in config.workers] == [
        ("vllm-0", "vllm", 1),
        ("sglang-0", "sglang", 2),
    ]
    assert config.nats.url is None


def test_values_that_name_a_default_name_the_programs(default: Rendered, tmp_path: Path) -> None:
    config, usual = program_config(default, tmp_path), ServeConfig()
    assert config.index == usual.index
    assert config.routing == usual.routing
    assert config.fleet == usual.fleet
    assert config.ready_timeout_s == usual.ready_timeout_s
    assert config.drain_timeout_s == usual.drain_timeout_s


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_all_its_keys_since_the_values_name_none_of_them(
    render: Callable[..., Rendered], tmp_path: Path, name: str
) -> None:
    config = program_config(render(config={"routing": {"preset": name}}), tmp_path)
    usual = load(ServeConfig, None, {}, {("routing", "preset"): name})
    assert config.routing == usual.routing


def test_an_engine_without_events_needs_none_in_the_configuration(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    engine = {"id": "quiet-0", "engine": "vllm", "address": "http://quiet-0:8000"}
    (worker,) = program_config(render(config={"workers": [engine]}), tmp_path).workers
    assert worker.events is None


def test_credentials_file_and_tls_come_from_mounted_secrets(
    production: Rendered, tmp_path: Path
) -> None:
    nats = program_config(production, tmp_path).nats
    mounts = {m["name"]: m["mountPath"] for m in production.router["volumeMounts"]}
    volumes = {v["name"]: v for v in production.pod["spec"]["volumes"]}
    assert nats.credentials_file == mounts["nats-credentials"] + "/nats.creds"
    assert nats.tls_ca_file == mounts["nats-tls"] + "/ca.crt"
    assert nats.tls_certificate_file == mounts["nats-tls"] + "/tls.crt"
    assert nats.tls_key_file == mounts["nats-tls"] + "/tls.key"
    assert volumes["nats-credentials"]["secret"] == {
        "secretName": "kvroute-nats",
        "defaultMode": 0o440,
        "items": [{"key": "nats.creds", "path": "nats.creds"}],
    }
    assert volumes["nats-tls"]["secret"]["secretName"] == "kvroute-nats-tls"
    assert "env" not in production.router


def test_user_and_password_come_from_a_secret_and_touch_no_configmap(
    with_engine: Rendered, tmp_path: Path
) -> None:
    sources = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]
        for variable in with_engine.router["env"]
    }
    assert sources == {
        "KVROUTE_NATS_USER": {"name": "nats-user", "key": "user"},
        "KVROUTE_NATS_PASSWORD": {"name": "nats-user", "key": "password"},
    }
    nats = program_config(with_engine, tmp_path, **dict.fromkeys(sources, "secret")).nats
    assert (nats.user, nats.password) == ("secret", "secret")


def test_a_url_with_a_password_in_it_is_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"use nats\.userSecret"):
        chart.render({"config": {"nats": {"url": "nats://me:secret@nats:4222"}}})


def test_replicas_without_a_nats_url_are_refused(chart: helm.Chart) -> None:
    with pytest.raises(
        helm.HelmRenderError, match=r"replicas can't share .* Set config\.nats\.url"
    ):
        chart.render({"replicaCount": 2})


def test_a_missing_nats_url_is_refused_where_embedding_is_forbidden(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"config\.nats\.url is empty"):
        chart.render({"nats": {"embedded": False}})
