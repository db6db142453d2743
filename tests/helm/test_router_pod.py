"""The router's Deployment: probes, ends, image, memory, placing."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from tests.helm.quantities import bytes_of
from tests.helm.rendered import CHART, EXAMPLES, Rendered, program_config, values_of


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


def test_probes_call_the_plain_port(default: Rendered) -> None:
    calls = {
        name: default.router[f"{name}Probe"]["httpGet"]
        for name in ("startup", "readiness", "liveness")
    }
    assert calls == {
        "startup": {"port": "probes", "path": "/readyz"},
        "readiness": {"port": "probes", "path": "/readyz"},
        "liveness": {"port": "probes", "path": "/livez"},
    }
    assert "probes" not in {port["name"] for port in default["service.yaml"]["spec"]["ports"]}


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
    needed_s = stopping_s(rendered, tmp_path)
    assert needed_s + 10 <= rendered.pod["spec"]["terminationGracePeriodSeconds"] < needed_s + 12


def stopping_s(rendered: Rendered, folder: Path) -> float:
    """The longest time from a pod's deletion to its router's end, by the program's own settings."""
    config = program_config(rendered, folder)
    drains = [0.0]
    if config.gateway.listen:
        drains.append(config.requests.drain_timeout_s)
    if config.picker.listen:
        drains.append(config.requests.accept_after_stop_s + config.requests.drain_timeout_s)
    pre_stop_s = rendered.values["preStopSleepSeconds"]
    return pre_stop_s + max(drains) + config.drain_timeout_s


@pytest.mark.parametrize("seed", range(12))
def test_grace_of_any_drains_is_enough_and_a_shorter_one_is_refused(
    chart: helm.Chart, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)

    def seconds(key: str, *choice: float) -> dict[str, float]:
        return rng.choice([{}, *({key: each} for each in choice)])

    config: dict[str, Any] = seconds("drain_timeout_s", 0.5, 29.5, 600)
    for section, listen in (("gateway", "[::]:8080"), ("picker", "[::]:9002")):
        config[section] = {"listen": rng.choice(["", listen])}
    config["requests"] = seconds("drain_timeout_s", 0.5, 40, 1800)
    config["requests"] |= seconds("accept_after_stop_s", 0.1, 60)
    values = {"config": config, "preStopSleepSeconds": rng.choice([0, 5, 20])}
    rendered = Rendered(chart, values)
    needed_s = stopping_s(rendered, tmp_path)
    grace_s = rendered.pod["spec"]["terminationGracePeriodSeconds"]
    assert needed_s + 10 <= grace_s < needed_s + 11, values
    chart.render({**values, "terminationGracePeriodSeconds": int(needed_s) + 1})
    with pytest.raises(helm.HelmRenderError, match="terminationGracePeriodSeconds"):
        chart.render({**values, "terminationGracePeriodSeconds": int(needed_s)})


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


def test_more_containers_stand_beside_the_router(render: Callable[..., Rendered]) -> None:
    more = {"name": "log", "image": "log:1"}
    rendered = render(
        extraContainers=[more],
        revisionHistoryLimit=2,
        service={"type": "LoadBalancer", "loadBalancerClass": "internal"},
    )
    router, beside = rendered.pod["spec"]["containers"]
    assert (router["name"], beside) == ("router", more)
    assert rendered["deployment.yaml"]["spec"]["revisionHistoryLimit"] == 2
    assert rendered["service.yaml"]["spec"]["loadBalancerClass"] == "internal"
    for document in (rendered["deployment.yaml"], rendered["service.yaml"]):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_disruption_budget_exists_only_with_several_replicas(
    default: Rendered, production: Rendered
) -> None:
    assert "poddisruptionbudget.yaml" not in default
    spec = production["poddisruptionbudget.yaml"]["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["selector"] == production["deployment.yaml"]["spec"]["selector"]
