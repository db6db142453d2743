"""The image on a base of Debian's packages: what it holds, and a chat as the chart runs it."""

import subprocess
import sys
from pathlib import Path

import helm_python as helm
import pytest

from router.cluster.children.nats_server import server_binary
from tests.distribution import container, image
from tests.helm.rendered import CHART, Rendered

OVER_BASE_MB = 200
"""What the image may add to its base, in 10^6 bytes on disk."""
IMPORTS = """
import fastokens, jinja2, jwt, numpy.linalg, opentelemetry.exporter.otlp.proto.grpc, uvloop
import indexer.kernel, router.decide.decision.ranking, router.request.rendering.template
import sys
print(*sys.version_info[:2])
"""


@pytest.fixture(scope="session")
def tool() -> str:
    try:
        return image.found()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def base(tool: str) -> str:
    return image.debian_base(tool=tool)


@pytest.fixture(scope="session")
def built(tool: str, base: str) -> str:
    return image.build("localhost/kvroute:tested", base=base, tool=tool)


@pytest.fixture(scope="session")
def runner(tool: str) -> list[str]:
    if tool == "buildah":
        pytest.skip("buildah runs no containers: install docker or podman")
    return container.runner(tool)


def ran(runner: list[str], built: str, program: str, *arguments: str) -> str:
    """What a program of the image writes."""
    command = [*runner, f"--entrypoint={program}", built, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def size_mb(tool: str, tag: str) -> float:
    kind = [] if tool == "docker" else ["--type=image"]
    command = [tool, "inspect", *kind, "--format={{.Size}}", tag]
    return int(subprocess.run(command, capture_output=True, check=True).stdout) / 1e6


def test_it_is_small(tool: str, base: str, built: str) -> None:
    if tool == "buildah":
        pytest.skip("buildah says no sizes")
    assert 0 < size_mb(tool, built) - size_mb(tool, base) <= OVER_BASE_MB


def test_it_holds_every_extra_on_the_python_and_the_nats_of_the_tests(
    runner: list[str], built: str
) -> None:
    python = ran(runner, built, "python", "-c", IMPORTS)
    assert python.split() == [str(each) for each in sys.version_info[:2]]
    ours = subprocess.run(
        [server_binary(), "--version"], capture_output=True, text=True, check=True
    )
    assert ran(runner, built, "nats-server", "--version") == ours.stdout


def test_it_holds_no_settings_of_this_machine(runner: list[str], built: str) -> None:
    listed = ran(runner, built, "sh", "-c", "cd /; ls -d src etc/pip.conf tmp/* opt/* || true")
    assert listed.split() == ["opt/kvroute"]


def test_it_serves_a_chat_as_the_chart_runs_it(
    tool: str, runner: list[str], built: str, tmp_path: Path
) -> None:
    repository, _, tag = built.rpartition(":")
    of = {"image": {"repository": repository, "tag": tag}}
    with helm.Chart.load(CHART) as chart, container.engines(tmp_path) as workers:
        rendered = Rendered(chart, container.values(workers) | of)
        command = container.command(runner, rendered, tmp_path)
        with container.running(command, container.READY) as router:
            status = container.status(tmp_path.name, tool)
            assert container.chat(rendered)["choices"][0]["message"]["content"]
            assert router.finish() == 0
    assert status["Uid"].split() == ["65532"] * 4
    assert status["Gid"].split() == ["65532"] * 4
    assert {status[key] for key in ("CapEff", "CapBnd", "CapPrm")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["root"] == "ro"
    assert "stopped" in router.lines[-1]
