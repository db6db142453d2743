"""What the admission queue costs a request that waits, without the decision about it.

Requests in 4 bands of 100 tenants wait; each step offers one, looks at whose turn it is and
dispatches it, so that as many wait afterwards. Times are of the CPU, medians of repeats.

`_alone`: a request that waits by itself. `_pass`: a round of dispatch that finds no worker with
room. `_rank`: making the keys of all that wait, which orders that look at the fleet do once in
0.1 ms for each request at most. `_bytes`: memory of a waiting request, without its payload.
"""

import random
import time
import tracemalloc
from statistics import median
from typing import Any

import msgspec
import numpy as np

from indexer.hashing import HashArray
from router.config.settings.queue_settings import BandSettings, QueueSettings, TenantsSettings
from router.decide.queue.admission_queue import AdmissionQueue
from router.decide.waiter import Waiter
from tests.bench.timing import row

POOL = "model"
BANDS = tuple(
    BandSettings(name=str(points), from_priority=points, weight=1.0 + points / 100)
    for points in (0, 100, 200, 300)
)
STEPS = 2000
REPEATS = 5
ORDERS = ("fcfs", "priority", "edf", "wspt", "shortest-first", "lof", "priority+prefill-first+fcfs")
RANKED = [("lpm", 128), ("dfs-weight", 128), ("dfs-weight", 256), ("las", 256), ("las", 1024)]
"""Orders that look at the fleet, by the number of requests that wait."""
BLOCKS = 512
"""Of a prompt, of which some run is another one's."""


def rows() -> list[dict[str, Any]]:
    found = []
    for order in ORDERS:
        cost_us = step_us(order, 10_000, fair=False)
        found.append(row(f"queue_{order}_10000_us", round(cost_us, 2), "us", "less"))
    cost_us = step_us("fcfs", 10_000, fair=True)
    found.append(row("queue_tenants_10000_us", round(cost_us, 2), "us", "less"))
    found.append(row("queue_alone_us", round(step_us("priority", 0, fair=False), 2), "us", "less"))
    found.append(row("queue_pass_10000_us", round(pass_us(10_000), 2), "us", "less"))
    for order, waiting in RANKED:
        cost_ms = rank_us(order, waiting) / 1000
        found.append(row(f"queue_rank_{order}_{waiting}_ms", round(cost_ms, 3), "ms", "less"))
    found.append(row("queue_waiter_bytes", round(bytes_each(10_000)), "B", "less"))
    return found


class Workers:
    """A fleet that holds some of every prompt; the look into the index is not measured."""

    def overlap_tokens(self, waiter: Waiter) -> int:
        return waiter.prompt_tokens - waiter.new_tokens

    def load(self, waiter: Waiter) -> float:
        return 1.0

    def is_prefilling(self, reservation_id: str) -> bool:
        return False


class Stage:
    """A queue with requests of all bands and tenants, and the next ones."""

    def __init__(self, order: str, waiting: int, fair: bool, has_blocks: bool = False) -> None:
        self.rng = random.Random(1)
        self.has_blocks = has_blocks
        settings = QueueSettings(
            max_waiting=waiting + 1000,
            max_mib=4096,
            order=order,
            bands=BANDS,
            tenants=TenantsSettings(fair=fair),
        )
        self.queue = AdmissionQueue(settings, self.rng, Workers())
        self.now_s = 1e9
        self.number = 0
        self.version = 0
        for _ in range(waiting):
            self.offer()

    def waiter(self) -> Waiter:
        rng = self.rng
        self.number += 1
        self.now_s += 0.0005
        tokens = int(rng.lognormvariate(7.5, 1.5))
        return Waiter(
            f"request-{self.number}",
            self.now_s,
            self.now_s + rng.uniform(60.0, 90.0),
            tenant=f"tenant-{rng.randrange(100)}",
            priority=rng.randrange(400),
            prompt_tokens=tokens,
            new_tokens=rng.randrange(tokens + 1),
            output_tokens=rng.randrange(1, 1000),
            size_bytes=tokens * 4,
            prefixes=self.chain() if self.has_blocks else None,
        )

    def chain(self) -> HashArray:
        """Of a prompt whose beginning is that of one of 20 others, and the rest its own."""
        rng = self.rng
        shared = rng.choice((64, 256, 384))
        family = rng.randrange(20) * BLOCKS
        own = np.arange(BLOCKS - shared, dtype=np.uint64) + np.uint64((self.number + 99) * BLOCKS)
        return np.concatenate([np.arange(shared, dtype=np.uint64) + np.uint64(family), own])

    def offer(self) -> None:
        self.queue.offer(POOL, self.waiter(), self.now_s)

    def steps(self, waiters: list[Waiter]) -> None:
        queue, now_s = self.queue, self.now_s
        for waiter in waiters:
            queue.offer(POOL, waiter, now_s)
            self.version += 1
            first = next(queue.candidates(POOL, self.version, now_s))
            queue.dispatched(first, first.new_tokens, 0, now_s)


def step_us(order: str, waiting: int, fair: bool) -> float:
    """CPU of one request: offered, its turn found, dispatched."""
    stage = Stage(order, waiting, fair)
    times = []
    for _ in range(REPEATS):
        waiters = [stage.waiter() for _ in range(STEPS)]
        started = time.thread_time()
        stage.steps(waiters)
        times.append((time.thread_time() - started) / STEPS)
    return median(times) * 1e6


def rank_us(order: str, waiting: int) -> float:
    """CPU of one ranking of all that wait."""
    stage = Stage(order, waiting, fair=False, has_blocks=True)
    settings = msgspec.structs.replace(stage.queue.settings, bands=())
    stage.queue.configure(settings, stage.now_s)
    times = []
    for version in range(1, 12):
        started = time.thread_time()
        next(stage.queue.candidates(POOL, version, stage.now_s + version))
        times.append(time.thread_time() - started)
    return median(times) * 1e6


def pass_us(waiting: int) -> float:
    """CPU of a round in which no worker has room."""
    stage = Stage("priority", waiting, fair=True)
    times = []
    for version in range(1, 201):
        started = time.thread_time()
        for waiter in stage.queue.candidates(POOL, version, stage.now_s):
            stage.queue.passed(waiter, version)
        times.append(time.thread_time() - started)
    return median(times) * 1e6


def bytes_each(waiting: int) -> float:
    """Memory of a waiting request, its place in all structures included."""
    tracemalloc.start()
    stage = Stage("priority", waiting, fair=True)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / len(stage.queue)
