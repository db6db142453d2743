"""The tenants whose requests waited most recently, which metrics show by name. Pure.

Law: TENANTS_MAX names at most.
"""

from collections.abc import Iterator

TENANTS_MAX = 32


class RecentTenants:
    """Names of tenants, the most recent last."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, tenant: str) -> None:
        """Adds the tenant of a request that begins to wait."""
        self._names.pop(tenant, None)
        self._names[tenant] = None
        if len(self._names) > TENANTS_MAX:
            del self._names[next(iter(self._names))]
