"""Engines without GPUs, as the README has them on a cluster: helm/engines-simulated.yaml."""

from collections.abc import Callable
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from router.cluster.discovery.pods import Plan, endpoints, settings_of
from router.cluster.discovery.watched import Pod
from simulator.cli.simulate import simulate
from tests.helm.rendered import CHART, Object, Rendered, program_config, values_of

MANIFEST = CHART.parent / "engines-simulated.yaml"
CONTAINER_MUST = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.fixture
def deployment() -> Object:
    made: Object = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    return made


@pytest.fixture
def engine(deployment: Object) -> Object:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    made: Object = container
    return made


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_kubernetes_takes_them(deployment: Object, version: str) -> None:
    kubernetes_validate.validate(deployment, version, strict=True)
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels(deployment).items()


def labels(deployment: Object) -> dict[str, str]:
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


def test_they_keep_to_the_restricted_standard(deployment: Object, engine: Object) -> None:
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True  # as the image's own user, a number
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert engine["securityContext"] == CONTAINER_MUST
    assert pod["automountServiceAccountToken"] is False


def test_the_example_finds_them_where_they_listen(
    deployment: Object, engine: Object, render: Callable[..., Rendered], tmp_path: Path
) -> None:
    settings = program_config(render(**values_of("simulated")), tmp_path).discovery.kubernetes
    name, _, value = (settings.selector or "").partition("=")
    assert labels(deployment)[name] == value
    plan = Plan(settings.ports, settings.events_port, settings.replay_port, "host")
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    pod = Pod("p", "u", "10.0.0.1", "", True, False, False, labels(deployment), annotations)
    (found,) = endpoints(pod, plan)
    relay = settings_of(pod, found, plan, "vllm", {})
    words = simulate.make_context("simulate", list(engine["args"][1:])).params
    assert engine["args"][0] == "simulate"
    assert relay.address == f"http://10.0.0.1:{words['port']}"
    assert relay.events == f"tcp://10.0.0.1:{words['events_port']}"
    assert relay.replay == f"tcp://10.0.0.1:{words['events_port'] + 1}"
    assert (words["count"], words["host"]) == (1, "::")
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert ports == {
        "http": words["port"],
        "events": words["events_port"],
        "replay": words["events_port"] + 1,
    }
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > words["drain_s"] > 0


def test_they_have_the_image_of_the_chart(engine: Object, default: Rendered) -> None:
    assert engine["image"] == default.router["image"]
