"""What each tenant's requests got: cached tokens, and the time to their first tokens. Pure.

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
    """Reported first tokens,"""
    first_token_s: float = 0.0
    """and the seconds from picks to them, in sum."""


class Tenants:
    """The numbers of all tenants; requests without a tenant count nowhere."""

    def __init__(self) -> None:
        self.by_name: dict[str, TenantNumbers] = {}

    def on_pick(self, tenant: str, prompt_tokens: int, overlap_tokens: int) -> None:
        """A request got a worker, whose usable overlap is that of the prompt's computation."""
        numbers = self._of(tenant)
        numbers.prompt_tokens += prompt_tokens
        numbers.overlap_tokens += overlap_tokens

    def on_first(self, tenant: str, after_s: float) -> None:
        """A first token was reported, so long after its pick."""
        numbers = self._of(tenant)
        numbers.first_tokens += 1
        numbers.first_token_s += after_s

    def _of(self, tenant: str) -> TenantNumbers:
        numbers = self.by_name.get(tenant)
        if numbers is None:
            name = tenant if len(self.by_name) < TENANTS_MAX else OTHER
            numbers = self.by_name.setdefault(name, TenantNumbers())
        return numbers
