"""Requests that share a long prefix which no worker holds: the first goes, the others follow. Pure.

Computing the same prefix twice at the same time wastes the second time. Siblings are waiting
requests whose next MIN_BLOCKS uncached blocks are the same. When the first of them goes, the others
are held until its prefill is done, or for HOLD_S; then they go where the prefix is cached. In a
pool whose load is below LOAD_MIN none is held: computing the prefix twice is faster there.

Source: SGLang's in-batch prefix caching check, over the workers of a pool.

Laws: no request is held for longer than HOLD_S after the first of its siblings went, and siblings
have a first one once in KEPT_S at most; leads are LEADS_MAX at most.
"""

from router.decide.queue_order.sight import Fleet
from router.decide.waiter import Waiter

MIN_BLOCKS = 32
"""Uncached blocks that siblings share at least: shorter prefixes cost less than a hold."""
HOLD_S = 2.0
"""Longest hold in seconds after the first sibling went, if its prefill is not reported."""
LOAD_MIN = 0.5
"""Load of a pool, work in flight over work that can be taken, below which none is held."""
LEADS_MAX = 4096
"""Most leads, requests that went first of their siblings; over it the oldest is forgotten."""
KEPT_S = 60.0
"""Seconds for which a lead is remembered, so that its siblings don't hold one another in turn:
waiting requests know only the blocks that workers held when they came."""


class Siblings:
    """Requests that were dispatched first of their siblings, and whose prompts are not computed
    yet.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.min_blocks = MIN_BLOCKS
        self._fleet = fleet
        self._leads: dict[int, tuple[float, str]] = {}
        """Leads by PrefixHash of the shared run: when the first request went, and its reservation;
        the lead that went first in front."""

    def __len__(self) -> int:
        return len(self._leads)

    def run_of(self, waiter: Waiter) -> int | None:
        """PrefixHash of the run of blocks that makes requests siblings; None: the request
        has none.
        """
        chain = waiter.prefixes
        if chain is None or waiter.block_size <= 0:
            return None
        held_blocks = (waiter.prompt_tokens - waiter.new_tokens) // waiter.block_size
        last = held_blocks + self.min_blocks - 1
        return int(chain[last]) if last < len(chain) else None

    def went(self, waiter: Waiter, now_s: float) -> None:
        """Records that a request has its worker; it leads its siblings unless one leads already."""
        run = waiter.run
        if run is None:
            return
        self._forget(now_s)
        if run not in self._leads:
            self._leads[run] = now_s, waiter.reservation_id

    def holds(self, waiter: Waiter, now_s: float) -> bool:
        """Whether a request has to wait until the prompt of a sibling is computed."""
        if waiter.run is None:
            return False
        lead = self._leads.get(waiter.run)
        return (
            lead is not None
            and now_s < lead[0] + HOLD_S
            and self._fleet.is_prefilling(lead[1])
            and self._fleet.load(waiter) >= LOAD_MIN
        )

    def _forget(self, now_s: float) -> None:
        """Forgets leads whose time is over, and those beyond the bound."""
        while self._leads:
            run, (went_s, _) = next(iter(self._leads.items()))
            if went_s + KEPT_S > now_s and len(self._leads) < LEADS_MAX:
                return
            del self._leads[run]
