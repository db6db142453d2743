"""The chart, linted and rendered by real Helm; what it renders, validated by Kubernetes' schemas.

Law: what the chart writes, the program reads. The rendered config.yaml is loaded by router.config,
and variables of the containers are keys of the program.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml

from events.relay.ledger_file import FILE_BYTES_MAX
from router.config.configurations import RelayConfig, ServeConfig
from router.config.keys import keys
from router.config.presets import PRESETS
from router.config.reading import Config, load
from tests.helm.config_schema import SCHEMA_FILE, as_text, config_definitions
from tests.helm.rendered import CHART, EXAMPLES, Object, Rendered, program_config, values_of

KUBERNETES_VERSIONS = ("1.30", "1.34", kubernetes_validate.latest_version())
CUSTOM_KINDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}

# --- every template, with every set of values -----------------------------------------------------


def test_helm_is_version_4() -> None:
    assert helm.helm_sdk_version().startswith("v4.")


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_lint_finds_nothing_to_warn_of(name: str) -> None:
    report = helm.lint(CHART, values_of(name), strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []  # 1: an icon is recommended


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_kubernetes_accepts_every_object(
    render: Callable[..., Rendered], name: str, version: str
) -> None:
    for document in render(**values_of(name)).by_template.values():
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, version, strict=True)


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


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_names_and_labels_are_the_releases_own(render: Callable[..., Rendered], name: str) -> None:
    rendered = render(**values_of(name))
    names = set()
    for document in rendered.by_template.values():
        metadata = document["metadata"]
        assert metadata["name"].startswith("demo-kvroute")
        assert metadata["namespace"] == "inference"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        names.add((document["kind"], metadata["name"]))
    assert len(names) == len(rendered.by_template)


def test_every_template_is_rendered_by_some_example(render: Callable[..., Rendered]) -> None:
    templates = {path.name for path in (CHART / "templates").glob("*.yaml")}
    rendered = {t for name in EXAMPLES for t in render(**values_of(name)).by_template}
    assert rendered == templates


def test_selectors_match_the_router_and_not_the_example_engine(with_engine: Rendered) -> None:
    router = with_engine.pod["metadata"]["labels"].items()
    engine = with_engine["example-engine.yaml"]["spec"]["template"]["metadata"]["labels"].items()
    for template in ("service.yaml", "service-headless.yaml"):
        selector = with_engine[template]["spec"]["selector"].items()
        assert selector <= router
        assert not selector <= engine
    budget = with_engine["poddisruptionbudget.yaml"]["spec"]["selector"]["matchLabels"].items()
    assert budget <= router
    assert not budget <= engine


# --- deployment.yaml ------------------------------------------------------------------------------


def test_deployment_serves_the_mounted_file(default: Rendered) -> None:
    assert default.router["args"] == ["serve", "--config", "/etc/kvroute/config.yaml"]
    mounts = {mount["name"]: mount for mount in default.router["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in default.pod["spec"]["volumes"]}
    assert mounts["config"] == {"name": "config", "mountPath": "/etc/kvroute", "readOnly": True}
    assert volumes["config"]["configMap"]["name"] == default["configmap.yaml"]["metadata"]["name"]
    assert mounts["tmp"]["mountPath"] == "/tmp"
    assert volumes["tmp"] == {"name": "tmp", "emptyDir": {}}


def test_deployment_passes_the_restricted_pod_security_standard(default: Rendered) -> None:
    pod = default.pod["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert default.router["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {key for volume in pod["volumes"] for key in volume} <= {
        "name",
        "configMap",
        "emptyDir",
        "secret",
    }


def test_deployment_gives_the_pod_no_token_and_no_service_links(default: Rendered) -> None:
    assert default.pod["spec"]["automountServiceAccountToken"] is False
    assert default.pod["spec"]["enableServiceLinks"] is False


def test_probes_ask_the_health_service_over_grpc(default: Rendered) -> None:
    asked = {
        name: default.router[f"{name}Probe"]["grpc"]
        for name in ("startup", "readiness", "liveness")
    }
    assert asked == {
        "startup": {"port": 50051, "service": "readiness"},
        "readiness": {"port": 50051, "service": "readiness"},
        "liveness": {"port": 50051, "service": "liveness"},
    }


def test_startup_probe_outlasts_the_ready_timeout(
    default: Rendered, chart: helm.Chart, tmp_path: Path
) -> None:
    probe = default.router["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > (
        program_config(default, tmp_path).ready_timeout_s
    )
    with pytest.raises(helm.HelmRenderError, match=r"config\.ready_timeout_s"):
        chart.render({"config": {"ready_timeout_s": 120}})


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_termination_grace_outlasts_pre_stop_and_drain(
    render: Callable[..., Rendered], name: str, tmp_path: Path
) -> None:
    rendered = render(**values_of(name))
    pre_stop_s = rendered.router["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = program_config(rendered, tmp_path).drain_timeout_s
    assert rendered.pod["spec"]["terminationGracePeriodSeconds"] > pre_stop_s + drain_s


def test_a_termination_grace_shorter_than_the_drain_is_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"terminationGracePeriodSeconds \(35\)"):
        chart.render({"terminationGracePeriodSeconds": 35})


def test_pre_stop_can_be_left_out(render: Callable[..., Rendered]) -> None:
    rendered = render(preStopSleepSeconds=0, terminationGracePeriodSeconds=31)
    assert "lifecycle" not in rendered.router
    assert rendered.pod["spec"]["terminationGracePeriodSeconds"] == 31


def test_checksum_changes_with_the_configuration_and_with_nothing_else(
    default: Rendered, render: Callable[..., Rendered]
) -> None:
    assert re.fullmatch("[0-9a-f]{64}", default.checksum)
    assert render(config={"log": {"level": "debug"}}).checksum != default.checksum
    assert render(podLabels={"color": "blue"}).checksum == default.checksum


def test_image_is_named_by_tag_or_by_digest(
    default: Rendered, production: Rendered, render: Callable[..., Rendered], chart: helm.Chart
) -> None:
    assert default.router["image"] == f"kvroute/kvroute:{chart.metadata['appVersion']}"
    assert render(image={"tag": "edge"}).router["image"] == "kvroute/kvroute:edge"
    assert re.fullmatch("kvroute/kvroute@sha256:[0-9a-f]{64}", production.router["image"])
    assert production.pod["spec"]["imagePullSecrets"] == [{"name": "registry-key"}]


def test_default_image_tag_is_the_programs_release() -> None:
    pyproject = (CHART.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    release = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    assert f'\nversion = "{release}"\n' in pyproject


def test_memory_is_limited_and_cpu_is_not(default: Rendered) -> None:
    resources = default.router["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert set(resources["limits"]) == {"memory"}


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_memory_has_room_for_the_index_and_the_rest_of_the_process(
    render: Callable[..., Rendered], name: str, tmp_path: Path
) -> None:
    rendered = render(**values_of(name))
    limit = bytes_of(rendered.router["resources"]["limits"]["memory"])
    assert limit - program_config(rendered, tmp_path).index.bytes_max() >= 512 << 20


def bytes_of(quantity: str) -> int:
    assert quantity[-2:] in ("Mi", "Gi")
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]


@pytest.mark.parametrize(
    ("limit", "memory_mib"),
    [
        ("5Gi", 4096),
        ("4608Mi", 4096),
        ("4.5Gi", 4096),
        ("5G", 4256),
        ("4831838208", 4096),
        (4831838208, 4096),
        ("5e9", 4256),
        ("1Ti", 1 << 16),
    ],
)
def test_a_memory_limit_that_holds_the_index_is_taken_in_any_spelling(
    render: Callable[..., Rendered], limit: str | int, memory_mib: int
) -> None:
    rendered = render(
        resources={"limits": {"memory": limit}}, config={"index": {"memory_mib": memory_mib}}
    )
    assert rendered.router["resources"]["limits"]["memory"] == limit


@pytest.mark.parametrize(
    ("limit", "memory_mib"),
    [("4Gi", 4096), ("4607Mi", 4096), ("5G", 4257), (4831838207, 4096), ("900M", 512)],
)
def test_a_memory_limit_that_the_index_would_exceed_is_refused(
    chart: helm.Chart, limit: str | int, memory_mib: int
) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"lower config\.index\.memory_mib"):
        chart.render(
            {
                "resources": {"limits": {"memory": limit}},
                "config": {"index": {"memory_mib": memory_mib}},
            }
        )


@pytest.mark.parametrize("limit", ["lots", "5gb", "Gi", "5 Gi"])
def test_a_memory_limit_that_is_no_quantity_is_refused(chart: helm.Chart, limit: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=f"{limit} is no quantity"):
        chart.render({"resources": {"limits": {"memory": limit}}})


def test_memory_may_go_without_a_limit(render: Callable[..., Rendered]) -> None:
    rendered = render(resources={"limits": None})
    assert not rendered.router["resources"].get("limits")
    rendered = render(resources={"limits": {"memory": None, "cpu": 2}})
    assert rendered.router["resources"]["limits"] == {"cpu": 2}


def test_routers_spread_by_their_own_labels(production: Rendered) -> None:
    (constraint,) = production.pod["spec"]["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/zone"
    own = production["deployment.yaml"]["spec"]["selector"]["matchLabels"]
    assert constraint["labelSelector"]["matchLabels"] == own


def test_a_spread_with_a_selector_of_its_own_keeps_it(render: Callable[..., Rendered]) -> None:
    constraint = {
        "maxSkew": 2,
        "topologyKey": "rack",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app": "other"}},
    }
    rendered = render(topologySpreadConstraints=[constraint])
    assert rendered.pod["spec"]["topologySpreadConstraints"] == [constraint]


def test_what_an_operator_adds_to_the_pod_arrives(render: Callable[..., Rendered]) -> None:
    toleration = {"key": "inference", "operator": "Exists"}
    affinity = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    rendered = render(
        commonLabels={"team": "inference"},
        podLabels={"color": "blue"},
        podAnnotations={"note": "here"},
        extraEnv=[{"name": "KVROUTE_LOG_LEVEL", "value": "debug"}],
        extraVolumes=[{"name": "more", "emptyDir": {}}],
        extraVolumeMounts=[{"name": "more", "mountPath": "/more"}],
        nodeSelector={"disk": "fast"},
        tolerations=[toleration],
        affinity=affinity,
        priorityClassName="high",
    )
    pod = rendered.pod
    assert pod["metadata"]["labels"].items() >= {"team": "inference", "color": "blue"}.items()
    assert pod["metadata"]["annotations"]["note"] == "here"
    assert rendered.router["env"] == [{"name": "KVROUTE_LOG_LEVEL", "value": "debug"}]
    assert {"name": "more", "emptyDir": {}} in pod["spec"]["volumes"]
    assert {"name": "more", "mountPath": "/more"} in rendered.router["volumeMounts"]
    assert pod["spec"]["nodeSelector"] == {"disk": "fast"}
    assert pod["spec"]["tolerations"] == [toleration]
    assert pod["spec"]["affinity"] == affinity
    assert pod["spec"]["priorityClassName"] == "high"


# --- configmap.yaml, and how the broker is reached ------------------------------------------------


def test_configuration_arrives_in_the_program_as_it_was_given(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    rendered = render(
        config={
            "fleet": {"beat_timeout_s": 1.5, "workers_max": 1_000_000},
            "routing": {"policy": "least-loaded", "seed": 7, "prompt_tokens_max": 10_000_000},
            "models": [{"name": "m", "aliases": ["a", "b"], "block_size": 64}],
        }
    )
    config = program_config(rendered, tmp_path)
    assert config.fleet.beat_timeout_s == 1.5
    assert config.fleet.workers_max == 1_000_000
    assert config.routing.policy == "least-loaded"
    assert config.routing.seed == 7
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
    assert config.grpc.max_connection_age_s == usual.grpc.max_connection_age_s
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


# --- services, account, budget --------------------------------------------------------------------


def test_service_exposes_grpc_and_metrics(default: Rendered) -> None:
    ports = {port["name"]: port for port in default["service.yaml"]["spec"]["ports"]}
    assert {name: port["port"] for name, port in ports.items()} == {"grpc": 50051, "metrics": 9464}
    assert all(port["targetPort"] == name for name, port in ports.items())
    assert ports["grpc"]["appProtocol"] == "grpc"


def test_headless_service_lists_ready_routers_for_grpc_alone(default: Rendered) -> None:
    spec = default["service-headless.yaml"]["spec"]
    assert spec["clusterIP"] == "None"
    assert not spec.get("publishNotReadyAddresses")
    assert [port["name"] for port in spec["ports"]] == ["grpc"]


def test_ports_follow_the_listen_addresses(render: Callable[..., Rendered]) -> None:
    rendered = render(
        config={"grpc": {"listen": "0.0.0.0:6000"}, "metrics": {"listen": "[::]:6001"}},
        networkPolicy={"enabled": True},
    )
    assert [port["port"] for port in rendered["service.yaml"]["spec"]["ports"]] == [6000, 6001]
    assert rendered.router["livenessProbe"]["grpc"]["port"] == 6000
    assert [port["containerPort"] for port in rendered.router["ports"]] == [6000, 6001]


def test_without_a_metrics_endpoint_nothing_speaks_of_metrics(
    render: Callable[..., Rendered], chart: helm.Chart
) -> None:
    values: dict[str, Any] = {"config": {"metrics": {"listen": ""}}}
    rendered = render(**values, networkPolicy={"enabled": True})
    assert [port["name"] for port in rendered["service.yaml"]["spec"]["ports"]] == ["grpc"]
    assert [port["name"] for port in rendered.router["ports"]] == ["grpc"]
    assert len(rendered["networkpolicy.yaml"]["spec"]["ingress"]) == 1
    with pytest.raises(helm.HelmRenderError, match=r"needs config\.metrics\.listen"):
        chart.render({**values, "serviceMonitor": {"enabled": True}})


def test_service_account_has_no_token(default: Rendered, render: Callable[..., Rendered]) -> None:
    account = default["serviceaccount.yaml"]
    assert account["automountServiceAccountToken"] is False
    assert default.pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
    given = render(serviceAccount={"create": False, "name": "mine"})
    assert "serviceaccount.yaml" not in given
    assert given.pod["spec"]["serviceAccountName"] == "mine"


def test_disruption_budget_exists_only_with_several_replicas(
    default: Rendered, production: Rendered
) -> None:
    assert "poddisruptionbudget.yaml" not in default
    spec = production["poddisruptionbudget.yaml"]["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["selector"] == production["deployment.yaml"]["spec"]["selector"]


# --- networkpolicy.yaml ---------------------------------------------------------------------------


def test_network_policy_is_optional(default: Rendered) -> None:
    assert "networkpolicy.yaml" not in default


def test_network_policy_lets_in_callers_and_scrapers_and_out_dns_and_nats(
    production: Rendered,
) -> None:
    spec = production["networkpolicy.yaml"]["spec"]
    assert spec["podSelector"] == production["deployment.yaml"]["spec"]["selector"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]

    def namespace(peers: list[Object]) -> str:
        (peer,) = peers
        return peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]

    grpc, metrics = spec["ingress"]
    assert grpc["ports"] == [{"port": "grpc", "protocol": "TCP"}]
    assert namespace(grpc["from"]) == "gateway"
    assert metrics["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    assert namespace(metrics["from"]) == "monitoring"
    dns, nats = spec["egress"]
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert nats["ports"] == [{"port": 4222, "protocol": "TCP"}]
    assert namespace(nats["to"]) == "messaging"


@pytest.mark.parametrize(
    ("url", "port"),
    [("nats://nats", 4222), ("tls://nats.example:14222/", 14222), ("nats://[fd00::1]", 4222)],
)
def test_network_policy_takes_the_port_from_the_nats_url(
    render: Callable[..., Rendered], url: str, port: int
) -> None:
    rendered = render(networkPolicy={"enabled": True}, config={"nats": {"url": url}})
    _, nats = rendered["networkpolicy.yaml"]["spec"]["egress"]
    assert nats == {"ports": [{"port": port, "protocol": "TCP"}]}


def test_network_policy_that_cuts_off_configured_engines_is_refused(
    chart: helm.Chart, render: Callable[..., Rendered]
) -> None:
    values = values_of("small-fleet")
    with pytest.raises(helm.HelmRenderError, match=r"networkPolicy\.extraEgress"):
        chart.render({**values, "networkPolicy": {"enabled": True}})
    rule = {"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}
    rendered = render(**values, networkPolicy={"enabled": True, "extraEgress": [rule]})
    assert rendered["networkpolicy.yaml"]["spec"]["egress"][-1] == rule


# --- servicemonitor.yaml, example-engine-podmonitor.yaml ------------------------------------------


def test_monitors_are_rendered_only_on_demand(default: Rendered, production: Rendered) -> None:
    assert "servicemonitor.yaml" not in default
    assert "servicemonitor.yaml" in production
    assert "example-engine-podmonitor.yaml" not in production


def test_service_monitor_scrapes_each_router_once_and_names_its_fleet(production: Rendered) -> None:
    monitor = production["servicemonitor.yaml"]
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    (endpoint,) = monitor["spec"]["endpoints"]
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [
        template
        for template in ("service.yaml", "service-headless.yaml")
        if selector <= production[template]["metadata"]["labels"].items()
        and endpoint["port"] in {p["name"] for p in production[template]["spec"]["ports"]}
    ]
    assert scraped == ["service.yaml"]
    assert endpoint["relabelings"] == [
        {"action": "replace", "targetLabel": "fleet", "replacement": "chat-eu"}
    ]


def test_pod_monitor_scrapes_the_relays(with_engine: Rendered) -> None:
    spec = with_engine["example-engine-podmonitor.yaml"]["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in with_engine.relay["ports"]}
    assert endpoint["relabelings"][0]["replacement"] == "default"
    engine = with_engine["example-engine.yaml"]["spec"]
    assert spec["selector"] == engine["selector"]


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


def test_variables_of_the_containers_are_keys_of_the_program(
    production: Rendered, render: Callable[..., Rendered], with_engine: Rendered
) -> None:
    def used(container: Object) -> set[str]:
        return {v["name"] for v in container.get("env", ()) if v["name"].startswith("KVROUTE_")}

    def known(config: type[Config]) -> set[str]:
        return {key.variable for key in keys(config)}

    mounted = render(**{**values_of("production"), "exampleEngine": {"enabled": True}})
    assert used(mounted.relay) == {
        "KVROUTE_LOG_FORMAT",
        "KVROUTE_NATS_CREDENTIALS_FILE",
        "KVROUTE_NATS_TLS_CA_FILE",
        "KVROUTE_NATS_TLS_CERTIFICATE_FILE",
        "KVROUTE_NATS_TLS_KEY_FILE",
    }
    assert used(mounted.relay) | used(with_engine.relay) <= known(RelayConfig)
    assert used(with_engine.router) <= known(ServeConfig)
    paths = {m["mountPath"] for m in mounted.relay["volumeMounts"]}
    assert {"/etc/kvroute-nats/credentials", "/etc/kvroute-nats/tls"} <= paths


# --- NOTES.txt ------------------------------------------------------------------------------------


def test_notes_tell_how_to_call_the_router(production: Rendered) -> None:
    assert "port-forward service/demo-kvroute 50051" in production.notes
    assert "grpcurl -plaintext localhost:50051 kvroute.v1.Fleet/ListWorkers" in production.notes
    assert "dns:///demo-kvroute-headless.inference.svc:50051" in production.notes
    assert "--nats nats://nats.messaging:4222 --fleet chat-eu" in production.notes


def test_notes_say_what_an_embedded_nats_server_can_not_do(
    default: Rendered, small_fleet: Rendered, production: Rendered
) -> None:
    assert "config.nats.url is empty" in default.notes
    assert "there are none" in default.notes
    assert "config.nats.url is empty" in small_fleet.notes
    assert "there are none" not in small_fleet.notes
    assert "config.nats.url is empty" not in production.notes


# --- values.schema.json ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replicas": 3}, "additional properties 'replicas' not allowed"),
        ({"image": {"tagg": "x"}}, "at '/image': additional properties 'tagg' not allowed"),
        ({"replicaCount": "three"}, "at '/replicaCount': got string, want integer"),
        ({"image": {"digest": "latest"}}, "at '/image/digest'"),
        ({"config": {"routing": {"polcy": "x"}}}, "at '/config/routing': .*'polcy' not allowed"),
        ({"config": {"nats": {"url": 5}}}, "at '/config/nats/url': got number, want string"),
        ({"config": {"nats": {"password": "x"}}}, "at '/config/nats': .*'password' not allowed"),
        ({"config": {"workers": [{"id": "a"}]}}, "at '/config/workers/0': missing properties"),
        ({"config": {"log": {"format": "xml"}}}, "at '/config/log/format': value must be one of"),
        ({"config": {"grpc": {"listen": "127.0.0.1:50051"}}}, "at '/config/grpc/listen'"),
        ({"exampleEngine": {"relay": {"tag": "x"}}}, "at '/exampleEngine/relay': .*'tag'"),
        ({"config": {"index": {"worker_percent": 101}}}, "at '/config/index/worker_percent'"),
    ],
)
def test_schema_names_the_key_that_is_wrong(
    chart: helm.Chart, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(helm.HelmValuesError, match=complaint):
        chart.render(values)


def test_schema_is_a_schema_and_covers_every_value() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert set(schema["properties"]) == {*values, "global"}
    assert schema["additionalProperties"] is False


def test_schema_of_config_is_the_programs_own() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert schema["$defs"] == config_definitions(), "run: python -m tests.helm.config_schema"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == as_text(schema) + "\n"
