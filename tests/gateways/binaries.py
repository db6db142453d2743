"""Programs of the gateways and the conformance suite, built from Go modules and kept by version.

    python -m tests.gateways.binaries [NAME ...]

Gateways that agree on the versions of what they share are built as one module, so that a package is
compiled once. Apart are the suite, since the types of its Inference Extension are newer than
Istio's and would end istiod at a pool without a picker, and Contour, whose Gateway API is older.
Files are `envoy-gateway-v1.9.1` and the like in the folder of the cluster's own programs.
"""

import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.binaries import STRIPPED, cache, go

ISTIO = "istio.io/istio"
ENVOY_GATEWAY = "github.com/envoyproxy/gateway"
AI_GATEWAY = "github.com/envoyproxy/ai-gateway"
CONTOUR = "github.com/projectcontour/contour"
GATEWAY_API = "sigs.k8s.io/gateway-api"
EXTENSION = "sigs.k8s.io/gateway-api-inference-extension"
SUITE = f"{EXTENSION}/conformance"
MODULES = {
    ISTIO: "v0.0.0-20260827124520-eed52ebb66ad",
    ENVOY_GATEWAY: "v1.9.1",
    AI_GATEWAY: "v1.0.0",
    CONTOUR: "v1.33.8",
    GATEWAY_API: "v1.6.1",
    f"{GATEWAY_API}/conformance": "v1.6.1",
    EXTENSION: "v1.6.0",
    SUITE: "v1.6.0",
}
APART = ((EXTENSION, SUITE), (CONTOUR,))


@dataclass(frozen=True)
class Program:
    """A program: its module, and its package in the module."""

    name: str
    module: str
    package: str = ""
    tests: bool = False
    """The package's tests, as one program."""

    @property
    def path(self) -> Path:
        return cache() / "bin" / f"{self.name}-{MODULES[self.module]}"


PROGRAMS = (
    Program("pilot-discovery", ISTIO, "pilot/cmd/pilot-discovery"),
    Program("pilot-agent", ISTIO, "pilot/cmd/pilot-agent"),
    Program("inference-conformance", SUITE, tests=True),
    Program("echo-basic", f"{GATEWAY_API}/conformance", "echo-basic"),
    Program("envoy-gateway", ENVOY_GATEWAY, "cmd/envoy-gateway"),
    Program("ai-gateway-controller", AI_GATEWAY, "cmd/controller"),
    Program("ai-gateway-extproc", AI_GATEWAY, "cmd/extproc"),
    Program("contour", CONTOUR, "cmd/contour"),
)
BY_NAME = {program.name: program for program in PROGRAMS}


@remembered
def folder(module: str) -> Path:
    """Sources of a module, with its charts and manifests."""
    version = MODULES[module]
    go("mod", "download", f"{module}@{version}")
    return Path(go("env", "GOMODCACHE").strip()) / f"{module}@{version}"


def missing() -> list[str]:
    """Names of the programs that are yet to be built."""
    return [program.name for program in PROGRAMS if not program.path.exists()]


def build(names: Collection[str] = tuple(BY_NAME)) -> None:
    """Builds what is missing: 10 to 20 minutes on two cores, and 8 GB of Go's caches."""
    wanted = [BY_NAME[name] for name in names if not BY_NAME[name].path.exists()]
    for program in wanted:
        with TemporaryDirectory(prefix="kvroute-build-") as scratch:
            module = Path(scratch, "go.mod")
            module.write_text(
                "module gateways.local/programs\n\ngo 1.26.0\n\n" + _required(program)
            )
            begun = time.monotonic()
            package = "/".join(filter(None, (program.module, program.package)))
            made = Path(scratch, "made")
            verb = ("test", "-c") if program.tests else ("build",)
            go(*verb, "-p", "2", "-ldflags", STRIPPED, "-o", str(made), package, cwd=Path(scratch))
            program.path.parent.mkdir(parents=True, exist_ok=True)
            # Copied beside its place and renamed: a build that is stopped leaves no half of one.
            half = program.path.with_suffix(".half")
            half.write_bytes(made.read_bytes())
            half.chmod(0o755)
            half.rename(program.path)
            took = time.monotonic() - begun
            sys.stdout.write(f"{program.name}: {program.path} in {took:.0f} s\n")
            sys.stdout.flush()


def _required(program: Program) -> str:
    """The modules of a go.mod: those that are built together with the program's."""
    apart = {name for group in APART for name in group}
    together = next((group for group in APART if program.module in group), MODULES.keys() - apart)
    return "".join(
        f"require {name} {version}\n" for name, version in MODULES.items() if name in together
    )


if __name__ == "__main__":
    build(sys.argv[1:] or tuple(BY_NAME))
