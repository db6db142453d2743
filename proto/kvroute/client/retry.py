"""Which error is worth another try, and when. Pure: no clock, no sleep, no randomness of its own.

Law: nothing is tried again after the deadline, or sooner than the router said.
"""

import random
from dataclasses import dataclass

from kvroute.client.errors import KvRouteError, Overloaded, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a call is repeated; the call's deadline bounds it all."""

    attempts: int = 6
    """Most attempts of one call, the first one counted; 1 never repeats."""
    backoff_s: float = 0.1
    """Upper end of the random wait after the first failure; it doubles with each one."""
    backoff_s_max: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; 1 is the least")
        if not 0 <= self.backoff_s <= self.backoff_s_max:
            raise ValueError("0 <= backoff_s <= backoff_s_max does not hold")

    def delay_s(
        self, error: KvRouteError, attempt: int, left_s: float, rng: random.Random
    ) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 1) failed; None: give up.

        delay = what RetryInfo says (0 without it) + uniform(0, min(max, backoff * 2^(attempt - 1)))

        UNAVAILABLE is tried again; RESOURCE_EXHAUSTED only with RetryInfo, since gRPC says the same
        of a message over its limit; nothing else. A delay that would end past the deadline
        (`left_s` seconds away) gives up at once: the error at hand says more than a late one.
        """
        match error:
            case Unavailable():
                asked_s = error.retry_after_s or 0.0
            case Overloaded(retry_after_s=float(asked_s)):
                pass
            case _:
                return None
        if attempt >= self.attempts:
            return None
        ceiling_s = min(self.backoff_s_max, self.backoff_s * 2.0 ** (attempt - 1))
        delay_s = asked_s + rng.uniform(0.0, ceiling_s)
        return delay_s if delay_s < left_s else None
