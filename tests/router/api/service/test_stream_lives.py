"""How long streams go on: ages, a drain, and thousands of them at once."""

import asyncio
import gc
import weakref
from contextlib import ExitStack
from typing import Any

from router.api.service.route_streams import StreamLives


class Stream:
    """A call that notes when it is to read no more."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def end_reading(self) -> None:
        self.ended.set()


def a_stream() -> Any:
    return Stream()


async def test_a_stream_reads_until_its_age() -> None:
    young, old = a_stream(), a_stream()
    lives = StreamLives(asyncio.Event())
    async with asyncio.timeout(60):
        with lives.of(young, 3600.0), lives.of(old, 0.01):
            await old.ended.wait()
            assert not young.ended.is_set()


async def test_a_stream_without_an_age_reads_until_the_server_drains() -> None:
    stream, stopping = a_stream(), asyncio.Event()
    async with asyncio.timeout(60):
        with StreamLives(stopping).of(stream, None):
            await asyncio.sleep(0)
            assert not stream.ended.is_set()
            stopping.set()
            await stream.ended.wait()


async def test_a_stream_begun_when_the_server_stops_reads_nothing_further() -> None:
    stream, stopping = a_stream(), asyncio.Event()
    stopping.set()
    with StreamLives(stopping).of(stream, None):
        assert stream.ended.is_set()


async def test_thousands_of_streams_have_one_wait_for_the_drain() -> None:
    stopping = asyncio.Event()
    lives = StreamLives(stopping)
    before = asyncio.all_tasks()
    streams = [a_stream() for _ in range(1000)]
    async with asyncio.timeout(60):
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(lives.of(stream, 60.0))
            assert len(asyncio.all_tasks() - before) == 1
            stopping.set()
            for stream in streams:
                await stream.ended.wait()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_stream_that_is_over_leaves_nothing_behind() -> None:
    lives = StreamLives(asyncio.Event())
    before = asyncio.all_tasks()
    with lives.of(a_stream(), 60.0):
        with lives.of(a_stream(), None):
            pass
        assert len(asyncio.all_tasks() - before) == 1, "the wait of the one that is open"
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_stream_that_is_over_keeps_no_timer() -> None:
    lives = StreamLives(asyncio.Event())
    stream = a_stream()
    left = weakref.ref(stream)
    gc.disable()  # a timer would hold it, whatever the collector finds
    try:
        with lives.of(stream, 3600.0):
            pass
        del stream
        for _ in range(3):
            await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()
