"""The patch and the component that add a relay to a Deployment of one's own."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from events.plane.settings import read_engine
from router.app.main import cli
from tests.helm.rendered import CHART, Object, Rendered

FOLDER = CHART.parent / "relay-sidecar"
ENGINES = {"vllm": 8000, "sglang": 30000}
KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name"}
"""Keys by which lists are merged (patchMergeKey in Kubernetes' API); other lists are replaced."""


STARTS: dict[str, dict[str, dict[str, list[str]]]] = {
    "vllm": {
        "": {"args": ["m", "--port=8000"]},
        "command": {"command": ["vllm", "serve"], "args": ["m", "--port=8000"]},
        "shell": {"command": ["/bin/sh", "-c"], "args": ["vllm serve m --port=8000"]},
    },
    "sglang": {
        "": {"args": ["python3", "-m", "sglang.launch_server", "--model-path=m"]},
        "command": {
            "command": ["python3", "-m", "sglang.launch_server"],
            "args": ["--model-path=m"],
        },
        "shell": {
            "command": ["/bin/sh", "-c"],
            "args": ["python3 -m sglang.launch_server --model-path=m\n"],
        },
    },
}
"""Engine -> label kvroute.io/start -> how a container starts it."""
FLAGS = {
    "vllm": ["--kv-events-config={", "--enable-prompt-tokens-details"],
    "sglang": ["--kv-events-config={", "--enable-metrics", "--enable-cache-report"],
}


def deployment(engine: str, start: str = "", **container: list[str]) -> Object:
    """An engine as someone may run it. container: the words of its start, if others."""
    labels = {"kvroute.io/engine": engine} | ({"kvroute.io/start": start} if start else {})
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "mine", "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"app": "mine"}},
            "template": {
                "metadata": {"labels": {"app": "mine"}},
                "spec": {
                    "containers": [
                        {
                            "name": "engine",
                            "image": "engine:1",
                            **(container or STARTS[engine][start]),
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


class Refused(Exception):
    """A test of a patch failed, or a path is not there."""


def json_patched(document: Object, steps: list[Object]) -> Object:
    """As the API server and kustomize do (evanphx/json-patch v4), where the test of a key that is
    not there against null succeeds."""
    result = copy.deepcopy(document)
    for step in steps:
        *path, last = step["path"].lstrip("/").split("/")
        place: Any = result
        for key in path:
            try:
                place = place[int(key) if isinstance(place, list) else key]
            except (KeyError, IndexError):
                raise Refused(step) from None
        if step["op"] == "add":
            assert isinstance(place, list)
            if int(last) > len(place):
                raise Refused(step)
            place.insert(int(last), step["value"])
            continue
        assert step["op"] == "test"
        if isinstance(place, list) and int(last) >= len(place):
            raise Refused(step)
        there = place[int(last)] if isinstance(place, list) else place.get(last)
        if there != step["value"]:
            raise Refused(step)
    return result


def flags_file(engine: str, start: str) -> Path:
    return FOLDER / (f"{engine}-flags-{start}.yaml" if start else f"{engine}-flags.yaml")


def patched(engine: str, start: str = "", **container: list[str]) -> Object:
    """The Deployment after both patches, as kustomize and kubectl apply them."""
    patch = yaml.safe_load((FOLDER / f"{engine}.yaml").read_text())
    del patch["metadata"]
    result = merged(deployment(engine, start, **container), patch)
    assert isinstance(result, dict)
    return json_patched(result, yaml.safe_load(flags_file(engine, start).read_text()))


def argv(container: Object, folder: Path, shell: str = "/bin/sh") -> list[str]:
    """The words that the engine's program is started with; a shell is really run."""
    words = [*container.get("command", []), *container.get("args", [])]
    if words[1] != "-c":
        return words
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("vllm", "python3"):
        program = folder / "bin" / name
        program.write_text(
            '#!/bin/sh\nfor word in "${0##*/}" "$@"; do printf "%s\\0" "$word"; done\n'
        )
        program.chmod(0o755)
    words = [word.replace("$$(", "$(") for word in words]  # as the kubelet does
    run = subprocess.run(
        [shell, *words[1:]],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin"},
    )
    return run.stdout.rstrip("\0").split("\0")


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize("start", ["", "command", "shell"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_flags_reach_the_engine_however_it_is_started(
    engine: str, start: str, shell: str, tmp_path: Path
) -> None:
    (before,) = deployment(engine, start)["spec"]["template"]["spec"]["containers"]
    (after,) = patched(engine, start)["spec"]["template"]["spec"]["containers"]
    words = argv(after, tmp_path, shell)
    added = [word for word in words if word not in argv(before, tmp_path, shell)]
    assert [word for word in words if word not in added] == argv(before, tmp_path, shell)
    assert len(added) == len(FLAGS[engine])
    for word, flag in zip(added, FLAGS[engine], strict=True):
        assert word.startswith(flag)
    json.loads(added[0].partition("=")[2])


SCRIPTS = {
    "a line": "vllm serve m",
    "a block of YAML": "set -e\nexport A=1\nexec vllm serve m \\\n  --port=8000\n",
    "with quotes": """vllm serve "m" --x='{"a": 1}'\n\n""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize("behind", [True, False])
def test_scripts_run_with_the_flags_at_their_end(script: str, behind: bool, tmp_path: Path) -> None:
    shell = ["/bin/sh", "-c"]
    start = {"command": [*shell, script]} if behind else {"command": shell, "args": [script]}
    (after,) = patched("vllm", "shell", **start)["spec"]["template"]["spec"]["containers"]
    words = argv(after, tmp_path)
    assert words[:3] == ["vllm", "serve", "m"]
    assert [word.partition("=")[0] for word in words[-2:]] == [
        "--kv-events-config",
        "--enable-prompt-tokens-details",
    ]


@pytest.mark.parametrize("start", ["", "command", "shell"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_patch_for_another_way_to_start_is_refused(engine: str, start: str) -> None:
    """Else the flags would be a script's own, and events would stay off without a word."""
    others: list[dict[str, list[str]]] = [
        *(words for form, words in STARTS[engine].items() if form != start),
        {"command": ["/bin/bash", "-lc"], "args": ["vllm serve m"]},
        {"command": ["/usr/bin/tini", "--", "vllm", "serve", "m"]},
        {"args": []} if (engine, start) != ("vllm", "") else {"command": ["vllm", "serve"]},
    ]
    for words in others:
        with pytest.raises(Refused):
            patched(engine, start, **words)


def test_flags_before_a_shell_among_the_arguments_are_no_script_of_its() -> None:
    """What no test of a patch can refuse does not start, instead of starting without events."""
    words = ["/bin/sh", "-c", "vllm serve m"]
    (after,) = patched("vllm", args=words)["spec"]["template"]["spec"]["containers"]
    assert after["args"][0].startswith("--")


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


@pytest.mark.parametrize("start", ["", "command", "shell"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_and_relay_agree_on_ports(engine: str, start: str) -> None:
    pod = patched(engine, start)["spec"]["template"]["spec"]
    words = [*pod["containers"][0].get("command", []), *pod["containers"][0]["args"]]
    (events,) = [one for one in words if "--kv-events-config" in one]
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
    for engine in ENGINES:
        for start in ("", "command", "shell"):
            label = f"kvroute.io/start={start}" if start else "!kvroute.io/start"
            target = f"kvroute.io/engine={engine},{label}"
            (patch,) = [
                one for one in component["patches"] if one["path"] == flags_file(engine, start).name
            ]
            assert patch["target"] == {"kind": "Deployment", "labelSelector": target}
        (patch,) = [one for one in component["patches"] if one["path"] == f"{engine}.yaml"]
        assert patch["target"]["labelSelector"] == f"kvroute.io/engine={engine}"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, with kustomize, is not here")
@pytest.mark.parametrize("start", ["", "command", "shell"])
@pytest.mark.parametrize("engine", ENGINES)
def test_kustomize_makes_the_same_of_it(engine: str, start: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "relay-sidecar")
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(deployment(engine, start)))
    mine = {"resources": ["engine.yaml"], "components": ["relay-sidecar"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(mine))
    run = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    made = yaml.safe_load(run.stdout)
    ours = patched(engine, start)
    for result in (made, ours):
        pod = result["spec"]["template"]["spec"]
        pod["volumes"].sort(key=lambda one: one["name"])
    assert made == ours
