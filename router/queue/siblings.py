"""Requests that share a long prefix which no worker holds: the first goes, the others follow. Pure.

Computing the same prefix twice at the same time wastes the second time. When a request goes whose
next `min_blocks` uncached blocks other waiting requests have, too, those are held until its
prefill is done, or for hold_s. After that they go to where the prefix is cached. A pool whose load
is below load_min holds none: computing a prefix twice is sooner there.

Source: SGLang's in-batch prefix caching check, over the workers of a pool.

Laws: no request is held for longer than hold_s after the first of its siblings went; leads are
LEADS_MAX at most.
"""

from router.config.queue_settings import SiblingsSettings
from router.queue.sight import Sight
from router.queue.waiter import Waiter

LEADS_MAX = 4096
"""Requests that lead siblings; over it the one that went first leads no longer."""


class Siblings:
    """Leads: requests that went, and whose prefill is not known to be done."""

    def __init__(self, settings: SiblingsSettings, sight: Sight) -> None:
        self._settings = settings
        self._sight = sight
        self._leads: dict[int, tuple[float, str]] = {}
        """By PrefixHash of the shared run: up to when the others are held, and who leads; the one
        that went first in front."""
        self._by_id: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._leads)

    def configure(self, settings: SiblingsSettings) -> None:
        """Puts other settings in force; leads that there are keep their times."""
        self._settings = settings

    def run_of(self, waiter: Waiter) -> int | None:
        """PrefixHash of the run by which a request has siblings; None: it has none."""
        chain = waiter.prefixes
        if not self._settings.enabled or chain is None or waiter.block_size <= 0:
            return None
        held_blocks = (waiter.prompt_tokens - waiter.new_tokens) // waiter.block_size
        last = held_blocks + self._settings.min_blocks - 1
        return int(chain[last]) if last < len(chain) else None

    def went(self, waiter: Waiter, now_s: float) -> None:
        """A request has its worker, and leads its siblings unless one of them does."""
        run = waiter.run
        if run is None:
            return
        self._forget(now_s)
        if run not in self._leads:
            self._leads[run] = now_s + self._settings.hold_s, waiter.request_id
            self._by_id[waiter.request_id] = run

    def prefilled(self, request_id: str) -> bool:
        """The prefill of a request is done, or the request is over; whether it led siblings."""
        run = self._by_id.pop(request_id, None)
        if run is None:
            return False
        del self._leads[run]
        return True

    def holds(self, waiter: Waiter, now_s: float) -> bool:
        """Whether a request waits for the prefill of a sibling."""
        if waiter.run is None or not self._leads:
            return False
        lead = self._leads.get(waiter.run)
        return (
            lead is not None
            and now_s < lead[0]
            and self._sight.load(waiter) >= self._settings.load_min
        )

    def next_release_s(self) -> float | None:
        """When the next hold is over by itself; None: none is."""
        return next((until_s for until_s, _ in self._leads.values()), None)

    def _forget(self, now_s: float) -> None:
        """Leads whose time is over, and those beyond the bound."""
        while self._leads:
            run, (until_s, request_id) = next(iter(self._leads.items()))
            if until_s > now_s and len(self._leads) < LEADS_MAX:
                return
            del self._leads[run]
            self._by_id.pop(request_id, None)
