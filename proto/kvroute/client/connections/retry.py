"""Which error is worth another attempt, and when. Pure: no clock, sleep or randomness of its own.

Law: no attempt begins after the deadline, or sooner than the router's RetryInfo allows.
"""

import random
from dataclasses import dataclass

from kvroute.client.errors import KvRouteError, Overloaded, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The attempts of a call and the back-off between them, within the call's deadline."""

    attempts: int = 6
    """Most attempts of a call, the first one counted; 1: no retry."""
    backoff_s: float = 0.1
    """Upper end of the random wait after the first failure, seconds; doubles with each failure."""
    backoff_s_max: float = 2.0
    """Bound of the doubling, seconds."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; 1 is the least")
        if not 0 <= self.backoff_s <= self.backoff_s_max:
            raise ValueError(
                f"backoff_s is {self.backoff_s} and backoff_s_max is {self.backoff_s_max};"
                " 0 <= backoff_s <= backoff_s_max is wanted"
            )

    def delay_s(
        self, error: KvRouteError, attempt: int, left_s: float, rng: random.Random
    ) -> float | None:
        """Seconds to wait after attempt number `attempt` (from 1) failed; None: give up.

        delay = RetryInfo's delay (or 0)
                + uniform(0, min(backoff_s_max, backoff_s * 2^(attempt - 1)))

        UNAVAILABLE is tried again; RESOURCE_EXHAUSTED only with RetryInfo, since gRPC has the same
        status for a message over its limit; nothing else. A delay that would end past the deadline
        (`left_s` seconds away) gives up at once: this error says more than DEADLINE_EXCEEDED.
        """
        match error:
            case Unavailable():
                info_s = error.retry_after_s or 0.0
            case Overloaded(retry_after_s=float(info_s)):
                pass
            case _:
                return None
        if attempt >= self.attempts:
            return None
        ceiling_s = min(self.backoff_s_max, self.backoff_s * 2.0 ** (attempt - 1))
        delay_s = info_s + rng.uniform(0.0, ceiling_s)
        return delay_s if delay_s < left_s else None
