"""The peer of a connection: its address, and the names in its certificate."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.net.listener.addresses import unmapped


class Peer:
    """The address and certificate names of a peer, as grpc.aio's `peer()` and `auth_context()`."""

    def __init__(self, transport: Any) -> None:
        """transport: asyncio's."""
        self.address = _address(transport.get_extra_info("peername"))
        self.names: Mapping[str, Sequence[bytes]] = _names(transport.get_extra_info("peercert"))


def _address(peername: Any) -> str:
    if not isinstance(peername, tuple) or len(peername) < 2:
        return "unix:" if isinstance(peername, (str, bytes)) else "?"
    host, port = unmapped(peername[0]), peername[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _names(certificate: Any) -> dict[str, list[bytes]]:
    """certificate: a verified one, as ssl.SSLSocket.getpeercert gives it; None or empty: none."""
    names: dict[str, list[bytes]] = {}
    if not certificate:
        return names
    for kind, value in certificate.get("subjectAltName", ()):
        if kind == "URI" and value.startswith("spiffe://"):
            names.setdefault("peer_spiffe_id", []).append(value.encode())
        if kind in ("DNS", "URI", "IP Address", "email"):
            names.setdefault("x509_subject_alternative_name", []).append(value.encode())
    for relative in certificate.get("subject", ()):
        for key, value in relative:
            if key == "commonName":
                names.setdefault("x509_common_name", []).append(value.encode())
    return names
