"""The tenants whose requests waited most recently: the names that metrics have. Pure.

Law: TENANTS_MAX names at most.
"""

from collections.abc import Iterator

TENANTS_MAX = 32


class RecentTenants:
    """Names, the one that waited most recently last."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, tenant: str) -> None:
        """A request of a tenant begins to wait."""
        self._names.pop(tenant, None)
        self._names[tenant] = None
        if len(self._names) > TENANTS_MAX:
            del self._names[next(iter(self._names))]
