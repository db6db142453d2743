"""A waiting request. Pure.

The driver sets what the request is; the queue sets the rest when the request is offered.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from typing_extensions import override

from indexer.hashing import HashArray
from router.request.narrowing import Narrowing
from router.request.request import Objective

Key = float | tuple[float, ...]
"""Place in an order, lower is sooner; one order makes keys of one of the two forms."""


class Fate(StrEnum):
    """How a queued request ended; its values are values of a metric's label."""

    ARRIVED = "arrived"
    DISPATCHED = "dispatched"
    REFUSED = "refused"
    """The queue was full."""
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DISPLACED = "displaced"
    """The queue was full, and a request of higher priority took the place."""
    TOO_LONG = "too_long"
    """Its expected wait was longer than it may be (queue.early_refusal)."""
    UNSERVED = "unserved"
    """Something else than want of room refused it while it waited: no worker serves its model any
    more, or the router stops."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request, with the fields that orders, bounds and shares read."""

    request_id: str
    """Empty: `find` doesn't know it."""
    arrived_s: float
    expires_s: float = inf
    """When its wait is over: the caller's deadline, or the timeout if that is earlier."""
    deadline_s: float = inf
    """When the answer is due: what `edf` sorts by. inf: expires_s counts."""
    model: str = ""
    tenant: str = ""
    moved_s: float = 0.0
    """Seconds that it waited in another router, as its caller says, and that don't count yet."""
    priority: int = 0
    """Higher is sooner."""
    narrowing: Narrowing | None = None
    """Narrowing to some workers of its pool; None: it may use all of them."""
    sheddable: Objective | None = None
    """Objectives of a sheddable request; None: it is none."""
    needs_prefill: bool = True
    """Whether the prompt is still to be computed: False for the decode half of a pair."""
    prompt_tokens: int = 0
    charged_tokens: int = 0
    """See Request."""
    new_tokens: int = 0
    """Prompt tokens that the best worker did not hold on arrival."""
    output_tokens: int = 0
    """That are expected."""
    size_bytes: int = 0
    """Memory that the request takes while it waits."""
    prefixes: HashArray | None = None
    """PrefixHashes of the prompt's full blocks; None: not known."""
    block_size: int = 0
    payload: object = None
    """The driver's own."""
    reservation_id: str = ""
    """The driver sets it before it says `dispatched`."""

    # Set by the queue.
    pool: Hashable = None
    """Where it waits; None: it does not wait."""
    points: int = 0
    """Its priority with what its tenant adds."""
    seq: int = 0
    """Number of its arrival."""
    key: Key = 0.0
    run: int | None = None
    """PrefixHash of the uncached blocks by which it has siblings
    (router/decide/queue_turns/siblings.py)."""
    level: int = 0
    """Number of its band, 0 for the lowest."""
    ahead: int = 0
    """Requests of its pool that were to go before it when it came."""
    passed_at: int | None = None
    """The version of the room at which no worker had room for it."""

    def __post_init__(self) -> None:
        self.points = self.priority

    @property
    def waits(self) -> bool:
        """Whether the request is in the queue."""
        return self.pool is not None

    @override
    def __repr__(self) -> str:
        return f"<Waiter {self.request_id!r} priority {self.priority}, number {self.seq}>"
