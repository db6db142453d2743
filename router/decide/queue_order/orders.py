"""The orders by name: from a waiting request to a score, higher is sooner. Pure.

A score s becomes the key by which a line is sorted, lower is sooner:

    key = -s + aging * arrived_s

All requests wait alike, so waiting needs no new sort: s + aging * (now_s - arrived_s) ranks the
same at every moment. A later request overtakes an earlier one only if it arrived less than

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
"""Score of a request without the number that its order looks at: behind all that have it."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the queue: its score function, with notes for operators."""

    name: str
    formula: str
    """Formula of the score."""
    unit: str
    """Unit of the score; aging is in this unit per second of waiting."""
    aging: float
    """That holds where the configuration names none."""
    good_for: str
    starves: str
    """Which requests may wait for long, without aging."""
    source: str
    score: Score
    scores: Callable[[Sequence[Waiter], Sight], list[float]] | None = None
    """Scores of all requests of a line together, in the order of arrival; None: each has its
    own."""
    length_max: int | None = None
    """Longest pool that it ranks; None: any."""
    is_dynamic: bool = False
    """Whether scores change while requests wait."""
    needs_fleet: bool = False
    """Whether scores are of what the workers hold or do, or of what prompts are made of."""


def _weight(waiter: Waiter) -> float:
    """Weight of a priority p: 1 + p, or 1 / (1 - p) below 0; positive, and 1 for priority 0."""
    p = waiter.points
    return 1.0 + p if p >= 0 else 1.0 / (1.0 - p)


def _work(waiter: Waiter) -> int:
    """Tokens to compute, 1 at least."""
    return max(1, waiter.new_tokens + waiter.output_tokens)


def _due(waiter: Waiter) -> float:
    due_s = min(waiter.deadline_s, waiter.expires_s)
    return LAST if due_s == inf else -due_s


def _depth_first(waiters: Sequence[Waiter], sight: Sight) -> list[float]:
    scores = [0.0] * len(waiters)
    for place, number in enumerate(depth_first(waiters)):
        scores[number] = -float(place)
    return scores


FCFS = Order(
    name="fcfs",
    formula="0",
    unit="s",
    aging=1.0,
    good_for="equal treatment: waits vary least",
    starves="none; short requests wait behind long ones",
    source="vLLM V1 and SGLang, policy fcfs",
    score=lambda waiter, sight: 0.0,
)
PRIORITY = Order(
    name="priority",
    formula="priority",
    unit="points",
    aging=0.1,
    good_for="callers that know their urgent requests",
    starves="low priorities while higher ones keep coming",
    source="vLLM V1, policy priority, with higher first and aging",
    score=lambda waiter, sight: float(waiter.points),
)
EDF = Order(
    name="edf",
    formula="-(time at which the answer is due)",
    unit="s",
    aging=0.0,
    good_for="deadlines and goodput, while the fleet can meet most of them",
    starves="requests due late; in overload, those that could still be met wait behind late ones",
    source="Liu and Layland 1973, earliest deadline first",
    score=lambda waiter, sight: _due(waiter),
)
LOF = Order(
    name="lof",
    formula="expected output tokens",
    unit="tokens",
    aging=400.0,
    good_for="throughput of batch jobs: long answers start first, and the fleet ends together",
    starves="short answers",
    source="SGLang, policy lof",
    score=lambda waiter, sight: float(waiter.output_tokens),
)
SHORTEST_FIRST = Order(
    name="shortest-first",
    formula="-(new tokens + expected output tokens)",
    unit="tokens",
    aging=4000.0,
    good_for="mean wait, where all requests are equally urgent",
    starves="long requests",
    source="Schrage 1968, shortest processing time first",
    score=lambda waiter, sight: -float(_work(waiter)),
)
WSPT = Order(
    name="wspt",
    formula="1000 * weight / (new tokens + expected output tokens), weight = 1 + priority,"
    " or 1 / (1 - priority) below 0",
    unit="weight per 1,000 tokens",
    aging=0.1,
    good_for="mean wait by urgency: short and urgent requests first",
    starves="long requests of low priority",
    source="Smith 1956; NVIDIA Dynamo, queue policy wspt, with output tokens and aging",
    score=lambda waiter, sight: 1000.0 * _weight(waiter) / _work(waiter),
)
PREFILL_FIRST = Order(
    name="prefill-first",
    formula="1 if the prompt is still to be computed, else 0",
    unit="1",
    aging=0.1,
    good_for="short times to the first token, as a part of a composite order",
    starves="decode halves of pairs",
    source="Chitu, scorer prefill_first",
    score=lambda waiter, sight: float(waiter.needs_prefill),
)
RANDOM = Order(
    name="random",
    formula="a uniform random number of 0 to 1, drawn on arrival",
    unit="1",
    aging=0.1,
    good_for="comparisons",
    starves="none for certain",
    source="SGLang, policy random",
    score=lambda waiter, sight: sight.rng.random(),
)
LPM = Order(
    name="lpm",
    formula="leading prompt tokens that some worker with room holds",
    unit="tokens",
    aging=2000.0,
    good_for="throughput of prompts that share prefixes: what is cached goes while it is cached",
    starves="prompts that no worker holds",
    source="SGLang, policy lpm, over the workers of a pool, with aging",
    score=lambda waiter, sight: float(sight.fleet.overlap_tokens(waiter)),
    length_max=128,
    is_dynamic=True,
    needs_fleet=True,
)
DFS_WEIGHT = Order(
    name="dfs-weight",
    formula="-(place in a depth-first walk of the trie of waiting prompts, heavy branches first)",
    unit="places",
    aging=20.0,
    good_for="batches of prompts with many shared prefixes: those that share one go together",
    starves="prompts that share nothing with others",
    source="SGLang, policy dfs-weight, over the prompts that wait instead of a cache",
    score=lambda waiter, sight: 0.0,
    scores=_depth_first,
    length_max=256,
    is_dynamic=True,
    needs_fleet=True,
)
LAS = Order(
    name="las",
    formula="-(tokens that the tenant got while requests waited, weighted by exp(-age / 60 s))",
    unit="tokens",
    aging=4000.0,
    good_for="tenants that ask for little, beside tenants that ask for much",
    starves="tenants that ask for much",
    source="Rai, Urvoy-Keller and Biersack 2003, least attained service, by tenant",
    score=lambda waiter, sight: -sight.service.of(waiter.tenant, sight.now_s),
    length_max=1024,
    is_dynamic=True,
)

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
