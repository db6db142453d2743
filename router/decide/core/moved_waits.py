"""Waits that began in another replica which is gone, and how much of them counts. Pure.

A caller whose router ends before it answers asks another replica, and says how long it has waited
(RouteRequest.waited_ms). Any caller may say so. So the time counts, as if the request had come here
so much earlier, only

- once a router is gone: it has said that it stops, or was silent for TTL_S
  (events/feed/replicas.py);
- for as many requests of a pool as waited in that router by its last message, for BELIEVED_S;
- up to the longest wait of the request, whose end stays as it is.

Law: of one router's end, no more requests of a pool are believed here than waited there.
"""

from collections import Counter
from collections.abc import Iterable

from events.feed.demand import Demand
from router.decide.core.pool import Pool
from router.decide.queue.admission_queue import AdmissionQueue
from router.decide.waiter import Waiter
from router.request.request import Role

BELIEVED_S = 10.0
"""Seconds that claims are believed after a router's end was known, for callers that come late."""
POOLS_MAX = 256
"""Pools that requests waited for in routers that are gone; the first one is forgotten."""
SPARE = 64
"""Claims of requests that wait no longer, which are kept however few others there are."""
_ROLES = frozenset(map(str, Role))


class MovedWaits:
    """Requests that claim an earlier wait, and the number of claims that may be believed."""

    def __init__(self, queue: AdmissionQueue) -> None:
        self.counts: Counter[str] = Counter()
        """`claimed`: requests that waited here and said that they had waited elsewhere; `believed`:
        those for which it counted."""
        self._queue = queue
        self._claims: dict[Waiter, float] = {}
        """Seconds of requests that are not believed yet, in the order in which they came."""
        self._left: dict[Pool, tuple[int, float]] = {}
        """Requests of a pool that may still be believed, and until when."""

    def claim(self, waiter: Waiter, waited_s: float) -> None:
        """Records a waiting request's claim that it waited waited_s in another replica before."""
        self.counts["claimed"] += 1
        self._claims[waiter] = min(waited_s, max(0.0, waiter.expires_s - waiter.arrived_s))
        if len(self._claims) > 2 * len(self._queue) + SPARE:
            self._claims = {waiter: claim for waiter, claim in self._claims.items() if waiter.waits}

    def lost(self, demand: Iterable[tuple[float, Demand]]) -> None:
        """Records the requests that waited in routers which are gone, each with the time since
        when.
        """
        for at_s, each in demand:
            if each.role not in _ROLES:
                continue
            pool = Pool(each.model, Role(each.role))
            left, until_s = self._left.pop(pool, (0, at_s))
            self._left[pool] = (left if at_s < until_s else 0) + each.waiting, at_s + BELIEVED_S
            if len(self._left) > POOLS_MAX:
                del self._left[next(iter(self._left))]

    def settle(self, now_s: float) -> None:
        """Believes as many claims as may be, the oldest first."""
        if not self._claims or not self._left:
            return
        for waiter in list(self._claims):
            if not waiter.waits:
                del self._claims[waiter]
                continue
            left, until_s = self._left.get(waiter.pool, (0, now_s))  # type: ignore[call-overload]
            if left and now_s < until_s:
                self._left[waiter.pool] = left - 1, until_s  # type: ignore[index]
                waited_s = self._claims.pop(waiter)
                self._queue.backdate(waiter, waiter.arrived_s - waited_s, now_s)
                self.counts["believed"] += 1
        self._left = {
            pool: (left, until_s)
            for pool, (left, until_s) in self._left.items()
            if left and now_s < until_s
        }
