"""The programs of a cluster, built from Go modules and kept by version outside of the checkout.

    python -m tests.cluster build

Nothing is downloaded but modules, by the Go toolchain as it is configured. Files are
`kube-apiserver-v1.34.4` and the like in `${KVROUTE_CACHE}/bin` (`cache()`); one that is there is
not built again. The first build takes 15 to 35 minutes on two cores and 10 GB of Go's own caches,
which may be deleted afterwards.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path
from tempfile import TemporaryDirectory

KUBERNETES = "v1.34.4"
STAGING = KUBERNETES.replace("v1.", "v0.")
SOURCES = Path(__file__).parent / "sources"
STRIPPED = "-s -w"
# Without these the components call themselves v0.0.0-master, which a chart's kubeVersion refuses.
_VERSION = {
    "k8s.io/component-base/version.gitVersion": KUBERNETES,
    "k8s.io/component-base/version.gitMajor": "1",
    "k8s.io/component-base/version.gitMinor": KUBERNETES.split(".")[1],
    "k8s.io/component-base/version.gitTreeState": "clean",
    "k8s.io/client-go/pkg/version.gitVersion": KUBERNETES,
}
VERSIONED = " ".join([STRIPPED, *(f"-X {name}={value}" for name, value in _VERSION.items())])


@dataclass(frozen=True)
class Binary:
    """A program: its name, its module with version, and its package in the module."""

    name: str
    module: str
    version: str
    package: str = ""
    """Folder of the main package in the module; "" is the module's root."""
    source: str = ""
    """A main of ours in sources/, in the place of a package of the module."""
    kubernetes: str = ""
    """"needs" a module whose Kubernetes libraries are this version's; "is" Kubernetes itself."""
    flags: str = STRIPPED
    requires: tuple[str, ...] = ()
    """More modules, MODULE@VERSION, of the scratch module that it is built in."""

    @property
    def path(self) -> Path:
        return cache() / "bin" / f"{self.name}-{self.version}"


def _kubernetes(name: str) -> Binary:
    return Binary(
        name,
        "k8s.io/kubernetes",
        KUBERNETES,
        f"cmd/{name}",
        kubernetes="is",
        flags=VERSIONED,
    )


_HELM3, _HELM4 = "v3.19.5", "v4.2.3"
API = (
    _kubernetes("kube-apiserver"),
    _kubernetes("kubectl"),
    Binary("etcd", "go.etcd.io/etcd/server/v3", "v3.6.16"),
)
"""What a dry run needs."""
NODE = (
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    Binary(
        "coredns", "github.com/coredns/coredns", "v1.12.4", source="coredns", kubernetes="needs"
    ),
    Binary("pause", "", "1", source="pause"),
    Binary(
        "helm",
        "helm.sh/helm/v3",
        _HELM3,
        "cmd/helm",
        flags=f"{STRIPPED} -X helm.sh/helm/v3/internal/version.version={_HELM3}",
    ),
    Binary("helm4", "helm.sh/helm/v4", _HELM4, "cmd/helm"),
    Binary(
        "metrics-server",
        "sigs.k8s.io/metrics-server",
        "v0.8.0",
        "cmd/metrics-server",
        kubernetes="needs",
    ),
    # Its Kubernetes libraries are its own, of 0.29: the longest build that shares nothing.
    Binary("kube-router", "github.com/cloudnativelabs/kube-router/v2", "v2.1.0", "cmd/kube-router"),
)
ALL = API + NODE


@dataclass(frozen=True)
class Resources:
    """Definitions of custom resources of another project, from its Go module."""

    module: str
    version: str
    files: str
    """Paths in the module, with wildcards."""
    kinds: tuple[str, ...]
    """What the chart makes, or what is made of it."""

    @property
    def path(self) -> Path:
        of = "-".join((*self.kinds, self.version)).lower()
        return cache() / "resources" / f"{self.module.replace('/', '-')}-{of}.yaml"


RESOURCES = (
    Resources(
        "sigs.k8s.io/gateway-api",
        "v1.6.1",
        "config/crd/standard/*.yaml",
        ("GatewayClass", "Gateway", "HTTPRoute", "BackendTLSPolicy", "ReferenceGrant"),
    ),
    Resources(
        "sigs.k8s.io/gateway-api-inference-extension",
        "v1.6.0",
        "config/crd/bases/*.yaml",
        ("InferencePool",),
    ),
    Resources(
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "example/prometheus-operator-crd/*.yaml",
        ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    ),
    Resources(
        "github.com/kedacore/keda/v2", "v2.21.0", "config/crd/bases/*.yaml", ("ScaledObject",)
    ),
    Resources(
        "github.com/cert-manager/cert-manager", "v1.21.2", "deploy/crds/*.yaml", ("Certificate",)
    ),
    Resources("istio.io/api", "v1.32.0", "kubernetes/*.gen.yaml", ("DestinationRule",)),
)
PROGRAMS = (
    *("containerd", "ctr", "runc", "iptables", "ip6tables", "ipset", "conntrack", "ip"),
    *("nsenter", "unshare", "setpriv", "buildah", "mmdebstrap"),
)
"""What is the machine's own: README.md says in which of Debian's packages."""
BY_NAME = {one.name: one for one in ALL}


def cache() -> Path:
    """Folder of what takes long to make: ${KVROUTE_CACHE}, else kvroute/ in the user's caches."""
    if named := os.environ.get("KVROUTE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvroute"


def missing(wanted: Iterable[Binary | Resources] = ALL) -> list[str]:
    """Names of the files that are yet to be made, and of programs that are not installed."""
    files = [one.path.name for one in wanted if not one.path.exists()]
    return files + [name for name in PROGRAMS if shutil.which(name) is None]


def build(binaries: Iterable[Binary] = ALL) -> None:
    """Builds what is missing, one after another, at low priority."""
    wanted = [one for one in binaries if not one.path.exists()]
    if wanted and shutil.which("go") is None:
        raise RuntimeError("the cluster's programs are built by Go, and there is no `go` on PATH")
    for one in wanted:
        begun = time.monotonic()
        _build(one)
        took = time.monotonic() - begun
        size = one.path.stat().st_size / 1e6
        sys.stdout.write(f"{one.name} {one.version}: {size:.0f} MB in {took:.0f} s\n")
        sys.stdout.flush()


_NAMES = re.compile(r"^  names:\n(?:    .*\n)*?    kind: (\w+)$", re.MULTILINE)


def fetch(resources: Iterable[Resources] = RESOURCES) -> None:
    """Makes one file of each project's definitions."""
    for one in resources:
        if not one.path.exists():
            downloaded = go("mod", "download", "-json", f"{one.module}@{one.version}")
            folder = Path(json.loads(downloaded)["Dir"])
            made = [
                each
                for file in sorted(folder.glob(one.files))
                for each in re.split(r"^---$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
                if (names := _NAMES.search(each)) and names[1] in one.kinds
            ]
            if len(made) != len(one.kinds):
                raise RuntimeError(f"{one.module} {one.version} does not define all {one.kinds}")
            one.path.parent.mkdir(parents=True, exist_ok=True)
            one.path.write_text("\n---\n".join(made), encoding="utf-8")


def _build(one: Binary) -> None:
    one.path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="kvroute-build-") as scratch:
        folder = Path(scratch)
        package = "/".join(filter(None, (one.module, one.package)))
        if one.source:
            shutil.copy(SOURCES / f"{one.source}.go", folder / "main.go")
            package = "."
        (folder / "go.mod").write_text(f"module cluster.local/{one.name}\n\n{_module(one)}")
        if one.kubernetes == "is":
            shutil.copy(_kubernetes_source() / "go.sum", folder)
        made = folder / "made"
        go("build", "-ldflags", one.flags, "-o", str(made), package, cwd=folder)
        # A rename in one folder, so that a build that is stopped leaves no half of a program.
        half = one.path.with_suffix(f".{os.getpid()}")
        shutil.move(made, half)
        half.rename(one.path)


def _module(one: Binary) -> str:
    lines = ["go 1.24.0", "godebug default=go1.24", ""]
    if one.kubernetes == "needs":
        lines.append(f"require k8s.io/kubernetes {KUBERNETES}")
    if one.module:
        lines.append(f"require {one.module} {one.version}")
    lines += [f"require {required.replace('@', ' ')}" for required in one.requires]
    if one.kubernetes:
        lines += [f"replace {name} => {name} {STAGING}" for name in _staging()]
    return "\n".join(lines) + "\n"


@remembered
def _kubernetes_source() -> Path:
    go("mod", "download", f"k8s.io/kubernetes@{KUBERNETES}")
    modules = go("env", "GOMODCACHE").strip()
    return Path(modules) / f"k8s.io/kubernetes@{KUBERNETES}"


@remembered
def _staging() -> Sequence[str]:
    """Modules that live in Kubernetes' own repository, which it requires as v0.0.0."""
    text = (_kubernetes_source() / "go.mod").read_text(encoding="utf-8")
    return re.findall(r"^\s+(k8s\.io/\S+) v0\.0\.0$", text, re.MULTILINE)


def go(*arguments: str, cwd: Path = Path("/")) -> str:
    """Runs the Go toolchain; raises with its last lines where it fails."""
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-mod=mod -buildvcs=false -trimpath",
        "GOWORK": "off",
    }
    ran = subprocess.run(
        ["nice", "-n", "10", "go", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"go {' '.join(arguments)}:\n{ran.stderr[-2000:]}")
    return ran.stdout
