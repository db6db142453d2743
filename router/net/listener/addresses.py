"""Opens listening sockets, and groups clients by address.

Laws:
- `[::]`, or no host at all, means every address of both families; on a host without IPv6, every
  IPv4 address. `0.0.0.0` means every IPv4 address;
- a name means each of its addresses that this host has, on one port;
- a Unix socket's file replaces that of a socket on which nothing listens, and no other file;
- an IPv6 client is counted by its /64, in which a host may take any address; a client with an
  IPv4-mapped address is counted as an IPv4 client.
"""

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISSOCK

BACKLOG = 1024
_MISSING = frozenset(
    (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT, errno.EPFNOSUPPORT)
)
"""Errors for an address, or a family of addresses, that this host does not have."""
_ATTEMPTS = 8
"""Attempts to get one port that is free on every address of a name."""
_MAPPED = bytes(10) + b"\xff\xff"
UNIX_CLIENT = "unix"
"""The address of all clients of a Unix socket."""


async def listening(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Listening sockets for each address of a host, on one port; port 0: a free one. Raises
    OSError.
    """
    if _is_every(host):
        try:
            return [_bound(socket.AF_INET6, ("::", port), reuse_port, dual=True)]
        except OSError as error:
            if error.errno not in _MISSING:
                raise
            return [_bound(socket.AF_INET, ("0.0.0.0", port), reuse_port)]
    infos = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in infos))
    for _ in range(_ATTEMPTS - 1 if port == 0 and len(addresses) > 1 else 0):
        try:
            return _all_bound(addresses, reuse_port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _all_bound(addresses, reuse_port)


def listening_unix(path: Path, mode: int) -> socket.socket:
    """A listening unix socket, whose file has the permissions `mode` from the first moment. Raises
    OSError.
    """
    _remove_stale(path)
    before = os.umask(0o777 & ~mode)
    try:
        return _bound(socket.AF_UNIX, str(path))
    finally:
        os.umask(before)


def unmapped(host: str) -> str:
    """A client's address without its IPv4-mapped form: 10.0.0.1 for ::ffff:10.0.0.1."""
    return host[7:] if host.startswith("::ffff:") and "." in host else host


def client_of(host: str) -> str:
    """The name by which connections of a client are counted: its IPv4 address, or its IPv6 /64."""
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed.startswith(_MAPPED):
        return socket.inet_ntoa(packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


def _remove_stale(path: Path) -> None:
    """Removes the file of a Unix socket on which nothing listens; leaves any other file."""
    try:
        if not S_ISSOCK(path.stat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its backlog is full: something listens


def _is_every(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host or "::")
    except ValueError:
        return False
    return address.version == 6 and address.is_unspecified


def _all_bound(
    addresses: Sequence[tuple[socket.AddressFamily, tuple[object, ...]]], reuse_port: bool
) -> list[socket.socket]:
    """Sockets listening on those addresses that this host has; raises OSError if it has none, or
    an address is in use."""
    sockets: list[socket.socket] = []
    try:
        for left, (family, (host, port, *more)) in enumerate(addresses, 1 - len(addresses)):
            port = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound(family, (host, port, *more), reuse_port))
            except OSError as error:
                if error.errno not in _MISSING or not (left or sockets):
                    raise
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bound(
    family: socket.AddressFamily,
    address: tuple[object, ...] | str,
    reuse_port: bool = False,
    *,
    dual: bool = False,
) -> socket.socket:
    """A listening, non-blocking socket; raises OSError. dual: whether an IPv6 socket takes IPv4
    clients, too, with IPv4-mapped addresses."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
