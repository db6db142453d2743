"""The chart as a whole: linted, accepted by Kubernetes, named, noted, with a schema."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml

from router.config.keys import keys
from router.config.reading import Config
from router.config.settings.configurations import RelayConfig, ServeConfig
from router.decide.policies import POLICIES
from tests.helm.config_schema import SCHEMA_FILE, as_text, config_definitions
from tests.helm.package import NOT_IN_KUBERNETES
from tests.helm.rendered import CHART, EXAMPLES, Object, Rendered, values_of

KUBERNETES_VERSIONS = ("1.30", "1.34", kubernetes_validate.latest_version())


CLUSTER_KINDS = {"ClusterRole", "ClusterRoleBinding"}


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
        if document["kind"] not in NOT_IN_KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_names_and_labels_are_the_releases_own(render: Callable[..., Rendered], name: str) -> None:
    rendered = render(**values_of(name))
    names = set()
    for document in rendered.by_template.values():
        metadata = document["metadata"]
        assert metadata["name"].startswith("demo-kvroute")
        if document["kind"] in CLUSTER_KINDS:
            assert "namespace" not in metadata
            assert "inference" in metadata["name"]
        else:
            assert metadata["namespace"] == "inference"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        names.add((document["kind"], metadata["name"]))
    assert len(names) == len(rendered.by_template)


def test_every_template_is_rendered_by_some_example(render: Callable[..., Rendered]) -> None:
    templates = {path.name for path in (CHART / "templates").glob("*.yaml")}
    rendered = {t for name in EXAMPLES for t in render(**values_of(name)).by_template}
    assert rendered == templates


def test_service_account_has_no_token(default: Rendered, render: Callable[..., Rendered]) -> None:
    account = default["serviceaccount.yaml"]
    assert account["automountServiceAccountToken"] is False
    assert default.pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
    given = render(serviceAccount={"create": False, "name": "mine"})
    assert "serviceaccount.yaml" not in given
    assert given.pod["spec"]["serviceAccountName"] == "mine"


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
    key = 'grpcurl -cacert ca.crt -H "Authorization: Bearer $(cat token)" localhost:50051'
    assert f"{key} kvroute.v1.Fleet/ListWorkers" in production.notes
    assert "dns:///demo-kvroute-headless.inference.svc:50051" in production.notes
    assert "--nats tls://nats.messaging:4222 --fleet chat-eu" in production.notes


def test_notes_say_what_an_embedded_nats_server_can_not_do(
    default: Rendered, small_fleet: Rendered, production: Rendered
) -> None:
    assert "config.nats.url is empty" in default.notes
    assert "UNAVAILABLE" in default.notes
    assert "config.nats.url is empty" in small_fleet.notes
    assert "UNAVAILABLE" not in small_fleet.notes
    assert "config.nats.url is empty" not in production.notes


def test_notes_name_the_engines_that_a_release_has(render: Callable[..., Rendered]) -> None:
    """UNAVAILABLE is foretold where no engine can ever come, and nowhere else."""
    worker = {"id": "a", "engine": "vllm", "address": "http://a:8000"}
    workers = {"workers": [worker, {**worker, "id": "b", "address": "http://b:8000"}]}
    selected = {"discovery": {"kubernetes": {"enabled": True, "selector": "app=vllm"}}}
    other = {"kubernetes": {"enabled": True, "pool": "qwen", "namespace": "gpu"}}
    url = {"nats": {"url": "tls://nats:4222"}}
    for configured in product((False, True), repeat=3):
        config = {}
        for part, wanted in zip((workers, selected, url), configured, strict=True):
            config |= part if wanted else {}
        notes = render(config=config).notes
        assert ("UNAVAILABLE" in notes) == (not any(configured)), configured
        assert ("2 of config.workers" in notes) == (configured[0] and not configured[2])
        assert ("with\napp=vllm" in notes) == configured[1]
        assert ("a second replica" in notes) == (not configured[2])
    notes = render(config={"discovery": other}).notes
    assert "pods of the namespace gpu in the\nInferencePool qwen" in notes


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
        ({"config": {"index": {"memory_mib": 0}}}, "at '/config/index/memory_mib'"),
        ({"config": {"routing": {"policy": "foo"}}}, "at '/config/routing/policy'"),
        ({"config": {"routing": {"shadow_policy": "foo"}}}, "at '/config/routing/shadow_policy'"),
        (
            {"config": {"models": [{"name": "m", "routing": {"policy": "foo"}}]}},
            "at '/config/models/0/routing",
        ),
    ],
)
def test_schema_names_the_key_that_is_wrong(
    chart: helm.Chart, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(helm.HelmValuesError, match=complaint):
        chart.render(values)


@pytest.mark.parametrize("policy", [*POLICIES, "mine.policies:by_rack"])
def test_schema_takes_every_policy_and_those_of_ones_own(policy: str) -> None:
    """Else a release would be refused that routers start with."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    checks = jsonschema.Draft202012Validator(schema["$defs"]["RoutingSettings"])
    checks.validate({"policy": policy, "shadow_policy": None, "prefill_policy": policy})


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
