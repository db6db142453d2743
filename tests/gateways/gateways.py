"""The gateways that are run: how each is installed, and the ways by which requests reach engines.

What an operator sets is in helm/gateways; what is set here is of this cluster alone: names of
images, and what Istio's own build of Envoy has and the upstream one lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.release import ROOT
from tests.gateways.binaries import AI_GATEWAY, CONTOUR, ENVOY_GATEWAY, ISTIO, MODULES

OURS = ROOT / "helm" / "gateways"


@dataclass(frozen=True)
class Chart:
    """A chart of a gateway's Go module."""

    release: str
    namespace: str
    module: str
    path: str
    files: tuple[str, ...] = ()
    """Files of values: of helm/gateways, or of the module where they begin with "/"."""
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Way:
    """How requests reach the engines: by a host name of the gateway."""

    name: str
    host: str
    picker: bool = False
    """The gateway asks the picker; else kvroute's own gateway forwards, and checks keys."""
    fails_open: bool = False
    """The gateway picks by itself while there is no picker."""


@dataclass(frozen=True)
class Gateway:
    name: str
    programs: tuple[str, ...]
    """Names of binaries.PROGRAMS."""
    charts: tuple[Chart, ...]
    manifests: tuple[tuple[str, str], ...]
    """Modules, and files of them that are applied before the charts."""
    ours: tuple[str, ...]
    """Manifests of helm/gateways, applied in the release's namespace."""
    values: tuple[str, ...]
    """Values of kvroute, of helm/gateways."""
    ways: tuple[Way, ...]
    namespaces: tuple[str, ...]
    """Namespaces of the gateway, which end with it."""
    conforms: str = ""
    """The GatewayClass for the conformance suite."""
    address: tuple[str, str] = ("gateway", "inference-gateway")
    """The object whose status has the address of the gateway."""


POOL = Way("InferencePool", "pool.example.com", picker=True)
ROUTE = Way("HTTPRoute", "api.example.com")
INGRESS = Way("Ingress", "api.example.com")
POOL_BY_MODEL = Way("AIGatewayRoute", "models.example.com", picker=True)

ISTIOD = Chart(
    "istiod",
    "istio-system",
    ISTIO,
    "manifests/charts/istio-control/istio-discovery",
    ("istio-values.yaml",),
    {
        "global": {"hub": "istio", "tag": "upstream", "imagePullPolicy": "IfNotPresent"},
        "autoscaleEnabled": False,
        # Filters of Istio's own Envoy: statistics, peers' metadata, ALPN.
        "telemetry": {"enabled": False},
        "env": {"PILOT_ENABLE_METADATA_EXCHANGE": "false", "PILOT_ENABLE_ALPN_FILTER": "false"},
    },
)
_ENVOY_GATEWAY_IMAGE = f"envoyproxy/gateway:{MODULES[ENVOY_GATEWAY]}"
_ENVOY_GATEWAY_VALUES: dict[str, Any] = {
    "global": {
        "images": {
            "envoyGateway": {"image": _ENVOY_GATEWAY_IMAGE, "pullPolicy": "IfNotPresent"},
            "envoyProxy": {"image": "envoyproxy/envoy:upstream"},
        }
    },
    "crds": {"enabled": False},
    "config": {
        "envoyGateway": {
            "provider": {
                "type": "Kubernetes",
                "kubernetes": {"shutdownManager": {"image": _ENVOY_GATEWAY_IMAGE}},
            }
        }
    },
}


def _envoy_gateway(*files: str) -> Chart:
    return Chart(
        "eg",
        "envoy-gateway-system",
        ENVOY_GATEWAY,
        "charts/gateway-helm",
        files,
        _ENVOY_GATEWAY_VALUES,
    )


def _ai_gateway(chart: str) -> Chart:
    def of(program: str) -> dict[str, str]:
        return {"repository": f"envoyproxy/ai-gateway-{program}", "tag": MODULES[AI_GATEWAY]}

    return Chart(
        chart,
        "envoy-ai-gateway-system",
        AI_GATEWAY,
        f"manifests/charts/{chart}",
        values={"controller": {"image": of("controller")}, "extProc": {"image": of("extproc")}},
    )


_ENVOY_GATEWAY_RESOURCES = (ENVOY_GATEWAY, "charts/gateway-helm/charts/crds/crds/generated")

GATEWAYS = (
    Gateway(
        "istio",
        programs=("pilot-discovery", "pilot-agent"),
        charts=(ISTIOD,),
        manifests=((ISTIO, "manifests/charts/base/files/crd-all.gen.yaml"),),
        ours=("istio.yaml",),
        values=("kvroute-pool.yaml", "kvroute-route.yaml"),
        ways=(Way(POOL.name, POOL.host, picker=True, fails_open=True), ROUTE),
        namespaces=("istio-system",),
        conforms="istio",
    ),
    Gateway(
        "envoy-gateway",
        programs=("envoy-gateway",),
        charts=(_envoy_gateway(),),
        manifests=(_ENVOY_GATEWAY_RESOURCES,),
        ours=("envoy-gateway.yaml",),
        values=("kvroute-route.yaml",),
        ways=(ROUTE,),
        namespaces=("envoy-gateway-system",),
    ),
    Gateway(
        "envoy-ai-gateway",
        programs=("envoy-gateway", "ai-gateway-controller", "ai-gateway-extproc"),
        charts=(
            _ai_gateway("ai-gateway-crds-helm"),
            _ai_gateway("ai-gateway-helm"),
            _envoy_gateway(
                f"{AI_GATEWAY}/manifests/envoy-gateway-values.yaml",
                f"{AI_GATEWAY}/examples/inference-pool/envoy-gateway-values-addon.yaml",
            ),
        ),
        manifests=(_ENVOY_GATEWAY_RESOURCES,),
        ours=("envoy-gateway.yaml", "envoy-ai-gateway.yaml"),
        values=("kvroute-pool.yaml",),
        ways=(POOL, POOL_BY_MODEL),
        namespaces=("envoy-gateway-system", "envoy-ai-gateway-system"),
        conforms="envoy-gateway",
    ),
    Gateway(
        "contour",
        programs=("contour",),
        charts=(),
        manifests=((CONTOUR, "examples/contour"),),
        ours=("contour.yaml",),
        values=("kvroute-ingress.yaml",),
        ways=(INGRESS,),
        namespaces=("projectcontour",),
        address=("ingress", "kvroute"),
    ),
)


def file_of(name: str, folder: Any) -> Path:
    """A file of values: MODULE/PATH, or a name in helm/gateways. folder: that of a module."""
    for module in MODULES:
        if name.startswith(f"{module}/"):
            path: Path = folder(module) / name.removeprefix(f"{module}/")
            return path
    return OURS / name
