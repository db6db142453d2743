"""The image of this checkout, built by docker, podman or buildah: `make image`.

    python -m tests.distribution.image [--tag TAG] [--base REFERENCE | --debian] [--tool TOOL]
        [--platform linux/arm64] [--archive FILE]

--base is any Debian or derivative with Python 3.11 or newer, venv and ca-certificates; by default
that of the Dockerfile, a published one. --debian makes one of Debian's packages, by mmdebstrap,
where nothing can be pulled.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.distribution.project import ROOT, address, version

TOOLS = ("docker", "podman", "buildah")
SUITE = "bookworm"
"""Debian's release that has the Python of the tests, 3.11."""
PACKAGES = ("python3", "python3-venv", "ca-certificates")
SECRETS = {
    "pip": (
        os.environ.get("PIP_CONFIG_FILE", ""),
        "~/.config/pip/pip.conf",
        "~/.pip/pip.conf",
        "/etc/pip.conf",
    ),
    "certificates": (
        os.environ.get("SSL_CERT_FILE", ""),
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
    ),
}
"""Files of this machine that the build's package client reads, the first that is there; no layer
holds them."""


def found(tool: str | None = None) -> str:
    """This tool, else the first that can build here; raises FileNotFoundError without any."""
    for name in [tool] if tool else TOOLS:
        if shutil.which(name) and (name != "docker" or _works("docker", "version")):
            return name
    raise FileNotFoundError(
        f"no image can be built: {tool or 'docker (with its daemon), podman and buildah'} not found"
    )


def build(
    tag: str, *, base: str | None = None, tool: str | None = None, platform: str | None = None
) -> str:
    """Builds this checkout under a tag, and returns the tag. Minutes; the tool's output is ours.

    Raises FileNotFoundError without a tool, CalledProcessError if it fails.
    """
    revision = subprocess.run(
        ("git", "-C", ROOT, "rev-parse", "HEAD"), capture_output=True, text=True, check=False
    ).stdout.strip()
    arguments = {"VERSION": version(), "SOURCE": address(), "REVISION": revision or "unknown"}
    if base:
        arguments["BASE"] = base
    options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    for name, places in SECRETS.items():
        for place in (Path(each).expanduser() for each in places if each):
            if place.is_file():
                options.append(f"--secret=id={name},src={place}")
                break
    return _build(found(tool), ROOT, tag, platform, *options)


def native() -> str:
    """This machine's architecture, as images name it."""
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def debian_base(arch: str | None = None, *, tool: str | None = None) -> str:
    """A base of Debian's packages alone, made once (2 minutes) and kept; returns its reference.

    The archive of its files is cached below KVROUTE_CACHE, by default ~/.cache/kvroute. Needs
    mmdebstrap; of another architecture, arch-test and QEMU's user emulation (binfmt_misc), too.
    """
    tool, arch = found(tool), arch or native()
    key = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]
    tag = f"localhost/kvroute-base:{SUITE}-{arch}-{key}"
    inspect = ("image", "inspect") if tool != "buildah" else ("inspect", "--type=image")
    if _works(tool, *inspect, tag):
        return tag
    folder = cache() / f"{SUITE}-{arch}-{key}"
    archive = folder / "base.tar"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{os.getpid()}.partial.tar"
        wanted = f"--include={','.join(PACKAGES)}"
        of = f"--architectures={arch}"
        _run("mmdebstrap", "--quiet", "--variant=minbase", wanted, of, SUITE, str(partial))
        partial.rename(archive)
    (folder / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n", encoding="utf-8")
    return _build(tool, folder, tag, f"linux/{arch}")


def save(tag: str, archive: Path, *, tool: str | None = None, layout: str = "oci") -> Path:
    """Writes an image to an archive, under the tag: `oci`, or `docker` as `docker save` has it.

    docker itself writes one archive that is both.
    """
    tool = found(tool)
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    if tool == "docker":
        _run(tool, "save", "--output", str(archive), tag)
    else:
        _run(tool, "push", "--quiet", tag, f"{layout}-archive:{archive}:{tag}")
    return archive


def cache() -> Path:
    """Where what is made once is kept, outside of the tree."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("KVROUTE_CACHE") or user / "kvroute") / "images"


def _build(tool: str, folder: Path, tag: str, platform: str | None, *options: str) -> str:
    where = [f"--platform={platform}"] if platform else []
    _run(tool, "build", f"--tag={tag}", *where, *options, str(folder))
    return tag


def _run(*command: str) -> None:
    # podman and buildah then need no runtime and no cgroups, and keep the layers of dependencies.
    env = {"BUILDAH_ISOLATION": "chroot", "BUILDAH_LAYERS": "true", "DOCKER_BUILDKIT": "1"}
    subprocess.run(command, env={**env, **os.environ}, stdin=subprocess.DEVNULL, check=True)


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="make image", description=__doc__)
    parser.add_argument("--tag", default=f"kvroute/kvroute:{version()}")
    parser.add_argument("--base", help="reference of the base; default: the Dockerfile's")
    parser.add_argument("--debian", action="store_true", help="make the base of Debian's packages")
    parser.add_argument("--tool", help=f"default: the first that can build of {', '.join(TOOLS)}")
    parser.add_argument("--platform", help="such as linux/arm64; default: this machine's")
    parser.add_argument("--archive", type=Path, help="write the image there, too (OCI)")
    given = parser.parse_args()
    base = given.base or None
    if given.debian:
        base = debian_base((given.platform or "").partition("/")[2] or None, tool=given.tool)
    build(given.tag, base=base, tool=given.tool or None, platform=given.platform or None)
    if given.archive:
        save(given.tag, given.archive, tool=given.tool or None)
    sys.stdout.write(f"{given.tag}\n")


if __name__ == "__main__":
    main()
