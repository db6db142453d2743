"""An order of the operator's own: a function named in the configuration as module:function.

    def score(request: OwnView) -> float, higher is sooner

The function is called on the event loop, for every waiting request of a pool, when requests came or
a worker may have got room: it must not wait for anything. Where it raises or returns no finite
number, the score is 0, and the failure is counted. Pure but for the function.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from router.config.own_functions import own_function
from router.decide.queue_order.orders import Order
from router.decide.queue_order.sight import Sight
from router.decide.waiter import Waiter

LENGTH_MAX = 256


class OwnFailure(StrEnum):
    """How an order's function failed; its values are values of a metric's label."""

    RAISED = "raised"
    NOT_A_NUMBER = "not_a_number"


@dataclass(frozen=True, slots=True)
class OwnView:
    """A waiting request, as an order's function gets it."""

    waited_s: float
    load: float
    """Load of the request's pool: work in flight over work that can be taken."""
    tenant: str
    labels: Mapping[str, str]
    priority: int
    model: str
    prompt_tokens: int
    new_tokens: int
    output_tokens: int


def own_order(name: str, where: str, failures: Counter[OwnFailure]) -> Order:
    """Makes an order of the operator's function named module:function; raises ConfigError.

    where: the configuration's key that names it. failures: counts the function's failures.
    """
    function = own_function("order", name, where)
    return Order(
        name,
        _checked(function, failures),
        aging=0.0,
        length_max=LENGTH_MAX,
        is_dynamic=True,
        needs_fleet=True,
    )


def _checked(
    function: Callable[[OwnView], float], failures: Counter[OwnFailure]
) -> Callable[[Waiter, Sight], float]:
    def score(waiter: Waiter, sight: Sight) -> float:
        view = OwnView(
            sight.now_s - waiter.arrived_s,
            sight.fleet.load(waiter),
            waiter.tenant,
            dict(sorted(waiter.narrowing.required_labels) if waiter.narrowing else ()),
            waiter.points,
            waiter.model,
            waiter.prompt_tokens,
            waiter.new_tokens,
            waiter.output_tokens,
        )
        try:
            number = float(function(view))
        except Exception:  # the function is the operator's: a count, and never a crash
            failures[OwnFailure.RAISED] += 1
            return 0.0
        if not isfinite(number):
            failures[OwnFailure.NOT_A_NUMBER] += 1
            return 0.0
        return number

    return score
