"""Checks the addresses of engines to which a caller of RegisterWorker has the router connect. Pure.

Laws:
- only IP addresses count: a name may resolve to another address after it was looked at;
- link-local addresses, and those where clouds serve credentials, are refused even if listed.
"""

import ipaddress
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TypeAlias
from urllib.parse import urlsplit

from events.plane.settings import EngineSettings
from router.config.keys import ConfigError
from router.request.refusal import Reason, Refusal

Network: TypeAlias = IPv4Network | IPv6Network
METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "192.0.0.192"),
    )
)
"""Addresses of the metadata services of AWS, Google, Azure (IPv4 and IPv6), Alibaba and Oracle."""


def networks_of(text: str) -> tuple[Network, ...]:
    """Parses networks as CIDRs with commas between; raises ConfigError."""
    names = filter(None, (part.strip() for part in text.split(",")))
    try:
        return tuple(map(ipaddress.ip_network, names))
    except ValueError as error:
        raise ConfigError(f"{error} - at `$.fleet.register_networks`") from error


def check_engine_networks(settings: EngineSettings, networks: tuple[Network, ...]) -> None:
    """Raises Refusal for an engine outside the networks that the router may connect to."""
    if not networks:
        raise Refusal(
            Reason.PERMISSION_DENIED,
            "RegisterWorker is off: the router's fleet.register_networks lists no network",
            metadata={"key": "fleet.register_networks"},
        )
    for field, endpoint in _endpoints(settings):
        if reason := _why_not(_host(endpoint), networks):
            raise Refusal(Reason.INVALID_FIELD, f"{field}: {reason}", metadata={"field": field})


def _endpoints(settings: EngineSettings) -> Iterator[tuple[str, str]]:
    """Each address that a relay would call, with the name of its field before it."""
    for field in ("address", "metrics", "events", "replay", "load"):
        if (endpoint := getattr(settings, field)) is not None:
            yield field, endpoint
    if settings.mooncake is not None:
        yield "bootstrap_host", settings.mooncake
    elif settings.bootstrap_host:
        yield "bootstrap_host", f"http://{settings.bootstrap_host}"


def _host(endpoint: str) -> str:
    """The host of a URL or of a ZMQ endpoint; empty: it has none, as ipc://."""
    try:
        parts = urlsplit(endpoint)
        return "" if parts.scheme == "ipc" else parts.hostname or ""
    except ValueError:
        return ""


def _why_not(host: str, networks: tuple[Network, ...]) -> str:
    """Why an address may not be called; empty: it may."""
    try:
        address = _plain(ipaddress.ip_address(host))
    except ValueError:
        return f"the host of a registered engine must be an IP address, not {host!r}"
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return f"{address} is link-local, multicast or unspecified, which no engine may have"
    if address in METADATA:
        return f"{address} is a cloud's metadata service, not an engine"
    if not any(address in network for network in networks):
        return f"{address} is in no network of the router's fleet.register_networks"
    return ""


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address of an IPv4-mapped IPv6 address; any other address unchanged."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
