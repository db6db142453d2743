"""Supervised work: a failure ends only itself, and is retried with a back-off."""

import asyncio
import random

import pytest

from events.plane.supervisor import BACKOFF_MAX_S, BACKOFF_S, Supervisor

ERRORS = [
    ValueError("bad value"),
    OverflowError("int too large"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    IndexError("list index out of range"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    OSError(111, "Connection refused"),
    KeyError("field"),
    AssertionError("law broken"),
    TimeoutError(),
]


class Pauses:
    """A sleep that takes no time, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_work_that_raises_runs_again_and_leaves_its_neighbour_alone(error: Exception) -> None:
    pauses, heard = Pauses(), []
    supervisor = Supervisor(
        "gpu-a", random.Random(1), pauses, lambda *trouble: heard.append(trouble)
    )
    runs = 0
    goes_on = asyncio.Event()

    async def breaks_twice() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise error

    async def waits() -> None:
        await goes_on.wait()

    neighbour = supervisor.keep(waits, "neighbour")
    await supervisor.keep(breaks_twice, "events")
    assert runs == 3
    assert not neighbour.done()
    assert supervisor.failures == {"events": 2}
    assert heard == [("events", error)] * 2
    assert list(supervisor.troubles()) == ["events"]
    assert type(error).__name__ in supervisor.troubles()["events"]
    await supervisor.close()
    assert neighbour.cancelled()


async def test_the_pause_doubles_to_its_bound() -> None:
    pauses = Pauses()
    supervisor = Supervisor("gpu-a", random.Random(1), pauses)

    async def breaks() -> None:
        if len(pauses.seconds) < 12:
            raise ValueError("still")

    await supervisor.keep(breaks, "events")
    for i, pause_s in enumerate(pauses.seconds):
        longest_s = min(BACKOFF_MAX_S, BACKOFF_S * 2**i)
        assert longest_s / 2 <= pause_s <= longest_s


async def test_what_ends_the_process_is_not_kept() -> None:
    supervisor = Supervisor("gpu-a", random.Random(1), Pauses())

    async def cancelled() -> None:
        raise asyncio.CancelledError

    task = supervisor.keep(cancelled, "events")
    await asyncio.wait((task,))
    assert task.cancelled()
    assert not supervisor.failures


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_work_that_is_done_once_is_not_retried(error: Exception) -> None:
    supervisor = Supervisor("gpu-a", random.Random(1), Pauses())
    runs = 0

    async def breaks() -> None:
        nonlocal runs
        runs += 1
        raise error

    await supervisor.once(breaks, "warm")
    assert runs == 1
    supervisor.failed("warm", error)
    assert supervisor.failures == {"warm": 2}
    assert list(supervisor.troubles()) == ["warm"]


async def test_passwords_are_not_among_the_troubles() -> None:
    supervisor = Supervisor("gpu-a", random.Random(1))
    supervisor.failed("load", ValueError("http://user:hunter2@host:1/metrics"))
    assert supervisor.troubles() == {"load": "ValueError: http://***@host:1/metrics"}
