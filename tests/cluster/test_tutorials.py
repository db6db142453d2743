"""Each command block of a tutorial, taken from its page and run as it stands, in the page's order;
and those of README's section on Kubernetes.

What is not as on a reader's cluster: the engines are simulated ones in images that have the names
of the page's, the node says that it has 16 GPUs, and images are there already.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import images as names
from tests.cluster.cluster import Cluster
from tests.cluster.node import until
from tests.cluster.release import ROOT

INDENT = "    "
FORWARDED = "until ss --listening --tcp --numeric | grep --quiet :{}; do sleep 0.1; done\n"
"""What a reader does between two blocks: they look whether the port is forwarded."""


@dataclass(frozen=True)
class Page:
    """A tutorial: what is there before it, by which Helm it is run, what its commands print."""

    name: str
    helm: str
    prints: tuple[str, ...]
    """Patterns, in the order in which they are to be met."""
    before: tuple[dict[str, Any], ...] = ()
    stops_at: str = ""
    """The heading from which on it needs what this cluster lacks; the clean-up is run anyhow."""


COMPLETION = r'"object": ?"chat.completion"'
VLLM = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "vllm", "namespace": "inference"},
    "spec": {
        "replicas": 3,
        "selector": {"matchLabels": {"app": "vllm"}},
        "template": {
            "metadata": {"labels": {"app": "vllm"}},
            "spec": {
                "enableServiceLinks": False,
                "containers": [
                    {
                        "name": "vllm",
                        "image": names.VLLM,
                        "command": ["vllm", "serve"],
                        "args": ["Qwen/Qwen3-32B", "--port=8000"],
                        "ports": [{"name": "http", "containerPort": 8000}],
                        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
                    }
                ],
            },
        },
    },
}
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "inference"}}
PAGES = (
    Page("gateway", "helm", (r"Phase: +Succeeded", COMPLETION, r"vllm-qwen3-32b-\w+-\w+")),
    Page("pairs", "helm4", (r"Phase: +Succeeded", r"prefill", COMPLETION)),
    Page("routers", "helm4", (r"successfully rolled out", r"vllm-\w+-\w+"), (NAMESPACE, VLLM)),
    Page(
        "inference-pool",
        "helm",
        (r"Phase: +Succeeded", r"inferencepool\S*/kvroute", r"9002"),
        stops_at="## 2. A request",
    ),
)


def blocks(text: str) -> Iterator[str]:
    """The command blocks of a page; a YAML block after "Save as `NAME`" writes that file."""
    for saved, yaml, commands in re.findall(
        r"(?:Save as `(\S+)`[^\n]*\n+)?```yaml\n((?:.*\n)*?)```|((?:^ {4}.*\n)+)",
        text,
        re.MULTILINE,
    ):
        if commands:
            yield "".join(line.removeprefix(INDENT) for line in commands.splitlines(True))
            if forwarded := re.search(r"port-forward .* (\d+) &$", commands, re.MULTILINE):
                yield FORWARDED.format(forwarded[1])
        elif saved:
            yield f"cat > {saved} <<'END'\n{yaml}END\n"


def script(page: Page) -> str:
    """The page's blocks as one shell's input; what follows `stops_at` is left out."""
    text = (ROOT / "docs" / f"tutorial-{page.name}.md").read_text(encoding="utf-8")
    steps, clean_up = text.split("## Clean up")
    if page.stops_at:
        steps, found, _ = steps.partition(page.stops_at)
        assert found
    if page.name == "inference-pool":  # "The engines are those of the first tutorial's step 1."
        first = (ROOT / "docs" / "tutorial-gateway.md").read_text(encoding="utf-8")
        steps = first.partition("## 2.")[0] + steps
    return "\n".join(("set -eux -o pipefail", *blocks(steps), *blocks(clean_up)))


def readme() -> str:
    """README's section; its image is loaded already, and the section does not clean up."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Try it on Kubernetes")[2].partition("\n## ")[0]
    commands = "\n".join(blocks(section))
    image, found, rest = commands.partition("\nkubectl apply")
    assert image.startswith("make image"), image
    remove = "helm uninstall kvroute --wait\nkubectl delete -f helm/engines-simulated.yaml\n"
    return "\n".join(("set -eux -o pipefail", found + rest, remove))


def left(cluster: Cluster, namespace: str) -> list[str]:
    """What the release left, but for the pod of `helm test`, which keeps its log."""
    kinds = "all,secrets,configmaps,roles,rolebindings,serviceaccounts"
    names = (one["metadata"]["name"] for one in cluster.get(kinds, "--namespace", namespace))
    return [name for name in names if "kvroute" in name and name != "kvroute-test"]


def run(cluster: Cluster, folder: Path, text: str, helm: str, prints: tuple[str, ...]) -> None:
    """Runs a page's commands in a folder with the chart, and looks for what they print."""
    (folder / "helm").symlink_to(ROOT / "helm")
    (folder / "bin").mkdir()
    (folder / "bin" / "helm").symlink_to(cluster.bin / helm)
    ran = cluster.run(
        *("bash", "-c", text + "\nkill $(jobs -p) || true"),
        cwd=folder,
        environment={"PATH": f"{folder}/bin:{cluster.environment()['PATH']}"},
        timeout=600,
    )
    rest = ran.stdout
    for pattern in prints:
        found = re.search(pattern, rest)
        assert found, f"{pattern}\n{ran.stdout}\n{ran.stderr}"
        rest = rest[found.end() :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_tutorial_as_it_stands(cluster: Cluster, tmp_path: Path, page: Page) -> None:
    cluster.apply(*page.before)
    try:
        run(cluster, tmp_path, script(page), page.helm, page.prints)
        until(
            lambda: not left(cluster, "inference"), 180, "the end of what the page made", every_s=1
        )
    finally:
        cluster.kubectl("delete", "namespace", "inference", "--ignore-not-found", timeout=240)


@pytest.mark.parametrize("helm", ["helm", "helm4"])
def test_readme_as_it_stands(cluster: Cluster, tmp_path: Path, helm: str) -> None:
    run(cluster, tmp_path, readme(), helm, (COMPLETION,))
    until(lambda: not left(cluster, "default"), 180, "the end of what it made", every_s=1)
