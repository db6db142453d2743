"""The tutorials' commands, as far as they can be checked without a cluster.

What Helm is to install is rendered by real Helm, what kubectl names is in it or on the page, and
kvroute's flags are the program's.
"""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from router.app.main import cli
from tests.helm.rendered import CHART, Object, values_of

ROOT = CHART.parents[1]
PAGES = sorted((ROOT / "docs").glob("tutorial-*.md"))
OF_THE_READER = {"vllm", "inference-gateway"}
"""Objects that a page expects to be there, and says so."""
KINDS = (
    "deployment",
    "gateway",
    "httproute",
    "inferencepool",
    "pod",
    "secret",
    "service",
    "statefulset",
)


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, each in one line."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE):
        joined = re.sub(r"\\\n +", "", block)
        for line in joined.splitlines():
            yield line.strip()


def documents(page: Path) -> list[Object]:
    """The YAML of a page."""
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [one for block in blocks for one in yaml.safe_load_all(block)]


def values(command: str) -> dict[str, Any]:
    """The values of a `helm install`."""
    words = shlex.split(command)
    result: dict[str, Any] = {}
    for flag, word in pairwise(words):
        if flag == "-f":
            assert (ROOT / word).parent == CHART / "examples"
            result = values_of(Path(word).stem)
    for flag, word in pairwise(words):
        if flag == "--set":
            _put(result, helm.parse_set_string(word))
    return result


def _put(target: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _put(target[key], value)
        else:
            target[key] = value


def installed(page: Path, chart: helm.Chart) -> list[Object]:
    (command,) = [one for one in commands(page) if one.startswith("helm install")]
    words = shlex.split(command)
    assert words[2:4] == ["kvroute", "helm/kvroute"]
    texts = chart.render(values(command), name="kvroute", namespace="inference")
    return [
        document
        for path, text in texts.items()
        if not path.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_kubectl_names_is_there(page: Path, chart: helm.Chart) -> None:
    made = [*installed(page, chart), *documents(page)]
    names = {(one["kind"].lower(), one["metadata"]["name"]) for one in made if "metadata" in one}
    named = set()
    for command in commands(page):
        if "kubectl" not in command:
            continue
        words = command.partition("kubectl")[2].split()
        for word, after in zip(words, [*words[1:], ""], strict=True):
            kind, _, name = word.partition("/")
            if kind in KINDS and (name or after):
                named.add((kind, name or after))
    assert named
    for kind, name in named:
        if kind == "pod":
            kind, name = "statefulset", name.rpartition("-")[0]
        assert (kind, name) in names or name in OF_THE_READER, f"{kind}/{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_kubernetes_takes_the_pages_objects(page: Path) -> None:
    for document in documents(page):
        if document["kind"] != "Kustomization":
            kubernetes_validate.validate(
                document, kubernetes_validate.latest_version(), strict=True
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_engines_of_a_page_are_those_that_the_router_looks_for(
    page: Path, chart: helm.Chart
) -> None:
    objects = installed(page, chart)
    maps = [one["data"] for one in objects if one["kind"] == "ConfigMap"]
    (config,) = [data["config.yaml"] for data in maps if "config.yaml" in data]
    discovered = yaml.safe_load(config)["discovery"]["kubernetes"]
    engines = [one for one in documents(page) if one["kind"] == "Deployment"]
    if not engines:
        return
    assert discovered["enabled"]
    wanted = dict(term.split("=") for term in discovered["selector"].split(","))
    for engine in engines:
        pod = engine["spec"]["template"]
        assert wanted.items() <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        assert [port["containerPort"] for port in container["ports"]] == discovered["ports"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_kvroutes_flags_are_the_programs(page: Path) -> None:
    for command in commands(page):
        if command.startswith("kvroute "):
            result = CliRunner().invoke(cli, [*shlex.split(command)[1:], "--help"])
            assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_one_should_see_and_how_to_clean_up(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("You should see") >= 3
    clean_up = text.split("## Clean up")[1]
    assert "helm uninstall kvroute" in clean_up


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_clean_up_deletes_only_what_the_page_made(page: Path) -> None:
    """A namespace may hold what is the reader's, whether the page made it or not: no command ends
    one."""
    text = page.read_text(encoding="utf-8")
    made = ("engines.yaml", "kvroute")
    deletes = [one for one in commands(page) if re.search(r"\b(delete|uninstall)\b", one)]
    assert deletes
    for command in deletes:
        assert " namespace" not in command.replace("--namespace", ""), command
        assert any(name in command for name in made), command
    if "engines.yaml" in " ".join(deletes):
        assert "Save as `engines.yaml`" in text or "those of the first tutorial" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_forwarded_ports_are_the_services(page: Path, chart: helm.Chart) -> None:
    made = installed(page, chart)
    services = {one["metadata"]["name"]: one for one in made if one["kind"] == "Service"}
    for command in commands(page):
        if match := re.search(r"port-forward service/(\S+) ([0-9 ]+)", command):
            ports = {port["port"] for port in services[match[1]]["spec"]["ports"]}
            assert {int(port) for port in match[2].split()} <= ports


def test_files_of_commands_are_in_the_tree() -> None:
    for page in PAGES:
        for command in commands(page):
            for path in re.findall(r"\bhelm/[\w./-]+", command):
                assert (ROOT / path).exists(), path


def test_each_of_the_four_examples_has_a_page() -> None:
    used = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in ("gateway-vllm", "inference-pool", "sglang-pairs", "nats-cluster"):
        assert f"examples/{name}.yaml" in used
