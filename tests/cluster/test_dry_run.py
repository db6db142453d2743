"""What the chart renders is taken by a real API server: every field, default and rule of it."""

import json
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.helm.rendered import CHART, EXAMPLES, values_of

EVERYTHING = {
    "autoscaling": {"enabled": True},
    "nats": {"server": {"enabled": True, "replicas": 3}},
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "playbookUrl": "https://docs.example/ALERTS.md"},
    "relayMonitor": {"enabled": True, "matchLabels": {"app": "engine"}},
    "inferencePool": {
        "create": True,
        "matchLabels": {"app": "engine"},
        "istio": True,
        "httpRoute": {"parentRefs": [{"name": "gateway"}], "hostnames": ["models.example"]},
    },
    "exampleEngine": {"enabled": True},
    "engineScaling": {
        "enabled": True,
        "deployment": "engine",
        "model": "model",
        "prometheus": "http://prometheus:9090",
    },
    "gatewayRoute": {"parentRefs": [{"name": "gateway"}], "caConfigMap": "ca"},
    "tls": {"certManager": {"enabled": True, "issuerRef": {"kind": "Issuer", "name": "ca"}}},
    "config": {
        "discovery": {
            "kubernetes": {"enabled": True, "selector": "app=engine", "rack_label": "rack"}
        },
        "gateway": {"listen": "[::]:8080"},
    },
    "service": {"type": "LoadBalancer"},
}
LONG = {
    "fullnameOverride": "a" * 60,
    "nats": {"server": {"enabled": True, "replicas": 3}},
    "replicaCount": 2,
    "exampleEngine": {"enabled": True},
}
CASES: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    "longest names": LONG,
    "a node's port": {"service": {"type": "NodePort"}},
} | {name: values_of(name) for name in ("default", *EXAMPLES)}


@pytest.fixture(scope="module", params=["privileged", "restricted"])
def namespace(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    name = f"dry-{request.param}"
    labels = {f"pod-security.kubernetes.io/{mode}": request.param for mode in ("enforce", "warn")}
    of_name = {"name": name, "labels": labels}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": of_name})
    # A controller makes it, which an API server alone has not.
    account = {"name": "default", "namespace": name}
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("by", [("create",), ("apply", "--server-side")], ids=["create", "apply"])
def test_the_api_server_takes_each_object(
    cluster: Cluster, namespace: str, case: str, by: tuple[str, ...]
) -> None:
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(CASES[case], name="kvroute", namespace=namespace)
    texts.pop("kvroute/templates/NOTES.txt")
    objects = [one for text in texts.values() for one in yaml.safe_load_all(text) if one]
    assert len(objects) > 5
    ran = cluster.run(
        *("kubectl", *by, "--dry-run=server", "--validate=strict", "-f", "-"),
        input="\n".join(json.dumps(one) for one in objects),
    )
    assert len(ran.stdout.splitlines()) == len(objects)
    warnings = [
        line
        for line in ran.stderr.splitlines()
        # The example's engine is vLLM's own image, which runs as root.
        if "Warning" in line and "kvroute-engine" not in line and '"vllm"' not in line
    ]
    assert not warnings
