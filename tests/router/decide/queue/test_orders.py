"""Each order by name."""

from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config.settings.queue_settings import QueueSettings
from router.decide.queue_order.orders import ORDERS
from router.decide.queue_order.sight import Sight
from router.decide.waiter import Waiter
from tests.router.decide.queue.waiting import Workers, drained, offered, queue_of

ALIKE = ("fcfs", "priority", "edf", "lof", "shortest-first", "wspt", "prefill-first")
"""Orders that know no chance."""


def order_of(name: str, *rows: dict[str, Any], aging: float | None = 0.0) -> str:
    """Names of requests, a, b, c and so on, in the order in which they go."""
    queue = queue_of(order=name, aging=aging)
    for letter, values in zip("abcdefgh", rows, strict=False):
        offered(queue, letter, values.get("arrived_s", 0.0), **values)
    return drained(queue, 0.0)


def test_the_configuration_names_every_order() -> None:
    text = str(QueueSettings.__annotations__["order"])
    assert [name for name in ORDERS if name not in text] == []


def test_priority_is_higher_first_then_arrival() -> None:
    rows = [{"priority": 1}, {"priority": 3}, {"priority": 1}, {"priority": -2}]
    assert order_of("priority", *rows) == "b a c d"


def test_edf_is_by_what_is_due_first() -> None:
    rows = [
        {"expires_s": 9.0},
        {"deadline_s": 5.0},
        {"deadline_s": 7.0, "expires_s": 4.0},
        {},
        {"deadline_s": inf, "expires_s": inf},
    ]
    assert order_of("edf", *rows) == "c b a d e"


def test_lof_is_longest_output_first() -> None:
    rows = [{"output_tokens": 10}, {"output_tokens": 900}, {"output_tokens": 10}]
    assert order_of("lof", *rows) == "b a c"


def test_shortest_first_counts_new_tokens_and_output() -> None:
    rows = [
        {"prompt_tokens": 9000, "new_tokens": 100, "output_tokens": 300},
        {"new_tokens": 350},
        {"new_tokens": 500},
        {},
    ]
    assert order_of("shortest-first", *rows) == "d b a c"


def test_wspt_weighs_work_by_priority() -> None:
    rows = [
        {"new_tokens": 100},
        {"new_tokens": 300, "priority": 3},  # weight 4: as 75 tokens
        {"new_tokens": 60, "priority": -1},  # weight 1/2: as 120 tokens
        {"new_tokens": 50, "output_tokens": 60},
    ]
    assert order_of("wspt", *rows) == "b a d c"


def test_prefill_first_has_decode_halves_wait() -> None:
    assert order_of("prefill-first", {"needs_prefill": False}, {}, {}) == "b c a"


def test_random_is_by_the_seed_and_by_no_other_chance() -> None:
    rows = [{} for _ in range(8)]
    assert order_of("random", *rows) == order_of("random", *rows) != "a b c d e f g h"


@pytest.mark.parametrize("name", ALIKE)
def test_equal_requests_go_in_the_order_of_arrival(name: str) -> None:
    rows = [{"arrived_s": float(number)} for number in range(5)]
    for aging in (None, 0.0, 3.0):
        assert order_of(name, *rows, aging=aging) == "a b c d e"


REQUESTS = st.builds(
    Waiter,
    request_id=st.just(""),
    arrived_s=st.floats(0, 1e4),
    expires_s=st.floats(0, 1e5),
    priority=st.integers(-1000, 1000),
    needs_prefill=st.booleans(),
    new_tokens=st.integers(0, 1 << 20),
    output_tokens=st.integers(0, 4096),
)


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=40)
@given(early=REQUESTS, late=REQUESTS, aging=st.floats(1e-3, 1e4))
def test_no_request_is_overtaken_by_one_that_came_later_than_the_bound(
    name: str, early: Waiter, late: Waiter, aging: float
) -> None:
    """bound = (score of the later one - score of the earlier one) / aging."""
    order, sight = ORDERS[name], Sight(Random(3), Workers())
    score, later = order.score(early, sight), order.score(late, sight)
    bound_s = max(0.0, later - score) / aging
    late.arrived_s = early.arrived_s + bound_s * (1 + 1e-6) + 1e-3
    assert aging * early.arrived_s - score <= aging * late.arrived_s - later
