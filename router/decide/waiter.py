"""A waiting request. Pure.

The driver sets the fields that describe the request; the queue sets the others.
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
"""Key by which an order sorts waiting requests, lowest first; a tuple for composite orders."""


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
    """The expected wait was longer than the request may wait (queue.early_refusal)."""
    UNSERVED = "unserved"
    """The waiting request was refused for another reason than lack of room: no worker serves its
    model any more, or the router stops."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request, with the fields that orders, bounds and shares read."""

    request_id: str
    """Id that the caller gave; empty: none, and AdmissionQueue.find does not return the request."""
    arrived_s: float
    expires_s: float = inf
    """When the wait is over: at the caller's deadline, or the timeout if that is earlier."""
    deadline_s: float = inf
    """When the answer is due, by which the order `edf` sorts; inf: expires_s counts."""
    model: str = ""
    tenant: str = ""
    moved_s: float = 0.0
    """Seconds that the request waited in another router, as its caller says; not counted yet."""
    priority: int = 0
    """The caller's priority, in points: higher goes first."""
    narrowing: Narrowing | None = None
    """Narrowing to some workers of the pool; None: all of them may be used."""
    sheddable: Objective | None = None
    """Objectives of a sheddable request; None: the request is not sheddable."""
    needs_prefill: bool = True
    """Whether the prompt is still to be computed: False for the decode half of a pair."""
    prompt_tokens: int = 0
    charged_tokens: int = 0
    """Tokens that a tenant's quota counts for an estimated prompt; 0: it is no estimate."""
    new_tokens: int = 0
    """Prompt tokens that the best worker did not hold on arrival."""
    output_tokens: int = 0
    """Expected tokens of the answer."""
    size_bytes: int = 0
    """Memory that the request takes while it waits."""
    prefixes: HashArray | None = None
    """PrefixHashes of the prompt's full blocks; None: not known."""
    block_size: int = 0
    payload: object = None
    """The driver's object for the request, which the queue does not read."""
    reservation_id: str = ""
    """Id of the pick's reservation; the driver sets it before it calls `dispatched`."""

    # Set by the queue.
    pool: Hashable = None
    """The pool that the request waits for; None: it does not wait."""
    points: int = 0
    """Priority of the request plus that of its tenant."""
    seq: int = 0
    """Number of the request's arrival, from 1."""
    key: Key = 0.0
    run: int | None = None
    """PrefixHash of the uncached blocks that its siblings share
    (router/decide/queue_turns/siblings.py); None: it can have no siblings."""
    level: int = 0
    """Number of the request's band, 0 for the lowest."""
    ahead: int = 0
    """Number of requests of its pool that were to go before it when it came."""
    passed_at: int | None = None
    """Version of the room (Fleet.room) at which no worker had room for the request; None: none."""

    def __post_init__(self) -> None:
        self.points = self.priority

    @property
    def waits(self) -> bool:
        """Whether the request is in the queue."""
        return self.pool is not None

    @override
    def __repr__(self) -> str:
        return f"<Waiter {self.request_id!r} priority {self.priority}, number {self.seq}>"
