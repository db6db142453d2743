"""The order in force, as the configuration has it: from a waiting request to its key. Pure."""

from random import Random

from typing_extensions import override

from router.config.queue_settings import QueueSettings
from router.config.settings import ConfigError
from router.queue.orders import ORDERS, Order
from router.queue.waiter import Key, Waiter

WHERE = "$.queue.order"


class Ranking:
    """An order with its aging."""

    def __init__(self, order: Order, aging: float, rng: Random) -> None:
        self.order = order
        self.aging = aging
        self._rng = rng

    @override
    def __repr__(self) -> str:
        return f"<Ranking {self.order.name}, {self.aging:g} {self.order.unit} a second>"

    def key(self, waiter: Waiter) -> Key:
        """Where a request stands, lower is sooner."""
        return self.aging * waiter.arrived_s - self.order.score(waiter, self._rng)


def ranking(settings: QueueSettings, rng: Random) -> Ranking:
    """The order that the configuration names; raises ConfigError."""
    order = ORDERS.get(settings.order)
    if order is None:
        raise ConfigError(
            f"unknown order {settings.order!r} at `{WHERE}`; there are {', '.join(ORDERS)}"
        )
    return Ranking(order, order.aging if settings.aging is None else settings.aging, rng)
