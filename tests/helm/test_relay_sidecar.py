"""The patch and the component that add a relay to a Deployment of one's own."""

import copy
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from events.plane.settings import read_engine
from router.cli.main import cli
from tests.helm.rendered import CHART, Object, Rendered

FOLDER = CHART.parent / "relay-sidecar"
ENGINES = {"vllm": 8000, "sglang": 30000}
KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name"}
"""Keys by which lists are merged (patchMergeKey in Kubernetes' API); other lists are replaced."""


def deployment(engine: str) -> Object:
    """An engine as someone may run it."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "mine", "labels": {"kvroute.io/engine": engine}},
        "spec": {
            "selector": {"matchLabels": {"app": "mine"}},
            "template": {
                "metadata": {"labels": {"app": "mine"}},
                "spec": {
                    "containers": [
                        {
                            "name": "engine",
                            "image": "engine:1",
                            "args": ["--model=m"],
                            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                        }
                    ],
                    "volumes": [{"name": "cache", "emptyDir": {}}],
                },
            },
        },
    }


def merged(target: object, patch: object, key: str = "") -> object:
    """A strategic merge, as far as these patches need it."""
    if isinstance(target, dict) and isinstance(patch, dict):
        both = {name: merged(target.get(name), value, name) for name, value in patch.items()}
        return {**target, **both}
    if isinstance(target, list) and isinstance(patch, list) and key in KEYS:
        name = KEYS[key]
        known = {one[name]: one for one in target}
        for one in patch:
            known[one[name]] = merged(known.get(one[name]), one)
        return list(known.values())
    return copy.deepcopy(patch)


def patched(engine: str) -> Object:
    """The Deployment after both patches, as kustomize and kubectl apply them."""
    patch = yaml.safe_load((FOLDER / f"{engine}.yaml").read_text())
    del patch["metadata"]
    result = merged(deployment(engine), patch)
    assert isinstance(result, dict)
    for step in yaml.safe_load((FOLDER / f"{engine}-flags.yaml").read_text()):
        assert (step["op"], step["path"]) == ("add", "/spec/template/spec/containers/0/args/-")
        result["spec"]["template"]["spec"]["containers"][0]["args"].append(step["value"])
    return result


@pytest.mark.parametrize("engine", ENGINES)
def test_kubernetes_accepts_the_patched_deployment(engine: str) -> None:
    result = patched(engine)
    kubernetes_validate.validate(result, kubernetes_validate.latest_version(), strict=True)
    pod = result["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["engine"]
    assert pod["volumes"][0]["name"] == "cache"
    (relay,) = pod["initContainers"]
    volumes = {one["name"] for one in pod["volumes"]}
    assert {mount["name"] for mount in relay["volumeMounts"]} <= volumes


@pytest.mark.parametrize(("engine", "port"), ENGINES.items())
def test_the_relays_flags_are_the_programs_and_name_the_engine(engine: str, port: int) -> None:
    (relay,) = patched(engine)["spec"]["template"]["spec"]["initContainers"]
    named = {"$(POD_NAME)": "p", "$(POD_IP)": "10.0.0.1"}
    arguments = list(relay["args"])
    for variable, value in named.items():
        arguments = [one.replace(variable, value) for one in arguments]
    result = CliRunner().invoke(cli, [*arguments, "--help"])
    assert result.exit_code == 0, result.output
    flags = dict(one.removeprefix("--").split("=", 1) for one in arguments[1:])
    assert flags["address"] == f"http://10.0.0.1:{port}"
    names = ("engine", "address", "events", "replay")
    read_engine({"id": flags["worker-id"], **{name: flags[name] for name in names}})


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_and_relay_agree_on_ports(engine: str) -> None:
    pod = patched(engine)["spec"]["template"]["spec"]
    (events,) = [one for one in pod["containers"][0]["args"] if "--kv-events-config" in one]
    relay = pod["initContainers"][0]["args"]
    for name, port in (("endpoint", 5557), ("replay_endpoint", 5558)):
        assert f'"{name}":"tcp://*:{port}"' in events
    assert "--events=tcp://127.0.0.1:5557" in relay
    assert "--replay=tcp://127.0.0.1:5558" in relay


@pytest.mark.parametrize("engine", ENGINES)
def test_the_patch_speaks_to_the_nats_of_a_release(chart: object, engine: str) -> None:
    values = {"nats": {"server": {"enabled": True}}, "exampleEngine": {"enabled": True}}
    rendered = Rendered(chart, values)  # type: ignore[arg-type]
    (relay,) = patched(engine)["spec"]["template"]["spec"]["initContainers"]
    theirs = {one["name"]: one for one in rendered.relay["env"]}
    for one in relay["env"]:
        other = theirs[one["name"]]
        if "secretKeyRef" in one.get("valueFrom", {}):
            key = other["valueFrom"]["secretKeyRef"]["key"]
            assert one["valueFrom"]["secretKeyRef"] == {"name": "kvroute-nats", "key": key}
    assert set(theirs) == {one["name"] for one in relay["env"]}
    assert relay["image"] == rendered.relay["image"]


def test_the_component_applies_each_patch_to_its_engine() -> None:
    component = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert component["kind"] == "Component"
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert {patch["path"] for patch in component["patches"]} == files
    for patch in component["patches"]:
        engine = patch["path"].removesuffix(".yaml").removesuffix("-flags")
        assert patch["target"]["labelSelector"] == f"kvroute.io/engine={engine}"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, with kustomize, is not here")
@pytest.mark.parametrize("engine", ENGINES)
def test_kustomize_makes_the_same_of_it(engine: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "relay-sidecar")
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(deployment(engine)))
    mine = {"resources": ["engine.yaml"], "components": ["relay-sidecar"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(mine))
    run = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    made = yaml.safe_load(run.stdout)
    ours = patched(engine)
    for result in (made, ours):
        pod = result["spec"]["template"]["spec"]
        pod["volumes"].sort(key=lambda one: one["name"])
    assert made == ours
