"""Waiting requests for tests."""

from collections.abc import Iterable
from random import Random
from typing import Any

from router.config.settings.queue_settings import QueueSettings
from router.decide.queue.admission_queue import LOOK_PAST, AdmissionQueue
from router.decide.waiter import Fate, Waiter

POOL = "model"


class Workers:
    """What a driver knows of a fleet."""

    def __init__(self) -> None:
        self.overlaps: dict[str, int] = {}
        """By id of a request."""
        self.busy = 0.0
        self.prefilling: set[str] = set()
        """Ids of reservations."""
        self.looks = 0

    def overlap_tokens(self, waiter: Waiter) -> int:
        self.looks += 1
        return self.overlaps.get(waiter.request_id, 0)

    def load(self, waiter: Waiter) -> float:
        return self.busy

    def is_prefilling(self, reservation_id: str) -> bool:
        return reservation_id in self.prefilling


def queue_of(
    workers: Workers | None = None, look_past: int = LOOK_PAST, **settings: Any
) -> AdmissionQueue:
    return AdmissionQueue(QueueSettings(**settings), Random(7), workers or Workers(), look_past)


def offered(queue: AdmissionQueue, name: str, now_s: float = 0.0, **values: Any) -> Waiter:
    """A request that waits from now on."""
    waiter = Waiter(name, values.pop("arrived_s", now_s), **values)
    queue.offer(values.get("model", POOL), waiter, now_s)
    return waiter


def all_offered(
    queue: AdmissionQueue, names: Iterable[str], now_s: float = 0.0, **values: Any
) -> list[Waiter]:
    """Requests that wait from now on, in this order."""
    return [offered(queue, name, now_s, **values) for name in names]


def tried_in_vain(queue: AdmissionQueue) -> list[Waiter]:
    """The requests of a round that finds room for none."""
    tried = []
    for waiter in queue.candidates(POOL, 1, 0.0):
        tried.append(waiter)
        queue.passed(waiter, 1)
    return tried


def names(waiters: Iterable[Waiter]) -> str:
    return " ".join(waiter.request_id for waiter in waiters)


def turns(queue: AdmissionQueue, now_s: float = 0.0, pool: str = POOL) -> str:
    """Whose turn it is, if none of them is dispatched."""
    return names(queue.candidates(pool, 0, now_s))


def drained(queue: AdmissionQueue, now_s: float = 0.0, pool: str = POOL) -> str:
    """The order in which all go, with room for each."""
    gone = []
    for waiter in queue.candidates(pool, 0, now_s):
        tokens = waiter.new_tokens, waiter.prompt_tokens - waiter.new_tokens
        queue.dispatched(waiter, *tokens, now_s)
        queue.tenants.took(waiter.tenant, queue.tenants.cost(*tokens), now_s)
        gone.append(waiter)
    return names(gone)


def expired(queue: AdmissionQueue, now_s: float, most: int = 99) -> list[Waiter]:
    """The requests whose wait is over, none of which gets a worker at its end."""
    gone: list[Waiter] = []
    while len(gone) < most and (waiter := queue.over(now_s)) is not None:
        queue.expired(waiter, now_s)
        gone.append(waiter)
    return gone


def check_counts(queue: AdmissionQueue) -> None:
    """arrived = dispatched + waiting + refused + expired + cancelled + displaced."""
    ends = sum(queue.counts[fate] for fate in Fate if fate is not Fate.ARRIVED)
    assert queue.counts[Fate.ARRIVED] == ends + len(queue)
