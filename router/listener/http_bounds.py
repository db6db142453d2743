"""Bounds on the connections of an HTTP port."""

import msgspec

from router.config.settings.serving_settings import HttpSettings
from router.listener.connections import PortBounds

HEAD_TIMEOUT_S = 20.0
"""For TLS and the first request's line and headers, or HTTP/2's first bytes, and then for each
later request's: a client far away needs a few seconds, and a hostile one holds a place this
long."""


class HttpBounds(HttpSettings, frozen=True):
    """The keys of `http`, and the bounds that no key turns. Only tests have others of these."""

    head_timeout_s: float = HEAD_TIMEOUT_S
    linger_s: float = 2.0
    """For which the rest of a body is read after its request's answer, so that its client reads the
    answer before the connection is closed."""

    @classmethod
    def of(cls, settings: HttpSettings) -> "HttpBounds":
        """As configured."""
        return cls(**msgspec.structs.asdict(settings), head_timeout_s=HEAD_TIMEOUT_S)

    @property
    def port(self) -> PortBounds:
        """Those on connections as such."""
        return PortBounds(self.connections_max, self.address_connections_max, self.head_timeout_s)
