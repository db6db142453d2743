"""Consistent hashing of sessions, with bounded load."""

from math import ceil
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores


class StickyParameters(Parameters, frozen=True):
    """The one parameter of `session-sticky`, a bound."""

    load_factor: Annotated[
        float,
        Meta(
            gt=1,
            description="active requests up to which a session's worker keeps the session, as a"
            " multiple of the workers' mean",
        ),
    ] = 1.25


def score(rows: Candidates, parameters: StickyParameters) -> Scores:
    """Cost that keeps a session on its worker, unless that has its share of requests already.

        cost = distance + over
        distance = 0 where the session's last request went, as far as this replica knows; else
                   hash(key, worker) / 2**64, in [0, 1)
        over = 1 if active_slots + 1 > share else 0
        share = ceil(load_factor (1.25) * (all active_slots + 1) / workers)

    key is the session's id; without one, the prompt's first block. Workers, and all active_slots,
    are those that can be picked; less than 0 slots count as 0. Each key puts the workers in an
    order of its own, which stays as other workers come and go. So the keys of a worker that leaves,
    or is over its share, go to all others evenly, and come back to it later, except those of
    sessions that went on at another worker, which has their KV cache since.

    Source: rendezvous hashing (Thaler, Ravishankar 1998); the bound is that of V. Mirrokni, M.
    Thorup, M. Zadimoghaddam, Consistent Hashing with Bounded Loads, 2016: a bin holds at most
    ceil(c * m / n) of m balls, the new one among them. Without the ceiling every worker would be
    over its share while the mean is below 1 / load_factor.
    """
    key = np.uint64(rows.affinity_key)
    distance = _mixed(rows.name_hashes ^ key) / 2.0**64
    if rows.request.session_id:
        distance = np.where(rows.of_session, 0.0, distance)
    can = rows.can_take
    slots = np.maximum(rows.active_slots, 0.0)
    share = ceil(
        round(parameters.load_factor * (slots[can].sum() + 1) / max(1, np.count_nonzero(can)), 9)
    )
    over = np.where(slots + 1 > share, 1.0, 0.0)
    return Scores(
        distance + over,
        {"distance": distance, "over": over},
        {"share": float(share)},
    )


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hashes numbers: each bit of a hash depends on all 64 of its number (end of SplitMix64)."""
    with np.errstate(over="ignore"):
        numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)


SESSION_STICKY = Policy(
    "session-sticky",
    "the same worker for the same session, while it has at most its share of requests",
    "distance + over",
    StickyParameters(),
    score,
)
