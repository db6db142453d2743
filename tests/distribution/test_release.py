"""`make release`: installed from its folder alone, whole, and signed."""

import shutil
import subprocess
import venv
from pathlib import Path

import helm_python as helm
import pytest

from tests.distribution import container, image
from tests.distribution.project import ROOT
from tests.helm.rendered import Rendered

FOLDER = ROOT / "dist" / "release"
SUMS = "SHA256SUMS"
DISTRIBUTIONS = ("kvroute", "kvroute_client")


def only(pattern: str) -> Path:
    (path,) = FOLDER.glob(pattern)
    return path


def succeeds(*command: str | Path, cwd: Path, stdin: str = "") -> bool:
    done = subprocess.run(command, cwd=cwd, input=stdin, text=True, check=False)
    return done.returncode == 0


def test_the_folder_holds_every_part_with_its_checksum() -> None:
    assert succeeds("sha256sum", "--check", "--strict", SUMS, cwd=FOLDER)
    listed = {line.split()[1] for line in (FOLDER / SUMS).read_text().splitlines()}
    assert listed == {path.name for path in FOLDER.iterdir()} - {SUMS, f"{SUMS}.sig"}
    distributions = [f"{name}-*.{ending}" for name in DISTRIBUTIONS for ending in ("whl", "tar.gz")]
    for pattern in (*distributions, "kvroute-*.tgz", "kvroute-*.cdx.json", "kvroute-*-image.tar"):
        only(pattern)


def test_a_signature_holds_for_what_was_signed_alone(tmp_path: Path) -> None:
    shutil.copy(FOLDER / SUMS, tmp_path)
    key = tmp_path / "key"
    for name in ("key", "other"):
        command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name)
        assert succeeds(*command, cwd=tmp_path)
    assert succeeds("make", "--silent", "sign", f"RELEASE={tmp_path}", f"KEY={key}", cwd=ROOT)
    sums = (tmp_path / SUMS).read_text()

    def verified(text: str, by: str) -> bool:
        public = (tmp_path / f"{by}.pub").read_text()
        (tmp_path / "allowed").write_text(f"release {public}")
        words = ("-f", "allowed", "-I", "release", "-n", "kvroute", "-s", f"{SUMS}.sig")
        return succeeds("ssh-keygen", "-Y", "verify", *words, cwd=tmp_path, stdin=text)

    assert verified(sums, "key")
    assert not verified(sums.replace("a", "b"), "key")
    assert not verified(sums, "other")


def test_wheel_image_and_chart_of_the_folder_serve_a_chat(tmp_path: Path) -> None:
    """The wheel's dependencies are from the package index."""
    try:
        tool = image.found()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if tool == "buildah":
        pytest.skip("buildah runs no containers: install docker or podman")
    venv.create(tmp_path / "installed", with_pip=True)
    programs = tmp_path / "installed" / "bin"
    assert succeeds(programs / "pip", "install", "--quiet", only("kvroute-*.whl"), cwd=tmp_path)
    load = (tool, "load", "--input", only("kvroute-*-image.tar"))
    loaded = subprocess.check_output(load, text=True).strip().rpartition(" ")[2]
    repository, _, tag = loaded.rpartition(":")
    of = {"image": {"repository": repository, "tag": tag}}
    with (
        helm.Chart.load(only("kvroute-*.tgz")) as chart,
        container.engines(tmp_path, programs / "kvroute") as workers,
    ):
        rendered = Rendered(chart, container.values(workers) | of)
        assert rendered.router["image"] == loaded
        command = container.command(container.runner(tool), rendered, tmp_path)
        with container.running(command, container.READY) as router:
            assert container.chat(rendered)["choices"][0]["message"]["content"]
            assert router.finish() == 0
