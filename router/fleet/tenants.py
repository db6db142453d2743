"""Cached tokens and times to the first token of each tenant's requests. Pure.

Law: TENANTS_MAX tenants are counted by name, the first that get a pick; later ones together.
"""

from dataclasses import dataclass

TENANTS_MAX = 64
OTHER = "other"
"""Name in metrics of all later tenants together."""


@dataclass(slots=True)
class TenantNumbers:
    """Sums over a tenant's picks since the start."""

    prompt_tokens: int = 0
    overlap_tokens: int = 0
    """Usable overlap on the picked workers."""
    first_tokens: int = 0
    """Number of reported first tokens."""
    first_token_s: float = 0.0
    """Sum of the seconds from picks to these first tokens."""


class Tenants:
    """The sums of all tenants; requests without a tenant are not counted."""

    def __init__(self) -> None:
        self.by_name: dict[str, TenantNumbers] = {}

    def on_pick(self, tenant: str, prompt_tokens: int, overlap_tokens: int) -> None:
        """Counts a request that got a worker; overlap_tokens: cached on the worker that computes
        the prompt.
        """
        numbers = self._of(tenant)
        numbers.prompt_tokens += prompt_tokens
        numbers.overlap_tokens += overlap_tokens

    def on_first(self, tenant: str, after_s: float) -> None:
        """Counts a first token, after_s seconds after its pick."""
        numbers = self._of(tenant)
        numbers.first_tokens += 1
        numbers.first_token_s += after_s

    def _of(self, tenant: str) -> TenantNumbers:
        numbers = self.by_name.get(tenant)
        if numbers is None:
            name = tenant if len(self.by_name) < TENANTS_MAX else OTHER
            numbers = self.by_name.setdefault(name, TenantNumbers())
        return numbers
