"""A configuration of Envoy without Kubernetes, with kvroute as its endpoint picker. Pure.

What Envoy's defaults would do, and this avoids (tried with Envoy 1.40):

- a route ends after 15 s, and a connection without bytes after 5 minutes: both cut long answers;
- 1,024 requests at a picker, each of which holds a stream to its end: the next one gets a 500;
- `failure_mode_allow` alone: most requests still fail, since Envoy learns of a dead picker from the
  request itself. Health checks, with no_traffic_interval, and a panic threshold of 0 make it hold;
- metadata that goes neither way unless its namespaces are named.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from router.gateway.picker.calls import EXT_PROC
from router.gateway.picker.messages import ENDPOINT, LB, SERVED, SUBSET_HINT

_TYPE = "type.googleapis.com/envoy."
_OPEN_MAX = 40_000
_LIMITS = {
    "thresholds": [
        {
            "max_connections": _OPEN_MAX,
            "max_pending_requests": _OPEN_MAX,
            "max_requests": _OPEN_MAX,
            "max_retries": 1024,
        }
    ]
}


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

    shows_answers False: answers don't pass through the picker, which then costs them nothing and
    can't cut them, but sees neither their end nor their cached tokens. tls_ca_file: CAs by which
    the pickers' certificates are checked; empty: no TLS. retries: further endpoints of the picker's
    list on which a request is tried (picker.fallbacks).
    """
    config: dict[str, Any] = {
        "static_resources": {
            "listeners": [_listener(listen, shows_answers, retries)],
            "clusters": [_fleet(workers), _pickers(pickers, tls_ca_file)],
        }
    }
    if admin is not None:
        config = {"admin": {"address": _socket(admin)}, **config}
    return config


def _listener(listen: Address, shows_answers: bool, retries: int) -> dict[str, Any]:
    route: dict[str, Any] = {"cluster": "fleet", "timeout": "0s", "idle_timeout": "0s"}
    if retries:
        retry_on = "connect-failure,refused-stream,unavailable"
        route["retry_policy"] = {"retry_on": retry_on, "num_retries": retries}
    filters = [
        {"name": "envoy.filters.http.ext_proc", "typed_config": _ext_proc(shows_answers)},
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": _TYPE + "extensions.filters.http.router.v3.Router"},
        },
    ]
    manager = {
        "@type": _TYPE + "extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "kvroute",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "fleet",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        "http_filters": filters,
    }
    return {
        "name": "openai",
        "address": _socket(listen),
        "per_connection_buffer_limit_bytes": 1 << 20,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }


def _ext_proc(shows_answers: bool) -> dict[str, Any]:
    duplex = "FULL_DUPLEX_STREAMED"
    namespaces = {"untyped": [LB, SUBSET_HINT]}
    return {
        "@type": _TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "kvroute"}},
        "failure_mode_allow": True,
        "message_timeout": "10s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": duplex,
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND" if shows_answers else "SKIP",
            "response_body_mode": duplex if shows_answers else "NONE",
            "response_trailer_mode": "SEND" if shows_answers else "SKIP",
        },
        "metadata_options": {
            "forwarding_namespaces": namespaces,
            "receiving_namespaces": {"untyped": [LB]},
        },
    }


def _fleet(workers: Sequence[Address]) -> dict[str, Any]:
    source = {"metadata": {"key": LB, "path": [{"key": ENDPOINT}]}}
    override = {
        "@type": _TYPE + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "selected_host_key": {"key": LB, "path": [{"key": SERVED}]},
        "fallback_policy": {"policies": [_policy("least_request", "LeastRequest")]},
    }
    policy = {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.override_host",
            "typed_config": override,
        }
    }
    return {
        "name": "fleet",
        "type": _type_of(workers),
        "connect_timeout": "2s",
        "circuit_breakers": _LIMITS,
        "load_balancing_policy": {"policies": [policy]},
        "load_assignment": _endpoints("fleet", workers),
    }


def _policy(name: str, message: str) -> dict[str, Any]:
    kind = f"{_TYPE}extensions.load_balancing_policies.{name}.v3.{message}"
    return {
        "typed_extension_config": {
            "name": f"envoy.load_balancing_policies.{name}",
            "typed_config": {"@type": kind},
        }
    }


def _pickers(pickers: Sequence[Address], tls_ca_file: str) -> dict[str, Any]:
    check = {
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": EXT_PROC},
    }
    http = _TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions"
    keepalive = {"connection_keepalive": {"interval": "30s", "timeout": "5s"}}
    cluster: dict[str, Any] = {
        "name": "kvroute",
        "type": _type_of(pickers),
        "connect_timeout": "1s",
        "circuit_breakers": _LIMITS,
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [check],
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": http,
                "explicit_http_config": {"http2_protocol_options": keepalive},
            }
        },
        "load_assignment": _endpoints("kvroute", pickers),
    }
    if tls_ca_file:
        trusted = {"trusted_ca": {"filename": tls_ca_file}}
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": _TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"], "validation_context": trusted},
            },
        }
    return cluster


def _type_of(addresses: Sequence[Address]) -> str:
    """STATIC for addresses, STRICT_DNS where some is a name."""
    is_static = all(":" in each.host or each.host.replace(".", "").isdigit() for each in addresses)
    return "STATIC" if is_static else "STRICT_DNS"


def _endpoints(name: str, addresses: Sequence[Address]) -> dict[str, Any]:
    each = [{"endpoint": {"address": _socket(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": each}]}


def _socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address.host, "port_value": address.port}}
