"""Cores, memory and NATS messages of one router, by fleet and load: python -m tests.bench.sizing

Measured here and now: a decision from bytes to bytes, a beat and a heartbeat of a worker, a message
of facts with its blocks, the bytes of a block in the index, the memory of a process without any.
Taken from the last table of `make bench`: what gRPC itself costs a request (UNARY_US, STREAM_US).
The rest is arithmetic (`Load`).
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from events.relay.stream_publisher import BEAT_S
from indexer.identity import Tier
from indexer.kernel import NativeIndex
from tests.bench.bench_decision import BLOCK_SIZE, DEFAULT, Stage
from tests.bench.bench_facts import native_seconds_a_message

UNARY_US, STREAM_US = 85.0, 65.0
"""CPU of gRPC for a request of 8,192 token ids, by one unary call and in a stream with 32 callers:
what `cpu_tokens_unary_us` and `cpu_tokens_stream_us` take on two shared cores of an Intel Xeon, 127
and 107 us (tests/bench/README.md; the stream's with nothing else at work), less a decision."""
REPORTS_US = 20.0
"""CPU of a request's reports, which the client sends in batches."""
NEW_TOKENS = 2048
"""Of a prompt: tokens whose blocks an engine stores, and for which it evicts as many."""
MESSAGES = 4
"""Of a request, by its worker's relay: blocks stored in prefill and decoding, and evicted."""
WORKER_BLOCKS = 30_000
SHARED = 0.25
"""Share of a worker's blocks that all workers hold."""
CHAIN = 64
REPEATS = 3


class Load(NamedTuple):
    """A fleet, and requests to one router of it."""

    workers: int
    requests_a_s: int

    @property
    def facts_a_s(self) -> float:
        """NATS messages with facts."""
        return self.requests_a_s * MESSAGES

    @property
    def messages_a_s(self) -> float:
        """NATS messages to the router: facts, and a heartbeat and a beat of each worker."""
        return self.facts_a_s + 2 * self.workers / BEAT_S

    @property
    def blocks_a_s(self) -> float:
        """Stored and removed."""
        return 2 * self.requests_a_s * NEW_TOKENS / BLOCK_SIZE


LOADS = [
    Load(8, 50),
    Load(8, 500),
    Load(64, 500),
    Load(64, 2000),
    Load(256, 1000),
    Load(1000, 2000),
]


class Costs(NamedTuple):
    """Microseconds of CPU."""

    decision: float
    beats: float
    """A heartbeat and a beat."""
    fact: float
    """A message of facts with as many blocks as `Load` has a message."""

    def cores(self, load: Load, call: float) -> float:
        requests = load.requests_a_s * (self.decision + call + REPORTS_US)
        events = load.facts_a_s * self.fact + load.workers / BEAT_S * self.beats
        return (requests + events) / 1e6


def costs_of(workers: int) -> Costs:
    stage = Stage(workers, DEFAULT)
    decision = median(stage.measure(stage.whole)[0] for _ in range(REPEATS))
    beats = median(_cpu_us(stage.beat_all) / workers for _ in range(REPEATS))
    blocks = round(2 * NEW_TOKENS / BLOCK_SIZE / MESSAGES)
    return Costs(decision, beats, native_seconds_a_message(blocks) * 1e6)


def _cpu_us(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return (time.process_time() - began) * 1e6


def index_mib(workers: int) -> float:
    """Of a fleet with full caches."""
    rng = np.random.default_rng(7)
    index = NativeIndex()
    slots = [index.open_slot() for _ in range(workers)]
    for _ in range(round(WORKER_BLOCKS * SHARED) // CHAIN):
        chain = rng.integers(1, 1 << 62, CHAIN, np.uint64)
        for slot in slots:
            index.store(slot, Tier.DEVICE, chain)
    for slot in slots:
        for _ in range(round(WORKER_BLOCKS * (1 - SHARED)) // CHAIN):
            index.store(slot, Tier.DEVICE, rng.integers(1, 1 << 62, CHAIN, np.uint64))
    return index.stats().bytes / 2**20


def process_mib() -> float:
    """Of a router's process before it knows a worker."""
    code = "import router.app.processes.router_process; print(open('/proc/self/status').read())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    (line,) = [line for line in output.splitlines() if line.startswith(b"VmRSS:")]
    return int(line.split()[1]) / 1024


def table(loads: Sequence[Load] = LOADS) -> str:
    """As Markdown."""
    lines = [
        "| workers | requests/s | decision, us | cores: unary calls | cores: streams | index, MiB"
        " | NATS messages/s |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    costs = {workers: costs_of(workers) for workers in sorted({load.workers for load in loads})}
    memory = {workers: index_mib(workers) for workers in costs}
    for load in loads:
        cost = costs[load.workers]
        lines.append(
            f"| {load.workers:,} | {load.requests_a_s:,} | {cost.decision:.0f}"
            f" | {cost.cores(load, UNARY_US):.2f} | {cost.cores(load, STREAM_US):.2f}"
            f" | {memory[load.workers]:,.0f} | {load.messages_a_s:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n\nA process without workers: {process_mib():.0f} MiB.\n")
