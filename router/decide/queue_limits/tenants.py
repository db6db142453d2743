"""Tenants' settings and quotas. Pure.

A tenant over its quota is held: none of its requests has a turn until some of its requests end, or
its bucket of tokens has filled again. A bucket holds one second of tokens_per_s. A request goes
while its tenant's bucket is not empty, and takes its cost from it, so that in T seconds a tenant
gets at most this number of tokens:

    tokens_per_s * (T + 1) + one largest request

A prompt whose length is not known costs a fourth of its bytes, as tokens, until the number of
tokens that its engine counted is reported.

Laws: while a tenant's settings stay the same, it has at most in_flight_max counted requests in
flight; counts are kept only of tenants with a request in flight, and of TENANTS_MAX buckets.
"""

from collections import Counter

from router.config.settings.queue_settings import TenantSettings, TenantsSettings

TENANTS_MAX = 4096
"""Most buckets that are kept; over it the one charged least recently is dropped, and so is full."""
BURST_S = 1.0
"""Size of a bucket, in seconds of its rate."""


class Tenants:
    """Tenants' settings, and what counts against their quotas."""

    def __init__(self, settings: TenantsSettings) -> None:
        self._in_flight: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tokens left, and as of when, by tenant; the one charged least recently first."""
        self.configure(settings)

    def configure(self, settings: TenantsSettings) -> None:
        """Puts other settings in force. Requests in flight stay counted as long as any tenant has a
        quota.
        """
        self._settings = settings
        self.share = settings.fair
        """Whether tenants share the turns of a band by their weights."""
        self.named = settings.named
        """Settings of the tenants that have their own."""
        every = (settings.default, *settings.named.values())
        self.have_quotas = any(tenant.in_flight_max or tenant.tokens_per_s for tenant in every)
        """Whether any tenant has a quota."""
        if not self.have_quotas:
            self._in_flight.clear()
            self._buckets.clear()

    def of(self, tenant: str) -> TenantSettings:
        """The settings of a tenant."""
        return self._settings.named.get(tenant, self._settings.default)

    def cost(self, uncached_tokens: int, cached_tokens: int) -> float:
        """Cost of a request in uncached tokens, 1 at least; a cached token counts cached_price."""
        return max(1.0, uncached_tokens + self._settings.cached_price * cached_tokens)

    def took(self, tenant: str, cost: float, now_s: float) -> None:
        """Charges a tenant for a request that has its worker, whether or not it waited, while any
        tenant has a quota."""
        of_tenant = self.of(tenant)
        self._in_flight[tenant] += 1  # whatever its quota, which a reload may set
        if of_tenant.tokens_per_s:
            left = self._left(tenant, of_tenant, now_s) - cost
            self._buckets.pop(tenant, None)
            self._buckets[tenant] = left, now_s
            if len(self._buckets) > TENANTS_MAX:
                del self._buckets[next(iter(self._buckets))]

    def corrected(self, tenant: str, more: float, now_s: float) -> None:
        """Adds `more` to the charge of a request that was estimated; negative: subtracts."""
        of_tenant = self.of(tenant)
        if of_tenant.tokens_per_s and tenant in self._buckets:
            self._buckets[tenant] = self._left(tenant, of_tenant, now_s) - more, now_s

    def ended(self, tenant: str) -> None:
        """Records that a request of a tenant in flight has ended."""
        if self._in_flight[tenant] > 1:
            self._in_flight[tenant] -= 1
        else:
            del self._in_flight[tenant]

    def held_by(self, tenant: str, now_s: float) -> str | None:
        """Key of the quota that a tenant has used up, so that its requests wait; None: none."""
        if not self.have_quotas:
            return None
        of_tenant = self.of(tenant)
        if of_tenant.in_flight_max and self._in_flight[tenant] >= of_tenant.in_flight_max:
            return "in_flight_max"
        if of_tenant.tokens_per_s and self._left(tenant, of_tenant, now_s) <= 0:
            return "tokens_per_s"
        return None

    def _left(self, tenant: str, settings: TenantSettings, now_s: float) -> float:
        most = settings.tokens_per_s * BURST_S
        bucket = self._buckets.get(tenant)
        if bucket is None:
            return most
        return min(most, bucket[0] + settings.tokens_per_s * max(0.0, now_s - bucket[1]))
