"""Discovery in the chart: rights only where they are needed, and a configuration that is whole."""

from collections.abc import Callable
from pathlib import Path

import helm_python as helm
import pytest

from tests.helm.rendered import Object, Rendered, program_config, values_of

SELECTED = {"enabled": True, "selector": "app=vllm"}
RIGHTS = ("role", "rolebinding", "nodes-clusterrole", "nodes-clusterrolebinding")


def discovering(**changes: object) -> Object:
    return {"config": {"discovery": {"kubernetes": {**SELECTED, **changes}}}}


def test_without_discovery_there_are_no_rights_and_no_token(default: Rendered) -> None:
    for template in RIGHTS:
        assert f"{template}.yaml" not in default
    assert default.pod["spec"]["automountServiceAccountToken"] is False


def test_pods_are_all_that_may_be_read(render: Callable[..., Rendered]) -> None:
    rendered = render(**discovering())
    assert rendered["role.yaml"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    ]
    binding = rendered["rolebinding.yaml"]
    assert binding["roleRef"]["name"] == rendered["role.yaml"]["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == rendered.pod["spec"]["serviceAccountName"]
    assert subject["namespace"] == "inference"
    assert rendered.pod["spec"]["automountServiceAccountToken"] is True
    assert "nodes-clusterrole.yaml" not in rendered


def test_a_pool_may_be_read_by_its_name_alone(render: Callable[..., Rendered]) -> None:
    rules = render(**discovering(selector="", pool="qwen"))["role.yaml"]["rules"]
    assert rules[1] == {
        "apiGroups": ["inference.networking.k8s.io"],
        "resources": ["inferencepools"],
        "resourceNames": ["qwen"],
        "verbs": ["get"],
    }


def test_nodes_are_a_switch_of_their_own(render: Callable[..., Rendered]) -> None:
    rendered = render(**discovering(rack_label="topology.kubernetes.io/rack"))
    assert rendered["nodes-clusterrole.yaml"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
    ]
    binding = rendered["nodes-clusterrolebinding.yaml"]
    assert binding["roleRef"]["name"] == rendered["nodes-clusterrole.yaml"]["metadata"]["name"]


def test_pods_of_another_namespace_are_read_there(render: Callable[..., Rendered]) -> None:
    rendered = render(**discovering(namespace="engines"))
    for template in ("role.yaml", "rolebinding.yaml"):
        assert rendered[template]["metadata"]["namespace"] == "engines"
    (subject,) = rendered["rolebinding.yaml"]["subjects"]
    assert subject["namespace"] == "inference"


def test_a_pool_that_the_chart_makes_brings_selector_and_ports(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    pool = {"create": True, "matchLabels": {"app": "vllm", "tier": "gpu"}, "targetPorts": [8001]}
    rendered = render(inferencePool=pool, config={"discovery": {"kubernetes": {"enabled": True}}})
    kubernetes = program_config(rendered, tmp_path).discovery.kubernetes
    assert kubernetes.selector == "app=vllm,tier=gpu"
    assert kubernetes.ports == (8001,)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"selector": ""}, "either a selector or a pool"), ({"pool": "x"}, "either a selector")],
)
def test_pods_are_named_once(chart: helm.Chart, changes: Object, complaint: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=complaint):
        chart.render(discovering(**changes))


def test_the_default_account_of_a_namespace_gets_no_rights(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match="service account of its own"):
        chart.render({**discovering(), "serviceAccount": {"create": False}})


def test_the_network_policy_lets_out_to_engines_and_to_kubernetes(
    render: Callable[..., Rendered],
) -> None:
    api = [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    engines = [{"podSelector": {"matchLabels": {"app": "vllm"}}}]
    policy = {"enabled": True, "kubernetesTo": api, "enginesTo": engines, "enginePorts": []}
    rendered = render(**discovering(ports=[8000, 8001]), networkPolicy=policy)
    _, to_engines, to_api = rendered["networkpolicy.yaml"]["spec"]["egress"]
    assert to_engines["to"] == engines
    assert [port["port"] for port in to_engines["ports"]] == [8000, 5557, 5558, 8001, 5559]
    assert to_api["to"] == api
    assert [port["port"] for port in to_api["ports"]] == [443, 6443]


def test_values_that_name_a_default_name_the_programs(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    kubernetes = program_config(render(**discovering()), tmp_path).discovery.kubernetes
    usual = type(kubernetes)(enabled=True, selector="app=vllm")
    assert kubernetes == usual


def test_examples_with_discovery_name_their_engines_in_the_network_policy(
    render: Callable[..., Rendered],
) -> None:
    for name in ("gateway-vllm", "sglang-pairs"):
        rendered = render(**values_of(name))
        rules = rendered["networkpolicy.yaml"]["spec"]["egress"]
        assert [rule for rule in rules if rule.get("to")]
