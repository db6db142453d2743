"""The asyncio shell, in virtual time: what a request gets, and what is published meanwhile."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from simulator.engines.cost_model import PrefillChunk
from simulator.engines.profile import load_profile
from simulator.engines.scheduler import SchedulerConfig
from simulator.live import sglang_pages, vllm_pages
from simulator.live.clock import VirtualClock, sleep_until
from simulator.live.engine import Engine, EngineConfig, EngineStopped, RequestRefused
from simulator.schedulers.vllm.config import VllmConfig

CONFIG = EngineConfig("w0", SchedulerConfig(block_count=64, block_size=4))
JOINED = EngineConfig("w0", SchedulerConfig(block_count=64, block_size=4, joined_steps_max=32))

COST = load_profile("llama-8b-h100").cost_model()
"""Of SchedulerConfig's default."""


async def test_a_request_takes_the_time_of_its_steps() -> None:
    clock = VirtualClock()
    engine = Engine(CONFIG, clock)
    done = await clock.run(engine.complete(list(range(10)), 3))
    prefill_s = COST.step_s([PrefillChunk(10, 0)])
    assert done.ttft_s == pytest.approx(prefill_s)
    decode_s = COST.step_s([], 1, 10) + COST.step_s([], 1, 11)
    assert done.e2e_s == pytest.approx(prefill_s + decode_s)
    assert (done.prompt_tokens, done.cached_tokens, done.preemptions) == (10, 0, 0)
    assert len(done.token_ids) == 3


async def test_a_newcomer_waits_for_the_step_going_on_not_for_joined_ones() -> None:
    clock = VirtualClock()
    engine = Engine(JOINED, clock)

    async def traffic() -> float:
        first = asyncio.create_task(engine.complete(list(range(10)), 60))
        await sleep_until(clock, 0.1)
        second = await engine.complete(list(range(50, 60)), 2)
        await first
        return second.queue_s

    assert await clock.run(traffic()) < COST.step_s([], 1, 70)


async def test_published_batches_carry_the_blocks_of_prompt_and_answer() -> None:
    clock = VirtualClock(unix_start_s=1000.0)
    payloads: list[bytes] = []
    engine = Engine(CONFIG, clock, payloads.append)
    done = await clock.run(engine.complete(list(range(10)), 7))
    batches = [msgspec.msgpack.decode(payload) for payload in payloads]
    events: list[dict[str, Any]] = [event for _, events, _ in batches for event in events]
    tokens = [token for event in events for token in event["token_ids"]]
    assert tokens == [*range(10), *done.token_ids][:16]
    assert [len(event["block_hashes"]) for event in events] == [2, 1, 1]
    assert events[1]["parent_block_hash"] == events[0]["block_hashes"][-1]
    assert batches[0][0] == pytest.approx(1000.0 + done.ttft_s)


async def test_whoever_waits_when_the_engine_stops_is_told() -> None:
    clock = VirtualClock()
    engine = Engine(CONFIG, clock)

    async def stop_early() -> list[Any]:
        waiting = [
            asyncio.create_task(engine.complete(list(range(10)), 100)),
            asyncio.create_task(anext(engine.stream(list(range(10)), 100))),
        ]
        await sleep_until(clock, 0.001)
        engine.stop()
        return await asyncio.gather(*waiting, return_exceptions=True)

    ends = await clock.run(stop_early())
    assert [type(end) for end in ends] == [EngineStopped, EngineStopped]
    with pytest.raises(EngineStopped):
        await engine.complete([1], 1)


async def test_ids_that_are_no_token_ids_are_refused() -> None:
    engine = Engine(CONFIG, VirtualClock())
    for bad in ([-1], [1 << 32]):
        with pytest.raises(RequestRefused, match="token ids"):
            await engine.complete(bad, 1)


async def test_numpy_prompts_and_lists_are_the_same() -> None:
    clock = VirtualClock()
    engine = Engine(CONFIG, clock)
    await clock.run(engine.complete(np.arange(20, dtype=np.uint32), 1))
    done = await clock.run(engine.complete(list(range(20)), 1))
    assert done.cached_tokens == 16


async def test_the_first_token_is_announced_once() -> None:
    clock = VirtualClock()
    engine = Engine(CONFIG, clock)
    told: list[float] = []
    done = await clock.run(
        engine.complete([1, 2, 3], 4, on_first_token=lambda: told.append(clock.now_s()))
    )
    assert told == [pytest.approx(done.ttft_s)]


async def test_virtual_time_says_when_nothing_will_ever_happen() -> None:
    clock = VirtualClock()
    with pytest.raises(RuntimeError, match="no timer"):
        await clock.run(asyncio.Event().wait())


async def test_an_idle_engine_wakes_when_kv_has_come_and_when_who_held_it_leaves() -> None:
    clock = VirtualClock()
    limits = VllmConfig(block_count=8, block_size=4, host_block_count=64)
    engine = Engine(EngineConfig("w0", limits), clock)

    async def traffic() -> list[float]:
        first, other = list(range(28)), list(range(100, 128))
        await engine.complete(first, 1)
        await engine.complete(other, 1)  # takes the whole device
        again = await engine.complete(first, 1)
        loading = asyncio.create_task(engine.complete(other, 1))
        waiting = asyncio.create_task(engine.complete(list(range(200, 228)), 1))
        await asyncio.sleep(0)
        loading.cancel()
        last = await waiting
        return [again.cached_tokens, last.queue_s, engine.load().used_blocks]

    assert await clock.run(traffic()) == [27, 0.0, 0]


async def test_an_engine_without_events_names_no_source_of_them() -> None:
    engine = Engine(CONFIG, VirtualClock())
    assert vllm_pages.PAGES["/kv_event_sources"](engine, None, None) == {}
    assert sglang_pages.PAGES["/server_info"](engine, None, None)["kv_events"] is None
