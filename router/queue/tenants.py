"""What the configuration says of tenants. Pure."""

from dataclasses import dataclass

from router.config.queue_settings import TenantSettings, TenantsSettings
from router.queue.waiter import Waiter


@dataclass(frozen=True, slots=True)
class Tenants:
    """Shares by settings."""

    settings: TenantsSettings

    def of(self, tenant: str) -> TenantSettings:
        """The settings of a tenant."""
        return self.settings.named.get(tenant, self.settings.default)

    def flow(self, waiter: Waiter) -> str:
        """The name under which a request has its share; empty where tenants don't share."""
        return waiter.tenant if self.settings.fair else ""

    def cost(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Of a request, in uncached tokens; 1 at least, so that no request is free."""
        return max(1.0, uncached_tokens + self.settings.cached_price * cached_tokens)

    def points(self, waiter: Waiter) -> int:
        """A request's priority with what its tenant adds."""
        return waiter.priority + self.of(waiter.tenant).priority
