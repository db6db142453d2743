"""OpenAI's API behind a gateway of the Gateway API: its route, and how it verifies routers."""

import base64
from collections.abc import Callable
from typing import Any

import helm_python as helm
import pytest

from tests.helm.rendered import Rendered, values_of

API = {"gateway": {"listen": "[::]:8080"}}
ROUTE = {"parentRefs": [{"name": "eg"}]}


def test_the_default_has_no_route(default: Rendered) -> None:
    assert "gateway-httproute.yaml" not in default
    assert "gateway-backendtlspolicy.yaml" not in default


def test_the_route_leads_to_the_api_and_cuts_no_answer(render: Callable[..., Rendered]) -> None:
    rendered = render(**values_of("gateway-route"))
    route = rendered["gateway-httproute.yaml"]["spec"]
    assert route["parentRefs"] == [{"name": "inference-gateway"}]
    (rule,) = route["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    (backend,) = rule["backendRefs"]
    service = rendered["service.yaml"]
    (port,) = [each for each in service["spec"]["ports"] if each["name"] == "http"]
    assert backend == {"name": service["metadata"]["name"], "port": port["port"]}


def test_the_gateway_verifies_the_certificate_by_a_config_map(
    render: Callable[..., Rendered],
) -> None:
    """A ConfigMap with ca.crt is what Gateway API's core supports; Istio refuses a Secret."""
    rendered = render(**values_of("gateway-route"))
    policy = rendered["gateway-backendtlspolicy.yaml"]["spec"]
    service = rendered["service.yaml"]
    assert policy["targetRefs"] == [
        {
            "group": "",
            "kind": "Service",
            "name": service["metadata"]["name"],
            "sectionName": "http",
        }
    ]
    ca = rendered["ca-configmap.yaml"]
    (reference,) = policy["validation"]["caCertificateRefs"]
    assert reference == {"group": "", "kind": "ConfigMap", "name": ca["metadata"]["name"]}
    secret = rendered["tls-secret.yaml"]["data"]
    assert ca["data"]["ca.crt"] == base64.b64decode(secret["ca.crt"]).decode()
    assert policy["validation"]["hostname"] == "demo-kvroute.inference.svc"


def test_each_rendering_makes_one_ca(chart: helm.Chart) -> None:
    for _ in range(2):
        rendered = Rendered(chart, {})
        secret = rendered["tls-secret.yaml"]["data"]
        made = rendered["ca-configmap.yaml"]["data"]["ca.crt"]
        assert made == base64.b64decode(secret["ca.crt"]).decode()


def test_a_route_without_tls_needs_no_policy(render: Callable[..., Rendered]) -> None:
    rendered = render(config=API, gatewayRoute=ROUTE, tls={"enabled": False})
    assert "gateway-httproute.yaml" in rendered
    assert "gateway-backendtlspolicy.yaml" not in rendered
    assert "ca-configmap.yaml" not in rendered


@pytest.mark.parametrize(
    "tls",
    [
        {"existingSecret": "mine"},
        {"certManager": {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "i"}}},
    ],
)
def test_the_ca_of_a_certificate_of_ones_own_is_named(
    chart: helm.Chart, render: Callable[..., Rendered], tls: dict[str, Any]
) -> None:
    values = {"config": API, "gatewayRoute": ROUTE, "tls": tls}
    with pytest.raises(helm.HelmRenderError, match=r"needs gatewayRoute\.caConfigMap"):
        chart.render(values)
    rendered = render(**{**values, "gatewayRoute": ROUTE | {"caConfigMap": "cas"}})
    policy = rendered["gateway-backendtlspolicy.yaml"]["spec"]
    assert policy["validation"]["caCertificateRefs"][0]["name"] == "cas"
    assert "ca-configmap.yaml" not in rendered


def test_routes_that_can_not_work_are_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"needs config\.gateway\.listen"):
        chart.render({"gatewayRoute": ROUTE})
    mutual = {"existingSecret": "mine", "clientCertificates": True}
    named = {"config": API, "gatewayRoute": ROUTE | {"caConfigMap": "cas"}, "tls": mutual}
    with pytest.raises(helm.HelmRenderError, match="brings no certificate of the gateway"):
        chart.render(named)
