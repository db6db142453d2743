"""Clients of kvroute in other languages, a folder each: how they are built, and run.

Each is kept by the digest of its sources beside the cluster's programs (`${KVROUTE_CACHE}`).
"""

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.binaries import STRIPPED, cache, go
from tests.interop import java

SOURCES = Path(__file__).parent / "clients"


@dataclass(frozen=True)
class Client:
    """Of one language."""

    name: str
    make: Callable[[Path], Path]
    """Builds it in a folder with its sources; the file or folder to keep."""
    run: Callable[[Path], tuple[str, ...]]
    """The command that runs what is kept."""

    @property
    def path(self) -> Path:
        files = sorted(path for path in (SOURCES / self.name).iterdir() if path.is_file())
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
        return cache() / "interop" / f"{self.name}-{digest[:12]}"

    def command(self) -> tuple[str, ...]:
        return self.run(self.path)

    def build(self) -> None:
        """Builds it, if it is not there."""
        if self.path.exists():
            return
        begun = time.monotonic()
        with TemporaryDirectory(prefix="kvroute-build-") as scratch:
            folder = Path(scratch, self.name)
            shutil.copytree(SOURCES / self.name, folder)
            made = self.make(folder)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            half = self.path.with_suffix(".half")
            if half.exists():
                shutil.rmtree(half, ignore_errors=True)
            shutil.move(made, half)
            half.rename(self.path)
        sys.stdout.write(f"client of {self.name}: {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()


def _make_go(folder: Path) -> Path:
    go("build", "-ldflags", STRIPPED, "-o", "client", ".", cwd=folder)
    return folder / "client"


def _itself(path: Path) -> tuple[str, ...]:
    return (str(path),)


def _make_core(folder: Path) -> Path:
    return folder


def _make_java(folder: Path) -> Path:
    made = folder / "classes"
    sources = map(str, folder.glob("*.java"))
    libraries = f"{java.libraries()}/*"
    subprocess.run(["javac", "-cp", libraries, "-d", str(made), *sources], check=True)
    return made


def _make_node(folder: Path) -> Path:
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run(command, check=True)
    return folder


def _make_rust(folder: Path) -> Path:
    target = cache() / "interop" / "cargo"  # crates are compiled once
    command = ["nice", "-n", "10", "cargo", "build", "--quiet", "--release"]
    subprocess.run([*command, "--target-dir", str(target)], check=True, cwd=folder)
    shutil.copy(target / "release" / "client", folder / "made")
    return folder / "made"


CLIENTS = {
    client.name: client
    for client in (
        Client("go", _make_go, _itself),
        Client("core", _make_core, lambda path: (sys.executable, str(path / "client.py"))),
        Client("java", _make_java, lambda path: java.command("Client", path)),
        Client("node", _make_node, lambda path: ("node", str(path / "client.js"))),
        Client("rust", _make_rust, _itself),
    )
}
