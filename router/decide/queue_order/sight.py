"""Facts that orders read beside a request: workers' caches and load, tenants' service. Pure."""

from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import Protocol

from router.decide.waiter import Waiter

TENANTS_MAX = 4096
"""Tenants whose attained service is remembered; over it the one that was served least recently is
forgotten."""
SERVICE_WINDOW_S = 60.0
"""Seconds after which attained service has 37 % (1 / e) of its weight."""


class Fleet(Protocol):
    """Interface: facts about the workers of a request's pool."""

    def overlap_tokens(self, waiter: Waiter) -> int:
        """Leading prompt tokens cached on the worker with room that has the most of them."""

    def load(self, waiter: Waiter) -> float:
        """Load of the request's pool: work in flight / work that its workers can take, 0 or
        more.
        """

    def is_prefilling(self, reservation_id: str) -> bool:
        """Whether a reservation is open, and its prompt is not known to be computed."""


class Service:
    """Tokens of the requests of each tenant that got a worker lately."""

    def __init__(self) -> None:
        self._attained: dict[str, tuple[float, float]] = {}
        """Weighted tokens, and as of when, by tenant; the one served least recently in front."""

    def __len__(self) -> int:
        return len(self._attained)

    def add(self, tenant: str, tokens: float, now_s: float) -> None:
        """Counts the tokens of a tenant's request that has its worker."""
        attained = self.of(tenant, now_s) + tokens
        self._attained.pop(tenant, None)
        self._attained[tenant] = attained, now_s
        if len(self._attained) > TENANTS_MAX:
            del self._attained[next(iter(self._attained))]

    def of(self, tenant: str, now_s: float) -> float:
        """A tenant's recent service, weighted by exp(-age / SERVICE_WINDOW_S)."""
        tokens, at_s = self._attained.get(tenant, (0.0, now_s))
        return tokens * exp(min(0.0, at_s - now_s) / SERVICE_WINDOW_S)


@dataclass(slots=True)
class Sight:
    """All facts that a score may be made of, beside the request itself."""

    rng: Random
    fleet: Fleet
    service: Service = field(default_factory=Service)
    now_s: float = 0.0
    """Time of the ranking under way."""
