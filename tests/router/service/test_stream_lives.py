"""How long streams go on: ages, a drain, and thousands of them at once."""

import asyncio
import gc
import weakref
from contextlib import ExitStack
from typing import Any

import pytest

from router.service.stream_lives import StreamLives


class Wire:
    """A call whose client says something when the test does."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.messages.get()


async def test_a_life_ends_the_wait_for_a_message_with_its_age() -> None:
    wire: Any = Wire()
    async with asyncio.timeout(60):
        with StreamLives(asyncio.Event()).begin(0.01) as life:
            assert await life.read(wire) is None
            assert await life.read(wire) is None


async def test_a_life_that_ends_while_something_is_decided_leaves_that_alone() -> None:
    wire: Any = Wire()
    stopping = asyncio.Event()
    batch = b"a batch"
    async with asyncio.timeout(60):
        with StreamLives(stopping).begin(None) as life:
            wire.messages.put_nowait(batch)
            assert await life.read(wire) is batch
            stopping.set()
            for _ in range(5):
                await asyncio.sleep(0)  # would be cancelled here
            assert await life.read(wire) is None


async def test_a_message_that_comes_as_the_life_ends_is_read() -> None:
    stopping = asyncio.Event()
    wire: Any = Wire()

    async def call() -> list[bytes | None]:
        with StreamLives(stopping).begin(None) as life:
            return [await life.read(wire), await life.read(wire)]

    task = asyncio.create_task(call())
    for _ in range(3):
        await asyncio.sleep(0)
    stopping.set()  # both in one turn of the loop
    wire.messages.put_nowait(b"a batch")
    assert await task == [b"a batch", None]


async def test_a_life_begun_when_the_server_stops_is_over() -> None:
    stopping = asyncio.Event()
    stopping.set()
    wire: Any = Wire()
    with StreamLives(stopping).begin(None) as life:
        assert await life.read(wire) is None


async def test_a_cancelled_call_is_cancelled_even_when_its_life_ends_at_once() -> None:
    stopping = asyncio.Event()
    wire: Any = Wire()

    async def call() -> None:
        with StreamLives(stopping).begin(None) as life:
            await life.read(wire)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    stopping.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_thousands_of_streams_have_one_wait_for_the_drain() -> None:
    stopping = asyncio.Event()
    lives = StreamLives(stopping)
    before = asyncio.all_tasks()
    with ExitStack() as stack:
        opened = [stack.enter_context(lives.begin(60.0)) for _ in range(1000)]
        assert len(asyncio.all_tasks() - before) == 1
        wires: list[Any] = [Wire() for _ in opened]
        reads = [
            asyncio.create_task(life.read(wire)) for life, wire in zip(opened, wires, strict=True)
        ]
        stopping.set()
        assert await asyncio.gather(*reads) == [None] * 1000
    with lives.begin(None) as late:
        assert await late.read(wires[0]) is None
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_stream_that_is_over_leaves_nothing_behind() -> None:
    lives = StreamLives(asyncio.Event())
    before = asyncio.all_tasks()
    first, second = lives.begin(60.0), lives.begin(None)
    with first:
        with second:
            pass
        assert len(asyncio.all_tasks() - before) == 1, "the wait of the one that is open"
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_stream_that_is_over_keeps_no_timer() -> None:
    lives = StreamLives(asyncio.Event())
    life = lives.begin(3600.0)
    with life:
        pass
    left = weakref.ref(life)
    gc.disable()  # a timer would hold it, whatever the collector finds
    try:
        del life
        for _ in range(3):
            await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()
