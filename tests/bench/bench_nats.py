"""Facts through a real nats-server into the index: how many, and how soon they are visible.

The router's side (Broker, Feed, FleetView, native index, uvloop) has this process to itself; the
engines' side is nats_side.py, in other ones. Nothing may be lost, and each stream's beat must find
the index right, or the measurement fails.
"""

import asyncio
import json
import random
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import numpy as np
import uvloop

from events.feed.feed import Feed
from events.feed.fleet_view import FleetView, Pull
from events.feed.stream import StreamState
from events.plane.broker import Broker
from events.plane.clock import unix_now
from events.plane.settings import NatsSettings
from events.relay.stream_publisher import BEAT_S
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.cluster.children.nats_server import NatsChild
from tests.bench.nats_side import EVENT_BLOCKS, FLEET, TOPIC
from tests.bench.timing import row
from tests.stage.programs import KVROUTE, running

REPEATS = 5
INGEST_BLOCKS = 2_000_000
COALESCED_AT = 1_000_000
"""Blocks a second at which relays gather what the ingest rows send."""
PROBE = WorkerKey("probe", 0)
PROBES = 300
PROBE_GAP_S = 0.01
LATENCY_REPEATS = 3
DEADLINE_S = 60.0


def rows() -> list[dict[str, Any]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_rows())


async def _rows() -> list[dict[str, Any]]:
    nats = NatsChild()
    await nats.start()
    try:
        few, few_messages = await _ingest(nats.url, engines=8)
        many, many_messages = await _ingest(nats.url, engines=1000)
        idle = await _latency(nats.url, load=0)
        loaded = await _latency(nats.url, load=few / 2)
    finally:
        await nats.stop()
    return [
        row("nats_ingest_blocks_per_s", round(few), "blocks/s", "more"),
        row("nats_ingest_messages_per_s", round(few_messages), "messages/s", "more"),
        row("nats_ingest_1000_engines_blocks_per_s", round(many), "blocks/s", "more"),
        row("nats_ingest_1000_engines_messages_per_s", round(many_messages), "messages/s", "more"),
        row("event_to_visible_idle_p50_us", round(idle[0]), "us", "less"),
        row("event_to_visible_idle_p99_us", round(idle[1]), "us", "less"),
        row("event_to_visible_half_load_p50_us", round(loaded[0]), "us", "less"),
        row("event_to_visible_half_load_p99_us", round(loaded[1]), "us", "less"),
    ]


async def _ingest(url: str, engines: int) -> tuple[float, float]:
    """Blocks and messages a second, from the first byte sent to the last block in the index."""
    async with _child("fleet", _port(url), engines, COALESCED_AT, INGEST_BLOCKS) as fleet:
        made = await fleet.hear()
        seconds = median([await _flood(url, fleet, made, engines) for _ in range(REPEATS)])
    return made["blocks"] / seconds, made["messages"] / seconds


async def _flood(url: str, fleet: "_Child", made: dict[str, int], engines: int) -> float:
    async with _ear(url) as view:
        started = time.perf_counter()
        fleet.say("flood")
        await _until(lambda: view.facts["stored"] >= made["facts"])
        seconds = time.perf_counter() - started
        await fleet.hear()
        await _check(view, engines, fleet)
    return seconds


async def _latency(url: str, load: float) -> tuple[float, float]:
    """p50 and p99 in us from an engine's publish to the index. load: blocks/s of other engines."""
    async with _child("engine") as engine:
        port = (await engine.hear())["port"]
        relay = (
            *(*KVROUTE, "relay", "--worker-id", PROBE.worker_id),
            *("--fleet", FLEET, "--nats", url, "--address", "http://none", "--topic", TOPIC),
            *("--events", f"tcp://127.0.0.1:{port}", "--metrics-listen", ""),
            *("--log-level", "error"),
        )
        async with running(*relay):
            repeats = [await _probe(url, engine, load) for _ in range(LATENCY_REPEATS)]
    return median(p50 for p50, _ in repeats), median(p99 for _, p99 in repeats)


async def _probe(url: str, engine: "_Child", load: float) -> tuple[float, float]:
    seconds = PROBES * PROBE_GAP_S
    if not load:
        return await _probed(url, engine)
    # A little more than is probed: the load begins before and ends after.
    async with _child("fleet", _port(url), 8, load, int(load * (seconds + 2))) as fleet:
        await fleet.hear()
        return await _probed(url, engine, fleet)


async def _probed(url: str, engine: "_Child", fleet: "_Child | None" = None) -> tuple[float, float]:
    async with _ear(url) as view:
        await _until(lambda: PROBE in view.sources and _live(view, PROBE))
        visible_s = view.watch(PROBE)
        if fleet is not None:
            fleet.say("pace")
            await _until(lambda: len(view.sources) == 9)
        engine.say(f"{PROBES} {PROBE_GAP_S}")
        published_s = await engine.hear()
        await _until(lambda: len(visible_s) == PROBES)
        if fleet is not None:
            await fleet.hear()
            await _check(view, 9, fleet)
    late_us = (np.array(visible_s) - np.array(published_s)) * 1e6
    return float(np.percentile(late_us, 50)), float(np.percentile(late_us, 99))


class _WatchedView(FleetView):
    """Notes when one worker's events become visible."""

    _watched: WorkerKey | None = None

    def watch(self, key: WorkerKey) -> list[float]:
        """Times (time.monotonic), one an event of 16 blocks, from now on."""
        self._watched = key
        self._seen = self.index.count(self.sources[key].slot) // EVENT_BLOCKS
        self._visible_s: list[float] = []
        return self._visible_s

    def on_stream(self, key: WorkerKey, payload: bytes, now_s: float) -> list[Pull]:
        pulls = super().on_stream(key, payload, now_s)
        if key == self._watched:
            now = time.monotonic()
            events = self.index.count(self.sources[key].slot) // EVENT_BLOCKS
            self._visible_s += [now] * (events - self._seen)
            self._seen = events
        return pulls


def _live(view: FleetView, key: WorkerKey) -> bool:
    return view.sources[key].stream.state is StreamState.LIVE


async def _check(view: FleetView, streams: int, fleet: "_Child") -> None:
    """Fails unless every stream's beat finds the index right, and nothing was lost on the way."""
    async with asyncio.timeout(DEADLINE_S):
        while sum(_live(view, key) for key in view.sources) != streams:
            fleet.say("beat")
            await fleet.hear()
            await asyncio.sleep(BEAT_S)
    lost = {"gaps": view.gaps, "drifts": view.drifts, **(+view.dropped)}
    if lost != {"gaps": 0, "drifts": 0}:
        raise AssertionError(f"{view!r} lost some: {lost}")


@asynccontextmanager
async def _ear(url: str) -> AsyncIterator[_WatchedView]:
    """The router's side, as `kvroute serve` has it."""
    view = _WatchedView(NativeIndex(), beat_timeout_s=3.0, forget_s=30.0, workers_max=4096)
    broker = Broker(NatsSettings(), url, "bench")
    broken: list[BaseException] = []
    feed = Feed(
        broker,
        view,
        fleet=FLEET,
        replica="bench",
        clock=unix_now,
        on_heartbeat=lambda _key, _now_s: None,
        on_forgotten=lambda _keys, _now_s: None,
        on_control=lambda _control: None,
        on_failure=broken.append,
        rng=random.Random(1),
    )
    await broker.connect()
    await feed.start()
    try:
        yield view
    finally:
        await feed.stop()
        await broker.close()
    if broken or +broker.counts:
        raise AssertionError(f"the feed broke: {broken}, {broker.counts}")


class _Child:
    """A process of nats_side.py, spoken to in lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S))


@asynccontextmanager
async def _child(*arguments: object) -> AsyncIterator[_Child]:
    command = (sys.executable, "-m", "tests.bench.nats_side", *map(str, arguments))
    async with running(*command, stdin=PIPE, stdout=PIPE) as process:
        yield _Child(process)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # an event would be set in what is measured
            await asyncio.sleep(0.001)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])
