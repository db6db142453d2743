"""Images of the gateways: programs that need nothing, and the upstream Envoy with the C library.

Each has the name by which its gateway's own manifests call it, so that these are applied as they
are. Envoy is the one of the wheel that `make envoy` installs: no gateway's own build of it is to be
had without pulling an image.
"""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.certificates import Files
from tests.cluster.images import image
from tests.gateways.binaries import (
    AI_GATEWAY,
    BY_NAME,
    CONTOUR,
    ENVOY_GATEWAY,
    ISTIO,
    MODULES,
    SUITE,
    folder,
)

NOBODY = "65532:65532"
PASSWD = "root:x:0:0::/:\nnonroot:x:65532:65532::/tmp:\nistio-proxy:x:1337:1337::/tmp:\n"
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
ENVOY = "envoyproxy/envoy:upstream"
EPP = Path(__file__).with_name("conformance_epp.py")


class Maker:
    """Makes archives of images in a folder."""

    def __init__(self, scratch: Path, envoy: Path) -> None:
        """envoy: its program."""
        temporary, passwd, order = (scratch / name for name in ("tmp", "passwd", "nsswitch.conf"))
        temporary.mkdir()
        temporary.chmod(0o1777)
        passwd.write_text(PASSWD)
        order.write_text("hosts: files dns\n")
        self._scratch = scratch
        self._root = {
            "tmp": temporary,
            "etc/passwd": passwd,
            "etc/nsswitch.conf": order,
            "etc/ssl/certs/ca-certificates.crt": BUNDLE,
        }
        self._envoy = {"usr/local/bin/envoy": envoy, **_libraries(envoy)}

    def __call__(self, gateway: str) -> list[Path]:
        """The images of a gateway."""
        made: list[Path] = getattr(self, gateway.replace("-", "_"))()
        return made

    def istio(self) -> list[Path]:
        bootstrap = folder(ISTIO) / "tools/packaging/common/envoy_bootstrap.json"
        of_proxy = {"var/lib/istio/envoy/envoy_bootstrap_tmpl.json": bootstrap, **self._envoy}
        return [
            self._made("istio/pilot:upstream", "pilot-discovery"),
            # The agent writes Envoy's configuration, and starts it.
            self._made("istio/proxyv2:upstream", "pilot-agent", of_proxy, user=""),
        ]

    def envoy_gateway(self) -> list[Path]:
        name = f"envoyproxy/gateway:{MODULES[ENVOY_GATEWAY]}"
        return [self._made(name, "envoy-gateway"), self._made(ENVOY, "envoy", self._envoy)]

    def envoy_ai_gateway(self) -> list[Path]:
        programs = ("ai-gateway-controller", "ai-gateway-extproc")
        tag = MODULES[AI_GATEWAY]
        own = [self._made(f"envoyproxy/{name}:{tag}", name) for name in programs]
        return [*own, *self.envoy_gateway()]

    def contour(self) -> list[Path]:
        manifests = "examples/contour"
        name = named_in(CONTOUR, f"{manifests}/03-contour.yaml", "/contour:")
        proxy = named_in(CONTOUR, f"{manifests}/03-envoy.yaml", "/envoy:")
        return [
            self._made(name, "contour", {"bin/contour": BY_NAME["contour"].path}),
            self._made(proxy, "envoy", self._envoy),
        ]

    def conformance(self, kvroute: Path) -> list[Path]:
        """The suite's model server, and kvroute's picker under the name of the suite's EPP.
        kvroute: the archive of its image."""
        files = {"opt/conformance/epp.py": EPP}
        for name in ("tls.crt", "tls.key"):
            files[f"opt/conformance/{name}"] = self._scratch / name
        Files(self._scratch, "epp-ca").sign("tls", "epp", hosts=["epp"])
        name = named_in(SUITE, "resources/base.yaml", "/lwepp:")
        entry = ["python", "/opt/conformance/epp.py"]
        archive = self._scratch / "epp.tar"
        return [
            image(archive, name, files, entrypoint=entry, base=kvroute, user=NOBODY),
            self._made(named_in(SUITE, "resources/base.yaml", "/echo-basic:"), "echo-basic"),
        ]

    def _made(
        self, name: str, program: str, files: Mapping[str, Path] | None = None, user: str = NOBODY
    ) -> Path:
        """An image whose entry is `program`: one of ours, or one of `files`."""
        place = f"usr/local/bin/{program}"
        content = {**self._root, **(files or {})}
        if place not in content:
            content[place] = BY_NAME[program].path
        archive = self._scratch / f"{name.rpartition('/')[2].replace(':', '-')}.tar"
        path = ["PATH=/usr/local/bin:/bin"]
        return image(archive, name, content, entrypoint=[f"/{place}"], environment=path, user=user)


def _libraries(program: Path) -> dict[str, Path]:
    """The shared libraries of a program, and the loader."""
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    found = (Path(path) for path in re.findall(r"(/\S+\.so\S*)", said))
    return {str(path).lstrip("/"): path.resolve() for path in found}


def named_in(module: str, file: str, pattern: str) -> str:
    """The name of an image in a manifest of a module."""
    text = (folder(module) / file).read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"image: (\S*{pattern}\S*)", text)
    return found[0]
