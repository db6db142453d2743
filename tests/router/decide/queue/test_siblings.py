"""Requests that share a prefix which no worker holds."""

from typing import Any

import numpy as np

from router.config.settings.queue_settings import SiblingsSettings
from router.decide.queue.admission_queue import AdmissionQueue
from router.decide.queue.views import rows
from router.decide.queue_turns.siblings import KEPT_S, LEADS_MAX, Siblings
from router.decide.waiter import Waiter
from tests.router.decide.queue.waiting import (
    POOL,
    Workers,
    all_offered,
    drained,
    names,
    offered,
    queue_of,
    turns,
)

BLOCK = 16


def prompt(prefix: int, own: int, blocks: int = 40, shared: int = 36) -> dict[str, Any]:
    """A prompt whose first blocks others have, too."""
    chain = [prefix * 1000 + i for i in range(shared)]
    chain += [own * 10_000_000 + i for i in range(blocks - shared)]
    tokens = blocks * BLOCK
    return {
        "prefixes": np.array(chain, np.uint64),
        "block_size": BLOCK,
        "prompt_tokens": tokens,
        "new_tokens": tokens,
    }


class Prefilling(Workers):
    """Prompts that take their time."""

    def __init__(self, load: float = 1.0) -> None:
        super().__init__()
        self.busy = load
        self.done: set[str] = set()

    def is_prefilling(self, reservation_id: str) -> bool:
        return reservation_id not in self.done


def holding(load: float = 1.0, workers: Prefilling | None = None) -> AdmissionQueue:
    siblings = SiblingsSettings(enabled=True)
    return queue_of(workers or Prefilling(load), siblings=siblings)


def test_the_first_goes_and_the_others_follow_its_prefill() -> None:
    workers = Prefilling()
    queue = holding(workers=workers)
    for number, name in enumerate("abc"):
        offered(queue, name, **prompt(1, number), reservation_id=name)
    offered(queue, "other", **prompt(2, 9))
    assert drained(queue) == "a other"
    assert [row.held_by for row in rows(queue, 0.0, 9)] == ["sibling", "sibling"]
    workers.done = {"a"}
    assert drained(queue) == "b c", "neither holds the other"


def test_a_hold_is_over_after_its_time() -> None:
    queue = holding()
    for number, name in enumerate("ab"):
        offered(queue, name, **prompt(1, number))
    assert drained(queue, 10.0) == "a"
    assert turns(queue, 11.9) == ""
    assert turns(queue, 12.0) == "b"


def test_what_some_worker_holds_makes_no_siblings() -> None:
    """36 blocks are shared: 4 that are cached leave 32, and 5 leave 31."""
    for cached_blocks, order in ((4, "a"), (5, "a b")):
        queue = holding()
        for number, name in enumerate("ab"):
            values = prompt(1, number)
            values["new_tokens"] -= cached_blocks * BLOCK
            offered(queue, name, **values)
        assert drained(queue) == order


def test_a_pool_with_little_load_holds_none() -> None:
    for load, order in ((0.49, "a b"), (0.5, "a")):
        queue = holding(load)
        for number, name in enumerate("ab"):
            offered(queue, name, **prompt(1, number))
        assert drained(queue) == order


def test_unless_it_is_enabled_none_is_held() -> None:
    queue = queue_of()
    for number, name in enumerate("ab"):
        offered(queue, name, **prompt(1, number))
    assert drained(queue) == "a b"


def test_requests_without_known_blocks_have_no_siblings() -> None:
    queue = holding()
    all_offered(queue, "ab", prompt_tokens=4000, new_tokens=4000)
    assert drained(queue) == "a b"


def test_held_requests_do_not_count_as_looked_past() -> None:
    queue = queue_of(Prefilling(), look_past=0, siblings=SiblingsSettings(enabled=True))
    for number in range(9):
        offered(queue, str(number), **prompt(1, number))
    offered(queue, "other")
    assert drained(queue) == "0 other"


def test_settings_that_change_hold_from_the_next_request_on() -> None:
    queue = queue_of()
    queue.configure(holding().settings, 0.0)
    for number, name in enumerate("ab"):
        offered(queue, name, **prompt(1, number))
    assert names(queue.candidates(POOL, 1, 0.0)) == "a b", "none went"


def test_leads_are_bounded_and_forgotten() -> None:
    siblings = Siblings(Prefilling())
    for number in range(LEADS_MAX + 9):
        siblings.went(Waiter(str(number), 0.0, run=number), 0.0)
    assert len(siblings) == LEADS_MAX
    assert not siblings.holds(Waiter("x", 0.0, run=0), 0.5)
    assert siblings.holds(Waiter("x", 0.0, run=LEADS_MAX), 0.5)
    siblings.went(Waiter("late", 0.0, run=1), KEPT_S)
    assert len(siblings) == 1
