"""Shares of requests for workers with a label, such as those of a new revision. Pure.

    shares = {"revision=v2": 0.05}      5 % of the requests to workers with revision=v2, the others
                                        to workers without that label

Laws:
- requests of one session, or of one id, are of one share as long as the shares are the same; where
  the first share grows, those that were in it stay in it;
- a share keeps no request waiting: where none of its workers may take the request, or none has
  room, the request goes to any worker, so that a new revision that fails costs no request.
"""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np

from router.fleet.eligibility import Barred
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.table import Column, Flags

OTHER_SHARE = "the request is of another label's share"


def of_share(
    barred: Barred, shares: Mapping[str, float], drawn_by: str, pool: Pool, full: Column
) -> Barred:
    """Bars the workers of other shares than the request's, unless none of its share can take it.

    shares: by label, NAME=VALUE; at most 1 together. drawn_by: the request's session or id. full:
    not 0 for each row without room.
    """
    rows = pool.made(_labelled, tuple(shares))[_drawn(shares, drawn_by)]
    can = rows & barred.can(len(pool)) & (full == 0)
    return barred.narrowed(rows, OTHER_SHARE) if can.any() else barred


def _drawn(shares: Mapping[str, float], drawn_by: str) -> str:
    """The label whose share a request is of, by a hash; empty: the share of workers without one."""
    hashed = blake2b(drawn_by.encode(), digest_size=8).digest()
    left = int.from_bytes(hashed) / 2**64
    for label, share in shares.items():
        left -= share
        if left < 0:
            return label
    return ""


def _labelled(pool: Pool, labels: tuple[str, ...]) -> dict[str, Flags]:
    """True, by label, for each worker that has it; under the empty one, for workers without any."""
    of_workers = [heartbeat_of(source).labels for source in pool.sources]
    rows: dict[str, Flags] = {}
    for label in labels:
        name, _, value = label.partition("=")
        rows[label] = np.array([labels.get(name) == value for labels in of_workers], np.bool_)
    rows[""] = ~np.any(list(rows.values()), axis=0)
    return rows
