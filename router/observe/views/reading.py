"""One reading of a router's state for its history. Reads only. Pure.

All numbers are those that metrics show, too: the same sums, from the same owners.
"""

from router.decide.core.tally import PickTally
from router.decide.queue.views import Sums
from router.fleet.health.time_check import TimeCheck
from router.observe.views.history import Totals, Waiting


def totals_of(tally: PickTally, check: TimeCheck, refused: int = 0) -> Totals:
    """Sums since the start, from the counts of picks and of measured first tokens."""
    prompt_tokens, reachable_tokens, *taken_tokens = tally.tokens.tolist()
    return Totals(
        picks=int(tally.picks[0]),
        prompt_tokens=prompt_tokens,
        reachable_tokens=reachable_tokens,
        taken_tokens=sum(taken_tokens),
        predicted=tally.ttfts,
        predicted_s=tally.ttft_s,
        measured=sum(check.counts),
        measured_s=check.measured_s,
        refused=refused,
    )


def waiting_of(sums: Sums) -> Waiting:
    """Requests that wait now, by band and by tenant."""
    return Waiting(
        bands={band: depth.count for band, depth in sums.bands.items()},
        tenants=dict(sums.tenants),
    )
