"""Addresses of routers, and settings of the connections to them."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of a message that is sent or received, at most, as in the router: a prompt of a million
tokens is 4 MB, its receipt is small."""

OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A connection to a router that vanished ends within 35 s if a stream is open on it, and within
    # 5 s of bytes that its kernel does not acknowledge (gRPC sets TCP_USER_TIMEOUT to the
    # same). Calls don't wait for that, see silence.py; but TCP doubles its pauses between
    # retransmissions, and after 5 s a new connection is open before the old connection's next
    # retransmission. The router accepts a ping every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # With gRPC's defaults (1 s to 2 min) retries would fail long after a router is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_PORT = "443"
"""Port of a name without a port, as in gRPC."""
_PORT_MAX = 65_535
_SCHEMES = frozenset({"dns", "google-c2p", "unix", "unix-abstract", "vsock", "xds"})
"""Schemes of targets that gRPC takes as they are. Source: gRPC's documentation, "gRPC Name
Resolution"."""
_HOST_AND_PORT = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]:,/\s]+)(?::([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Target:
    """A user's target: an address as gRPC takes it, or a name that may resolve to several."""

    text: str
    host: str | None = None
    """The name to resolve; None: `text` is an address."""
    port: str = _PORT


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one router."""

    target: str
    """The router's address, as gRPC takes it."""
    host: str | None = None
    """The name that resolved to it: its certificate must be for this name, which is also the
    authority of calls."""


def targets_of(targets: str | Sequence[str]) -> list[Target]:
    """The targets in one string, or in several.

    host:port (with or without dns:///; a name stands for every address it has), ipv4:a:1,b:2 and
    ipv6: likewise, unix:path, or any other target that gRPC knows. Raises ValueError.
    """
    listed = [targets] if isinstance(targets, str) else list(targets)
    if not listed or not all(listed):
        raise ValueError("targets is empty or has an empty text: give HOST:PORT")
    return [target for text in listed for target in _read(text)]


def _read(text: str) -> list[Target]:
    scheme, _, rest = text.partition(":")
    if scheme in {"ipv4", "ipv6"}:
        return [Target(_checked(address)) for address in rest.split(",")]
    if text.startswith("dns:///"):
        text = text.removeprefix("dns:///")
    elif scheme in _SCHEMES and rest and not rest.isdigit():
        return [Target(text)]
    host, port = _host_and_port(text)
    return [Target(text) if _is_ip(host) else Target(text, host, port)]


def _checked(address: str) -> str:
    """Checks and returns one address of an ipv4: or ipv6: target, which may be an IPv6 address
    without brackets and port; raises ValueError."""
    if not _is_ip(address):
        _host_and_port(address)
    return address


def _host_and_port(text: str) -> tuple[str, str]:
    """The host, with its brackets, and the port of a target; raises ValueError where gRPC would
    take another host or port than those written."""
    read = _HOST_AND_PORT.fullmatch(text)
    if read is None or (text.startswith("[") and not _is_ip(read[1])):
        raise ValueError(
            f"{text!r} is no target: give HOST:PORT without http://, an IPv6 address in brackets"
        )
    host, port = read[1], read[2] or _PORT
    if len(port) > len(str(_PORT_MAX)) or not 0 < int(port) <= _PORT_MAX:
        raise ValueError(f"{text!r} is no target: its port is not from 1 to {_PORT_MAX}")
    return host, port


async def addresses_of(target: Target) -> list[Address]:
    """The routers that a target resolves to; raises OSError for a name that has no address."""
    if target.host is None:
        return [Address(target.text)]
    loop = asyncio.get_running_loop()
    resolved = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = []
    for family, _, _, _, name in resolved:
        ip = f"[{name[0]!s}]" if family == socket.AF_INET6 else str(name[0])
        addresses.append(Address(f"{ip}:{target.port}", target.text))
    return list(dict.fromkeys(addresses))


def open_channel(
    address: Address,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, str | int]],
) -> grpc.aio.Channel:
    """A channel that connects at its first call; `options` override OPTIONS. Needs a loop."""
    merged: dict[str, str | int] = dict(OPTIONS)
    if address.host is not None:
        merged["grpc.default_authority"] = address.host
    merged |= dict(options)
    if credentials is None:
        return grpc.aio.insecure_channel(address.target, options=tuple(merged.items()))
    return grpc.aio.secure_channel(address.target, credentials, options=tuple(merged.items()))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
