"""How long the event loop stands still: 10 million blocks of 200 workers are loaded, matched and
forgotten.

A real uvloop. Facts come in messages of 64 blocks of one worker after the other, as many in a turn
of the loop as one read of a socket brings; between the turns prompts of 512 blocks are matched.
Then one worker is removed by command and swept away, in slices, again with matches between. A
ticker that runs in every turn notes the longest time between two of its runs, whatever the cause.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import uvloop

from events.feed.fleet_view import FleetView
from events.feed.stream import StreamState
from events.plane.facts import Beat, Epoch, FactsMessage, Stored, encode, pack_hashes
from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from tests.bench.timing import row

WORKERS = 200
MESSAGES = 782
"""Of each worker"""
MESSAGE_BLOCKS = 64
TURN_BYTES = 64 * 1024
PROMPT_BLOCKS = 512
REPEATS = 5
IDLE_S = 2.0
"""About as long as a load takes."""
NOW_S = 1000.0


def rows() -> list[dict[str, Any]]:
    """The longest pause, by the wall's clock and in CPU time; medians over repeats."""
    messages, prompts = _messages()
    gc.collect()
    gc.freeze()  # as the command does: what other benchmarks left is not what a router has
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = [runner.run(_pauses(messages, prompts)) for _ in range(REPEATS)]
        idle = runner.run(_idle())
    gc.unfreeze()
    load, forget, cpu = (median(one) for one in zip(*found, strict=True))
    longest = median(max(one[:2]) for one in found)
    note = f"loading {load:.2f}, forgetting {forget:.2f}; a loop with nothing to do: {idle:.2f}"
    return [
        row("forget_pause_ms", round(longest, 2), "ms", "less", note),
        row(
            "forget_pause_cpu_ms", round(cpu, 2), "ms", "less", "without others' turns on the core"
        ),
    ]


@dataclass(slots=True)
class _Pause:
    """The longest time between two turns of the loop so far."""

    ms: float = 0.0
    cpu_ms: float = 0.0


@asynccontextmanager
async def _watched() -> AsyncIterator[_Pause]:
    pause = _Pause()
    ticker = asyncio.create_task(_tick(pause))
    try:
        yield pause
    finally:
        ticker.cancel()


async def _tick(pause: _Pause) -> None:
    before, cpu_before = time.perf_counter(), time.thread_time()
    while True:
        await asyncio.sleep(0)
        now, cpu_now = time.perf_counter(), time.thread_time()
        pause.ms = max(pause.ms, (now - before) * 1e3)
        pause.cpu_ms = max(pause.cpu_ms, (cpu_now - cpu_before) * 1e3)
        before, cpu_before = now, cpu_now


async def _pauses(
    messages: list[tuple[WorkerKey, bytes]], prompts: list[HashArray]
) -> tuple[float, float, float]:
    """Milliseconds: while loading, while forgetting, and of CPU time in either."""
    view = FleetView(NativeIndex(), beat_timeout_s=3.0, forget_s=30.0, workers_max=WORKERS)
    async with _watched() as loading:
        await _load(view, messages, prompts)
    _check(view)
    async with _watched() as forgetting:
        await _forget(view, prompts)
    return loading.ms, forgetting.ms, max(loading.cpu_ms, forgetting.cpu_ms)


async def _idle() -> float:
    """Milliseconds that the machine itself takes from a loop, in a second or so."""
    async with _watched() as pause:
        until = time.perf_counter() + IDLE_S
        while time.perf_counter() < until:  # noqa: ASYNC110  # it has to turn all the time
            await asyncio.sleep(0)
    return pause.ms


async def _load(
    view: FleetView, messages: list[tuple[WorkerKey, bytes]], prompts: list[HashArray]
) -> None:
    room = TURN_BYTES
    turn = 0
    for key, payload in messages:
        view.on_stream(key, payload, NOW_S)
        room -= len(payload)
        if room < 0:
            room = TURN_BYTES
            await asyncio.sleep(0)
            view.index.match(prompts[turn % len(prompts)])
            turn += 1
    for key, source in view.sources.items():
        index, slot = view.index, source.slot
        epoch = Epoch(1, int(key.worker_id))
        beat = Beat(1, epoch, MESSAGES, index.count(slot), index.digest(slot), True, 1.0)
        view.on_stream(key, encode(beat), NOW_S)


async def _forget(view: FleetView, prompts: list[HashArray]) -> None:
    """Each step is a turn of the loop, as the feed's clock has it, but without its pauses."""
    view.remove("7", until_s=NOW_S + 60)
    turn = 0
    more = True
    while more:
        await asyncio.sleep(0)
        view.index.match(prompts[turn % len(prompts)])
        turn += 1
        await asyncio.sleep(0)
        more = view.index.sweep()
    view.tick(NOW_S)
    await asyncio.sleep(0)


def _check(view: FleetView) -> None:
    states = {source.stream.state for source in view.sources.values()}
    blocks = view.index.stats().blocks
    if states != {StreamState.LIVE} or blocks != WORKERS * MESSAGES * MESSAGE_BLOCKS:
        raise AssertionError(f"{view!r} holds {blocks} blocks")


def _messages() -> tuple[list[tuple[WorkerKey, bytes]], list[HashArray]]:
    """All messages in the order in which they come, and the beginnings of some workers' chains."""
    rng = np.random.default_rng(1)
    chains = rng.integers(1, 1 << 63, (WORKERS, MESSAGES, MESSAGE_BLOCKS), np.uint64)
    keys = [WorkerKey(str(i), 0) for i in range(WORKERS)]
    messages = []
    for n in range(MESSAGES):
        for i, key in enumerate(keys):
            facts = [Stored(pack_hashes(chains[i, n]), "device")]
            message = FactsMessage(v=1, epoch=Epoch(1, i), seq=n + 1, facts=facts, time_s=1.0)
            messages.append((key, encode(message)))
    prompts = [chain.ravel()[:PROMPT_BLOCKS].copy() for chain in chains[:50]]
    return messages, prompts
