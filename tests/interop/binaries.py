"""Programs that judge kvroute's gRPC server, from Go modules and Maven's artefacts.

    python -m tests.interop.binaries

Files are kept by version in the folder of the cluster's own programs, `${KVROUTE_CACHE}/bin`, and
one that is there is not built again: 5 to 10 minutes the first time on two cores.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.binaries import STRIPPED, Binary, build, go
from tests.interop import java
from tests.interop.languages import CLIENTS

GRPC, GRPC_VERSION = "google.golang.org/grpc", "v1.85.0"
PROTOBUF, PROTOBUF_VERSION = "google.golang.org/protobuf", "v1.36.12"

INTEROP = Binary("grpc-go-interop", GRPC, GRPC_VERSION, "interop/client")
GRPCURL = Binary("grpcurl", "github.com/fullstorydev/grpcurl", "v1.9.4", "cmd/grpcurl")
PROBE = Binary("grpc-health-probe", "github.com/grpc-ecosystem/grpc-health-probe", "v0.4.62")
BUF = Binary("buf", "github.com/bufbuild/buf", "v1.75.0", "cmd/buf")
GEN_GO = Binary("protoc-gen-go", PROTOBUF, PROTOBUF_VERSION, "cmd/protoc-gen-go")
GEN_GO_GRPC = Binary("protoc-gen-go-grpc", f"{GRPC}/cmd/protoc-gen-go-grpc", "v1.6.2")
PROGRAMS = (INTEROP, GRPCURL, PROBE, GEN_GO, GEN_GO_GRPC, BUF)

H2SPEC = Binary("h2spec-of-calls", "github.com/summerwind/h2spec", "v2.2.1+incompatible")
"""h2spec whose requests are gRPC's: POST, with gRPC's content-type. Its own GET is refused by a
gRPC server before what the case is about."""
_GET = 'HeaderField(":method", "GET"),'
_AUTHORITY = 'HeaderField(":authority", authority),'
_CALL = """
		HeaderField("te", "trailers"),
		HeaderField("content-type", "application/grpc"),"""


def build_h2spec() -> None:
    """Builds it from a copy of its sources, of which one function is another."""
    if H2SPEC.path.exists():
        return
    with TemporaryDirectory(prefix="kvroute-build-") as scratch:
        folder = Path(scratch, "h2spec")
        named = f"{H2SPEC.module}@{H2SPEC.version}"
        shutil.copytree(json.loads(go("mod", "download", "-json", named))["Dir"], folder)
        for path in folder.rglob("*"):
            path.chmod(0o755)  # modules are kept without write permission
        (folder / "go.mod").write_text(f"module {H2SPEC.module}\n\ngo 1.24.0\n")
        changed = folder / "spec" / "util.go"
        text = changed.read_text(encoding="utf-8")
        assert (text.count(_GET), text.count(_AUTHORITY)) == (1, 1)
        text = text.replace(_GET, _GET.replace("GET", "POST"))
        changed.write_text(text.replace(_AUTHORITY, _AUTHORITY + _CALL), encoding="utf-8")
        go("mod", "tidy", cwd=folder)
        go("build", "-ldflags", STRIPPED, "-o", "made", "./cmd/h2spec", cwd=folder)
        H2SPEC.path.parent.mkdir(parents=True, exist_ok=True)
        half = H2SPEC.path.with_suffix(".half")
        shutil.move(folder / "made", half)
        half.rename(H2SPEC.path)
    sys.stdout.write(f"{H2SPEC.name} {H2SPEC.version}\n")


if __name__ == "__main__":
    build_h2spec()
    build(PROGRAMS)
    java.fetch()
    for client in CLIENTS.values():
        client.build()
