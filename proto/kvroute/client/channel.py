"""Where the router is and how the connection to it behaves."""

import ipaddress
import json
from collections.abc import Sequence

import grpc
import grpc.aio

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""The router's own limit: a prompt of a million tokens is 4 MB, its receipt is small."""

OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A peer that vanished without a word is noticed within 40 s by an idle watch, within 10 s by a
    # call that has bytes on the way. The router takes pings from 10 s on.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # gRPC's defaults (1 s to 2 min) would keep failing our retries long after a router is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # All addresses of a name are replicas of one router: use every one of them. A report that
    # reaches another replica is passed on to the owner of the reservation.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
)


def target_of(targets: str | Sequence[str]) -> str:
    """gRPC's name for one target, or for several replicas.

    One: host:port (a DNS name may stand for many replicas), unix:path, or any gRPC target. Several:
    addresses with ports, all IPv4 or all IPv6, since gRPC resolves one name a channel.
    Raises ValueError.
    """
    listed = [targets] if isinstance(targets, str) else list(targets)
    if not listed or not all(listed):
        raise ValueError("a target is missing or empty")
    if len(listed) == 1:
        return listed[0]
    versions = {_ip_version(target) for target in listed}
    if versions == {4}:
        return "ipv4:" + ",".join(listed)
    if versions == {6}:
        return "ipv6:" + ",".join(listed)
    raise ValueError(
        "several targets must all be IPv4 or all be IPv6 addresses with ports; for names, give one "
        f"that resolves to all replicas: {', '.join(listed)}"
    )


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, str | int]],
) -> grpc.aio.Channel:
    """A channel that connects with its first call; `options` win over ours. Needs a loop."""
    merged = tuple((dict(OPTIONS) | dict(options)).items())
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=merged)
    return grpc.aio.secure_channel(target, credentials, options=merged)


def _ip_version(target: str) -> int | None:
    host, _, port = target.rpartition(":")
    try:
        return ipaddress.ip_address(host.strip("[]")).version if port.isdigit() else None
    except ValueError:
        return None
