"""The orders of the queue by name: each gives a waiting request a score, the highest first. Pure.

A score s becomes the key by which a line is sorted, lower is sooner:

    key = -s + aging * arrived_s

Aging raises all scores at the same pace, so waiting needs no new sort: requests rank the same by
s + aging * (now_s - arrived_s) at every moment. A later request overtakes an earlier one only if it
arrived less than

    (range of scores) / aging

seconds after it: the bound on waiting that aging gives. Requests with equal keys go in the order of
arrival. Adding an order is one entry here and one test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from router.decide.queue_order.sight import Sight
from router.decide.queue_order.trie import depth_first
from router.decide.waiter import Waiter

Score = Callable[[Waiter, Sight], float]

LAST = -1e300
"""Score of a request without the number that its order reads: behind all requests with one."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the queue; docs/queue.md says what each is good for, and which requests it may
    starve."""

    name: str
    score: Score
    aging: float
    """Aging where queue.aging is not set: in the score's unit, per second of waiting."""
    scores: Callable[[Sequence[Waiter], Sight], list[float]] | None = None
    """Function that scores all requests of a line together, given in the order of arrival; None:
    `score` is called for each."""
    length_max: int | None = None
    """Most waiting requests of a pool that the order ranks; None: any number."""
    is_dynamic: bool = False
    """Whether scores change while requests wait."""
    needs_fleet: bool = False
    """Whether scores depend on the workers' caches or load, or on the blocks of prompts."""


def _weight(waiter: Waiter) -> float:
    """Weight of a priority p: 1 + p, or 1 / (1 - p) below 0; positive, and 1 for priority 0."""
    p = waiter.points
    return 1.0 + p if p >= 0 else 1.0 / (1.0 - p)


def _work(waiter: Waiter) -> int:
    """Tokens to compute, of prompt and expected answer: 1 at least."""
    return max(1, waiter.new_tokens + waiter.output_tokens)


def _due(waiter: Waiter) -> float:
    due_s = min(waiter.deadline_s, waiter.expires_s)
    return LAST if due_s == inf else -due_s


def _depth_first(waiters: Sequence[Waiter], sight: Sight) -> list[float]:
    scores = [0.0] * len(waiters)
    for place, number in enumerate(depth_first(waiters)):
        scores[number] = -float(place)
    return scores


FCFS = Order("fcfs", lambda waiter, sight: 0.0, aging=1.0)
"""First come, first served; aging in seconds. Source: vLLM V1 and SGLang, policy fcfs."""
PRIORITY = Order("priority", lambda waiter, sight: float(waiter.points), aging=0.1)
"""The highest priority, in points. Source: vLLM V1, policy priority, but higher first and aging."""
EDF = Order("edf", lambda waiter, sight: _due(waiter), aging=0.0)
"""The earliest due time, in seconds. Source: Liu and Layland 1973, earliest deadline first."""
LOF = Order("lof", lambda waiter, sight: float(waiter.output_tokens), aging=400.0)
"""The longest expected output, in tokens. Source: SGLang, policy lof."""
SHORTEST_FIRST = Order("shortest-first", lambda waiter, sight: -float(_work(waiter)), aging=4000.0)
"""The fewest tokens to compute. Source: Schrage 1968, shortest processing time first."""
WSPT = Order("wspt", lambda waiter, sight: 1000.0 * _weight(waiter) / _work(waiter), aging=0.1)
"""The highest weight, by priority, per 1,000 tokens to compute. Source: Smith 1956; NVIDIA Dynamo,
queue policy wspt, with output tokens and aging."""
PREFILL_FIRST = Order("prefill-first", lambda waiter, sight: float(waiter.needs_prefill), aging=0.1)
"""1 if the prompt is still to be computed, else 0. Source: Chitu, scorer prefill_first."""
RANDOM = Order("random", lambda waiter, sight: sight.rng.random(), aging=0.1)
"""A uniform random number of 0 to 1, drawn on arrival. Source: SGLang, policy random."""
LPM = Order(
    "lpm",
    lambda waiter, sight: float(sight.fleet.overlap_tokens(waiter)),
    aging=2000.0,
    length_max=128,
    is_dynamic=True,
    needs_fleet=True,
)
"""The longest prefix, in tokens, that some worker with room holds. Source: SGLang, policy lpm, over
the workers of a pool, with aging."""
DFS_WEIGHT = Order(
    "dfs-weight",
    lambda waiter, sight: 0.0,
    aging=20.0,
    scores=_depth_first,
    length_max=256,
    is_dynamic=True,
    needs_fleet=True,
)
"""Places in a depth-first walk of the trie of waiting prompts (trie.py). Source: SGLang, policy
dfs-weight, which walks a cache instead."""
LAS = Order(
    "las",
    lambda waiter, sight: -sight.service.of(waiter.tenant, sight.now_s),
    aging=4000.0,
    length_max=1024,
    is_dynamic=True,
)
"""The fewest tokens that the request's tenant got lately, while requests waited. Source: Rai,
Urvoy-Keller and Biersack 2003, least attained service, by tenant."""

ORDERS: dict[str, Order] = {
    order.name: order
    for order in (
        FCFS,
        PRIORITY,
        EDF,
        LOF,
        SHORTEST_FIRST,
        WSPT,
        LPM,
        DFS_WEIGHT,
        LAS,
        PREFILL_FIRST,
        RANDOM,
    )
}
