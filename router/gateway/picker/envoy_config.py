"""A configuration of Envoy with kvroute as its endpoint picker: envoy.yaml, with the addresses and
options of one fleet."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import yaml


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int


def envoy_config(
    *,
    listen: Address,
    admin: Address | None,
    pickers: Sequence[Address],
    workers: Sequence[Address],
    shows_answers: bool = True,
    tls_ca_file: str = "",
    retries: int = 2,
) -> dict[str, Any]:
    """The configuration of Envoy, as a tree for YAML or JSON.

    admin: of Envoy's own page; None: no such page. shows_answers: False: answers don't pass through
    the picker, which then costs them nothing and can't cut them, but sees neither their end nor
    their cached tokens. tls_ca_file: CAs by which the pickers' certificates are checked; empty: no
    TLS. retries: further endpoints of the picker's list on which a request is tried
    (picker.fallbacks).
    """
    text = files("router.gateway.picker").joinpath("envoy.yaml").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(text)
    (listener,) = config["static_resources"]["listeners"]
    fleet, kvroute = config["static_resources"]["clusters"]
    listener["address"] = _socket(listen)
    for cluster, addresses in ((fleet, workers), (kvroute, pickers)):
        cluster["type"] = _type_of(addresses)
        cluster["load_assignment"] = _endpoints(cluster["name"], addresses)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    if retries:
        route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
        retry_on = "connect-failure,refused-stream,unavailable"
        route["retry_policy"] = {"retry_on": retry_on, "num_retries": retries}
    if not shows_answers:
        mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
        mode["response_header_mode"] = mode["response_trailer_mode"] = "SKIP"
        mode["response_body_mode"] = "NONE"
    if tls_ca_file:
        kvroute["transport_socket"] = _tls(tls_ca_file)
    if admin is not None:
        config = {"admin": {"address": _socket(admin)}, **config}
    return config


def _tls(ca_file: str) -> dict[str, Any]:
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    trusted = {"trusted_ca": {"filename": ca_file}}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": kind,
            "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": trusted},
        },
    }


def _type_of(addresses: Sequence[Address]) -> str:
    """Envoy's type of a cluster: STATIC if all hosts are IP addresses, else STRICT_DNS."""
    is_static = all(":" in each.host or each.host.replace(".", "").isdigit() for each in addresses)
    return "STATIC" if is_static else "STRICT_DNS"


def _endpoints(name: str, addresses: Sequence[Address]) -> dict[str, Any]:
    each = [{"endpoint": {"address": _socket(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": each}]}


def _socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address.host, "port_value": address.port}}
