"""The endpoint picker in the chart: its port, its Service, and the objects of gateways."""

from collections.abc import Callable
from pathlib import Path

import helm_python as helm
import pytest

from router.config.reading import load
from router.config.settings.configurations import ServeConfig
from tests.helm.rendered import Rendered

POOL = {"create": True, "matchLabels": {"app": "vllm"}}


def test_the_default_has_no_picker(default: Rendered) -> None:
    for template in ("service-picker", "inferencepool", "httproute", "istio-destinationrule"):
        assert f"{template}.yaml" not in default
    assert "picker" not in [port["name"] for port in default.router["ports"]]


def test_a_pool_is_all_that_is_needed(render: Callable[..., Rendered]) -> None:
    rendered = render(inferencePool=POOL, networkPolicy={"enabled": True})
    assert "listen: '[::]:9002'" in rendered.config_text
    spec = rendered["inferencepool.yaml"]["spec"]
    assert spec == {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {
            "name": "demo-kvroute-picker",
            "port": {"number": 9002},
            "failureMode": "FailOpen",
        },
    }
    service = rendered["service-picker.yaml"]
    assert service["metadata"]["name"] == spec["endpointPickerRef"]["name"]
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["appProtocol"]) == (9002, "kubernetes.io/h2c")
    ports = {each["name"]: each["containerPort"] for each in rendered.router["ports"]}
    assert ports["picker"] == port["port"]
    selector = service["spec"]["selector"].items()
    assert selector <= rendered.pod["metadata"]["labels"].items()


def test_only_gateways_reach_the_picker(render: Callable[..., Rendered]) -> None:
    gateways = [{"namespaceSelector": {"matchLabels": {"name": "istio-ingress"}}}]
    policy = {"enabled": True, "pickerFrom": gateways}
    rendered = render(inferencePool=POOL, networkPolicy=policy)
    rules = rendered["networkpolicy.yaml"]["spec"]["ingress"]
    (rule,) = [each for each in rules if each["ports"][0]["port"] == "picker"]
    assert rule["from"] == gateways


def test_the_picker_of_an_existing_pool(render: Callable[..., Rendered]) -> None:
    rendered = render(config={"picker": {"listen": "0.0.0.0:9900", "fallbacks": 2}})
    assert "inferencepool.yaml" not in rendered
    assert rendered["service-picker.yaml"]["spec"]["ports"][0]["port"] == 9900
    assert "fallbacks: 2" in rendered.config_text


def test_a_route_and_istios_rule(render: Callable[..., Rendered]) -> None:
    parents = [{"name": "inference-gateway"}]
    pool = POOL | {"name": "qwen", "istio": True, "httpRoute": {"parentRefs": parents}}
    rendered = render(inferencePool=pool, config={"picker": {"tls": "server"}})
    spec = rendered["httproute.yaml"]["spec"]
    assert spec["parentRefs"] == parents
    (backend,) = spec["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "qwen")
    assert rendered["inferencepool.yaml"]["metadata"]["name"] == "qwen"
    rule = rendered["istio-destinationrule.yaml"]
    # Istio completes a short name by the rule's namespace and the cluster's domain, and takes a
    # name with a dot as it is.
    assert rule["spec"]["host"] == rendered["service-picker.yaml"]["metadata"]["name"]
    assert "." not in rule["spec"]["host"]
    assert rule["metadata"]["namespace"] == rendered["service-picker.yaml"]["metadata"]["namespace"]
    assert rule["spec"]["trafficPolicy"] == {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}}


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("wanted", ["optional", "server", "mutual", None])
def test_istios_rule_is_made_where_the_picker_takes_tls_alone(
    render: Callable[..., Rendered], tls: bool, wanted: str | None
) -> None:
    rendered = render(
        inferencePool=POOL | {"istio": True},
        tls={"enabled": tls},
        config={"picker": {} if wanted is None else {"tls": wanted}},
    )
    encrypted = tls and wanted in ("server", "mutual")
    assert ("istio-destinationrule.yaml" in rendered) == encrypted
    (port,) = rendered["service-picker.yaml"]["spec"]["ports"]
    assert port["appProtocol"] == ("http2" if encrypted else "kubernetes.io/h2c")


def test_a_pool_without_pods_is_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"needs inferencePool\.matchLabels"):
        chart.render({"inferencePool": {"create": True}})


def test_the_configuration_is_one_that_the_router_takes(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(render(inferencePool=POOL).config_text)
    assert load(ServeConfig, file, {}, {}).picker.listen == "[::]:9002"
