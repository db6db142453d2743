"""How long a look of Python's garbage collector holds a router, with normal thresholds.

10 million blocks in the index and 10,000 open reservations; what the process had at its start is
frozen. Then decisions go on, each with the end of the oldest reservation. A pause is the CPU time
of the loop's thread between the collector's begin and its end, so others' turns on the core don't
count. The command sets other thresholds for this reason (router/app/cli/run.py, docs/decisions.md).
"""

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from events.feed.fleet_view import FleetView
from events.plane.facts import Epoch, FactsMessage, Stored, encode, pack_hashes
from indexer.identity import WorkerKey
from router.app.cli.run import COLLECTED_AFTER
from tests.bench.bench_decision import DECISIONS, Stage
from tests.bench.timing import row

OPEN = 10_000
WORKERS = 64
HOLDERS = 200
"""Workers with the blocks of the index, which get no requests."""
MESSAGES = 782
"""Of each of them"""
MESSAGE_BLOCKS = 64
ROUNDS = 25
"""DECISIONS each"""
NORMAL = (700, 10, 10)
"""Python's thresholds."""


def rows() -> list[dict[str, Any]]:
    """Milliseconds; and those of a look at all objects by itself, right after another one."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        stage = Stage(WORKERS)
        _load(stage._core.fleet.view, stage._now_s)
        stage._in_flight_max = OPEN
        _decide(stage, 1 + OPEN // DECISIONS)
        alone_ms = min(_look_ms() for _ in range(5))
        objects = len(gc.get_objects())
        gc.enable()
        gc.set_threshold(*NORMAL)
        normal = _decide(stage, ROUNDS)
        gc.set_threshold(*COLLECTED_AFTER)
        ours = _decide(stage, ROUNDS)
    finally:
        gc.set_threshold(*before)
        gc.enable()
        gc.unfreeze()
    note = f"{len(normal[2])} looks at all objects in {ROUNDS * DECISIONS:,} decisions"
    alone = f"{objects:,} objects, in the CPU's caches"
    return [
        row("garbage_pause_normal_ms", _longest(normal), "ms", "less", note),
        row("garbage_pause_ms", _longest(ours), "ms", "less", "with the command's thresholds"),
        row("garbage_full_ms", round(alone_ms, 2), "ms", "less", alone),
    ]


def _longest(pauses: dict[int, list[float]]) -> float:
    return round(max((max(one) for one in pauses.values()), default=0.0), 2)


def _look_ms() -> float:
    began = time.thread_time()
    gc.collect()
    return (time.thread_time() - began) * 1e3


def _decide(stage: Stage, rounds: int) -> dict[int, list[float]]:
    """Decides; returns the collector's pauses by generation, in milliseconds."""
    with _pauses() as pauses:
        for _ in range(rounds):
            stage.measure(stage.api)
    return pauses


@contextmanager
def _pauses() -> Iterator[dict[int, list[float]]]:
    pauses: dict[int, list[float]] = defaultdict(list)
    began = 0.0

    def on_look(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            pauses[info["generation"]].append((time.thread_time() - began) * 1e3)

    gc.callbacks.append(on_look)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(on_look)


def _load(view: FleetView, now_s: float) -> None:
    """10 million blocks."""
    view._workers_max = WORKERS + HOLDERS
    rng = np.random.default_rng(2)
    for i in range(HOLDERS):
        for seq in range(1, MESSAGES + 1):
            hashes = rng.integers(1, 1 << 63, MESSAGE_BLOCKS, np.uint64)
            facts = [Stored(pack_hashes(hashes), "device")]
            message = FactsMessage(v=1, epoch=Epoch(1, i), seq=seq, facts=facts, time_s=1.0)
            view.on_stream(WorkerKey(f"holder-{i}", 0), encode(message), now_s)
    if view.index.stats().blocks < HOLDERS * MESSAGES * MESSAGE_BLOCKS:
        raise AssertionError(f"{view.index.stats()}")
