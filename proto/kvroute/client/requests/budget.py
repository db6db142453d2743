"""The retry budget: how many requests may be tried again. Pure: no clock of its own.

Retries must not multiply the traffic of a failing fleet. So they are bounded by a share of the
requests of the last seconds, plus a fixed rate for clients with little traffic:

    retries in the window  <=  share * requests in the window + least_per_s * window_s

Source: Finagle's RetryBudget (twitter/finagle, com.twitter.finagle.service.RetryBudget; 20 %, 10 a
second, credits of 10 s), whose numbers these are. Envoy's retry_budget (config.cluster.v3
CircuitBreakers.Thresholds.RetryBudget; 20 %, at least 3) takes the share of open requests instead
of recent requests.

Law: the inequality holds after every retry that was allowed, in the window that ends with it.
Times are known to a slot: in the oldest slot, which may lie in the window, retries count alone.
"""

from collections import deque
from dataclasses import dataclass

from typing_extensions import override

SLOTS = 10
"""Number of slots of the window."""


@dataclass(frozen=True, slots=True)
class RetryBudgetPolicy:
    """The bound of a client's retries, over all its calls."""

    share: float = 0.2
    """Retries for each request of the window, from 0 to 1."""
    least_per_s: float = 10.0
    """Retries a second that are allowed whatever the number of requests; if this and the share are
    0, nothing is tried again."""
    window_s: float = 10.0
    """Seconds for which a request counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is {self.share}; 0 to 1 is wanted")
        if not 0 <= self.least_per_s <= 1e6:
            raise ValueError(f"least_per_s is {self.least_per_s}; 0 to 1,000,000 is wanted")
        if not 0 < self.window_s <= 3600:
            raise ValueError(f"window_s is {self.window_s}; more than 0 and up to 3,600 is wanted")


class RetryBudget:
    """Counts requests and retries of the window."""

    def __init__(self, policy: RetryBudgetPolicy) -> None:
        self._policy = policy
        self._slot_s = policy.window_s / SLOTS
        self._slots: deque[list[int]] = deque(maxlen=SLOTS + 1)
        """[number of the slot, requests, retries], the oldest first."""
        self._requests = 0
        self._retries = 0

    @override
    def __repr__(self) -> str:
        return f"<RetryBudget {self._retries} retries of {self._requests} requests>"

    def request(self, now_s: float) -> None:
        """Counts a request; its retries don't count here."""
        self._slot(now_s)[1] += 1
        self._requests += 1

    def take(self, now_s: float) -> bool:
        """Whether another retry is allowed; if so, counts it."""
        slot = self._slot(now_s)
        policy = self._policy
        allowed = policy.share * self._requests + policy.least_per_s * policy.window_s
        if self._retries + 1 > allowed:
            return False
        slot[2] += 1
        self._retries += 1
        return True

    def _slot(self, now_s: float) -> list[int]:
        """The present slot, after expired slots were dropped."""
        number = int(now_s // self._slot_s)
        slots = self._slots
        while slots and slots[0][0] <= number - SLOTS:
            oldest = slots[0]
            self._requests -= oldest[1]
            oldest[1] = 0
            if oldest[0] == number - SLOTS:
                break
            self._retries -= slots.popleft()[2]
        if not slots or slots[-1][0] < number:  # a clock that goes back counts in the newest slot
            slots.append([number, 0, 0])
        return slots[-1]
