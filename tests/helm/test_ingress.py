"""OpenAI's API behind an ingress controller."""

from collections.abc import Callable

import helm_python as helm
import kubernetes_validate
import pytest

from tests.helm.rendered import Rendered

API = {"gateway": {"listen": "[::]:8080"}}


def test_the_default_has_no_ingress(default: Rendered) -> None:
    assert "ingress.yaml" not in default


@pytest.mark.parametrize("hosts", [[], ["api.example.org", "llm.example.org"]])
def test_an_ingress_leads_to_the_api_alone(
    render: Callable[..., Rendered], hosts: list[str]
) -> None:
    backend = {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}
    rendered = render(
        config=API,
        ingress={
            "enabled": True,
            "className": "nginx",
            "annotations": backend,
            "hosts": hosts,
            "tlsSecret": "api-tls",
        },
    )
    ingress = rendered["ingress.yaml"]
    kubernetes_validate.validate(ingress, kubernetes_validate.latest_version(), strict=True)
    assert ingress["metadata"]["annotations"] == backend
    spec = ingress["spec"]
    assert spec["ingressClassName"] == "nginx"
    assert spec["tls"] == [{"secretName": "api-tls", **({"hosts": hosts} if hosts else {})}]
    assert [rule.get("host") for rule in spec["rules"]] == (hosts or [None])
    service = rendered["service.yaml"]
    for rule in spec["rules"]:
        (path,) = rule["http"]["paths"]
        assert (path["path"], path["pathType"]) == ("/v1", "Prefix")
        assert path["backend"]["service"] == {
            "name": service["metadata"]["name"],
            "port": {"name": "http"},
        }
    assert "http" in [port["name"] for port in service["spec"]["ports"]]


def test_an_ingress_of_the_defaults_names_no_class_and_no_certificate(
    render: Callable[..., Rendered],
) -> None:
    spec = render(config=API, ingress={"enabled": True})["ingress.yaml"]["spec"]
    assert spec.keys() == {"rules"}


def test_an_ingress_without_the_api_is_refused(render: Callable[..., Rendered]) -> None:
    with pytest.raises(
        helm.HelmRenderError, match=r"ingress\.enabled needs config\.gateway\.listen"
    ):
        render(ingress={"enabled": True})
