"""The HTTP ports of kvroute's programs."""

from collections.abc import Mapping
from typing import NamedTuple

from router.request.bodies import PATHS
from tests.docs.reference.markdown import code, table

HEAD = """# HTTP

Every path of the programs' HTTP ports, made by `python -m tests.docs.reference`. Ports are off
unless their `listen` is set, but for the metrics'. [Security](security.md#ports) has their keys.
"""


class Path(NamedTuple):
    """A method and a path of a port."""

    method: str
    path: str
    meaning: str


PORTS: Mapping[str, tuple[str, list[Path]]] = {
    "metrics.listen": (
        "Of `kvroute serve` and `kvroute relay`; `kvroute picker` has one, too.",
        [
            Path(
                "GET", "/metrics", "metrics, as text for Prometheus ([list](reference-metrics.md))"
            ),
            Path("GET", "/console", "of a router with `console.enabled`: on to `/console/`"),
            Path("GET", "/console/", "[the console](console.md): the page, without numbers"),
            Path("GET", "/console/{name}", "its modules and styles"),
            Path("GET", "/console/session", "200 for a browser that is signed in, else 401"),
            Path("POST", "/console/session", "signs in: a key becomes a cookie"),
            Path("DELETE", "/console/session", "signs out"),
            Path(
                "GET",
                "/console/decisions",
                "past decisions of `id`: a request, client or reservation",
            ),
            Path("GET", "/console/events", "the router's state each second, as server-sent events"),
        ],
    ),
    "probes.listen": (
        "Of `kvroute serve` and `kvroute picker`: plain HTTP for the kubelet and load balancers.",
        [
            Path("GET", "/livez", "200 while the process answers"),
            Path(
                "GET",
                "/readyz",
                "200 while the router is ready, else 503; of `kvroute picker`: while a worker can"
                " be picked and the picker isn't stopping",
            ),
        ],
    ),
    "gateway.listen": (
        "Of `kvroute serve` and `kvroute gateway`: [the gateway](gateway.md).",
        [
            Path("GET", "/health", "200 while the process answers"),
            Path(
                "GET",
                "/ready",
                "200 while a worker can be picked and the gateway isn't stopping, else 503",
            ),
            Path(
                "GET",
                "/metrics",
                "the gateway's metrics; needs the right `observe` where keys are on",
            ),
            Path(
                "GET", "/v1/models", "the models that workers serve, with their LoRAs and aliases"
            ),
            Path("GET", "/v1/models/{name}", "one of them"),
            *(Path("POST", path, kind.about) for path, kind in PATHS.items()),
            Path("OPTIONS", "*", "204, without a key: what a browser asks first (CORS)"),
            Path(
                "any",
                "any other",
                "404 `UNKNOWN_PATH`; 405 `METHOD_NOT_ALLOWED` for another method of a path",
            ),
        ],
    ),
}


def page() -> str:
    lines = [HEAD]
    for key, (about, paths) in PORTS.items():
        together: dict[tuple[str, str], list[str]] = {}
        for one in paths:
            path = code(one.path) if one.path[0] == "/" else one.path
            together.setdefault((one.method, one.meaning), []).append(path)
        cells = [
            (method, ", ".join(those), meaning) for (method, meaning), those in together.items()
        ]
        lines += [f"## {key}", "", about, "", *table(("method", "path", "answer"), cells), ""]
    return "\n".join(lines)
