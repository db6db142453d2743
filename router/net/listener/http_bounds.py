"""Bounds on the connections of an HTTP port."""

from dataclasses import dataclass
from typing import Protocol

from router.net.listener.connections import PortBounds

HEAD_TIMEOUT_S = 20.0
"""Seconds for TLS and the first request's line and headers, or HTTP/2's first bytes, and then for
each later request's: a client far away needs a few seconds, and a hostile one holds a place this
long."""
IDLE_TIMEOUT_S = 300.0
"""Seconds for which an HTTP/1 connection may stay open without a request: longer than proxies
and clients' pools commonly keep one (60 s), so that they close it first."""


class HttpKeys(Protocol):
    """The section `http` of the configuration."""

    @property
    def connections_max(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """Bounds of an HTTP port: those of the section `http`, and fixed ones."""

    connections_max: int = 10_000
    idle_timeout_s: float = IDLE_TIMEOUT_S
    head_timeout_s: float = HEAD_TIMEOUT_S
    read_s: float = 300.0
    """Seconds in which a client takes nothing of an answer that waits for it, until its connection
    ends: most of a socket's buffer, which a slow client may have to read first, is no progress."""
    linger_s: float = 2.0
    """Seconds for which the rest of a body is read after its request's answer, so that its client
    reads the answer before the connection is closed."""

    @classmethod
    def of(cls, keys: HttpKeys) -> "HttpBounds":
        """The bounds with the values of the section `http`; the times are fixed."""
        return cls(
            connections_max=keys.connections_max,
            head_timeout_s=HEAD_TIMEOUT_S,
        )

    @property
    def port(self) -> PortBounds:
        """The bounds on the number of connections, and on the seconds until one begins."""
        return PortBounds(self.connections_max, self.head_timeout_s)
