"""The order in force, as configured: it gives waiting requests the keys that sort them. Pure.

A composite order `a+b+c` ranks by a, requests with equal a by b, then by c. Its first part has the
aging of queue.aging, if that is set, and the others none; `fcfs` ranks by arrival at any place.
Where more requests wait for a pool than an order can rank, fcfs takes its place.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from typing_extensions import override

from router.config.keys import ConfigError
from router.config.own_functions import is_own
from router.config.settings.queue_settings import QueueSettings
from router.decide.queue_order.orders import FCFS, LAS, ORDERS, Order
from router.decide.queue_order.own_order import OwnFailure, own_order
from router.decide.queue_order.sight import Sight
from router.decide.waiter import Key, Waiter

WHERE = "$.queue.order"


class Ranking:
    """An order, or several: each decides between the requests that are equal by the orders before
    it.
    """

    def __init__(self, parts: Sequence[tuple[Order, float]], sight: Sight) -> None:
        self.name = "+".join(order.name for order, _ in parts)
        self.is_dynamic = any(order.is_dynamic for order, _ in parts)
        """Whether keys change while requests wait, so that `rank` makes them for all together."""
        self.looks_at_service = any(order is LAS for order, _ in parts)
        """Whether keys depend on the tokens that tenants got lately."""
        self.needs_fleet = any(order.needs_fleet for order, _ in parts)
        """Whether keys depend on the workers, or on the blocks of prompts."""
        self.last: Key = inf if len(parts) == 1 else (inf,)
        """Key that puts a new request behind all others, until the next `rank`."""
        self._parts = parts
        self._sight = sight

    @override
    def __repr__(self) -> str:
        return f"<Ranking {self.name}>"

    def key(self, waiter: Waiter) -> Key:
        """Sort key of a request by its own fields alone; lower goes first."""
        if self.is_dynamic:
            return self.last
        if len(self._parts) == 1:
            order, aging = self._parts[0]
            return aging * waiter.arrived_s - order.score(waiter, self._sight)
        return tuple(
            aging * waiter.arrived_s - order.score(waiter, self._sight)
            for order, aging in self._parts
        )

    def rank(self, waiters: Sequence[Waiter], now_s: float) -> None:
        """Sets the sort keys of requests, which are given in the order of arrival."""
        self._sight.now_s = now_s
        columns = [self._column(order, aging, waiters) for order, aging in self._parts]
        if len(columns) == 1:
            for waiter, key in zip(waiters, columns[0], strict=True):
                waiter.key = key
        else:
            for waiter, *keys in zip(waiters, *columns, strict=True):
                waiter.key = tuple(keys)

    def _column(self, order: Order, aging: float, waiters: Sequence[Waiter]) -> list[float]:
        if order.scores is not None:
            scores = order.scores(waiters, self._sight)
        else:
            scores = [order.score(waiter, self._sight) for waiter in waiters]
        return [
            aging * waiter.arrived_s - score for waiter, score in zip(waiters, scores, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Rankings:
    """The configured ranking, and the ranking of pools that are too long for it."""

    configured: Ranking
    length_max: float
    """Most waiting requests of a pool that `configured` ranks; inf: any number."""
    longer: Ranking
    """The ranking of longer pools."""

    def of(self, length: int) -> Ranking:
        """The ranking for a pool with `length` waiting requests."""
        return self.configured if length <= self.length_max else self.longer


def rankings(settings: QueueSettings, sight: Sight, failures: Counter[OwnFailure]) -> Rankings:
    """Makes the configured ranking; raises ConfigError for an order that is unknown or unusable."""
    ranking, length_max = _ranking(settings, sight, failures)
    return Rankings(ranking, length_max, Ranking([(FCFS, FCFS.aging)], sight))


def _ranking(
    settings: QueueSettings, sight: Sight, failures: Counter[OwnFailure]
) -> tuple[Ranking, float]:
    """The ranking of an order or composite, and the most waiting requests that it can rank."""
    names = [settings.order] if is_own(settings.order) else settings.order.split("+")
    parts = []
    length_max = inf
    for place, part in enumerate(names):
        order = own_order(part, WHERE, failures) if is_own(part) else ORDERS.get(part)
        if order is None:
            known = f"{', '.join(ORDERS)}, and composites such as priority+fcfs"
            raise ConfigError(f"unknown order {part!r} at `{WHERE}`; there are {known}")
        if order.length_max is not None:
            length_max = min(length_max, order.length_max)
        parts.append((order, _aging(order, place, len(names), settings)))
    return Ranking(parts, sight), length_max


def _aging(order: Order, place: int, count: int, settings: QueueSettings) -> float:
    """Aging of an order that stands alone or at a place of a composite, per second of waiting."""
    if place == 0 and settings.aging is not None:
        return settings.aging
    return order.aging if count == 1 or order is FCFS else 0.0
