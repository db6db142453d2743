"""How long a request may wait, as its caller gave it. Pure."""

from math import inf

import msgspec


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """How long a request may wait, as its caller gave it."""

    priority: int = 0
    """Higher is sooner."""
    timeout_s: float | None = None
    """The longest wait; None: as configured, 0: none."""
    deadline_s: float = inf
    """When the caller's call ends, on the router's clock."""
    ttft_slo_s: float | None = None
    """Seconds from arrival to the first token, as the caller wants it; None: no wish."""
    waited_s: float = 0.0
    """Seconds in routers that are gone, as the caller says; they count once one is gone."""
