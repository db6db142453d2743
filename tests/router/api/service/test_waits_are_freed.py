"""What a wait held is freed as it ends, without a look of the collector."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from indexer.identity import WorkerKey
from kvroute.v1 import router_pb2
from router.api.desk.answers import Waiting
from router.config.settings.queue_settings import QueueSettings
from router.decide.waiter import Fate
from router.request.refusal import Refusal
from tests.stage.garbage import freed_at_once
from tests.stage.served import Served, asked, served
from tests.stage.waiting import until

TIMES = 3
W0 = WorkerKey("w0", 0)
End = Callable[[Served, str], Awaitable[object]]


@asynccontextmanager
async def full() -> AsyncIterator[tuple[Served, str]]:
    """A fleet of one worker with one slot, which a request has taken: its reservation's id. Three
    may wait, for two seconds."""
    queue = QueueSettings(max_waiting=TIMES, timeout_s=2.0)
    async with served(queue=queue) as stage:
        stage.fleet.core.reservations.memory_window_s = 0.0
        stage.fleet.add("w0", total_slots=1)
        yield stage, (await stage.route()).reservation_id


async def picked(stage: Served, held: str) -> None:
    for _ in range(TIMES):
        before = len(stage.desk.admission)
        await stage.report(held)
        assert len(stage.desk.admission) == before - 1
        (held,) = [one.id for one in stage.fleet.core.reservations.on_workers([W0])]
    await stage.report(held)


async def timed_out(stage: Served, _held: str) -> None:
    stage.fleet.now_s += 2.0
    stage.desk.dispatch()


async def cancelled_by_report(stage: Served, _held: str) -> None:
    step = router_pb2.Progress(
        request_id="r",
        state=router_pb2.PROGRESS_STATE_FAILED,
        failure_reason=router_pb2.FAILURE_REASON_CANCELLED,
    )
    await stage.router.Report(router_pb2.ReportRequest(progress=[step]))


async def displaced(stage: Served, _held: str) -> None:
    calls = [asyncio.ensure_future(stage.route(priority=11)) for _ in range(TIMES)]
    await until(
        lambda: stage.desk.admission.queue.counts[Fate.DISPLACED] == TIMES, "all are displaced"
    )
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def unserved(stage: Served, _held: str) -> None:
    stage.fleet.core.remove("w0", 60.0, stage.fleet.now_s)
    stage.desk.dispatch()
    stage.desk.close()


def name_for(end: End) -> str:
    """Of the requests that wait: equal ones get one answer."""
    return "r" if end is cancelled_by_report else ""


ENDS = [picked, timed_out, cancelled_by_report, displaced, unserved]


async def _ended(call: Any) -> None:
    with suppress(grpc.aio.AioRpcError):
        await call


@pytest.mark.parametrize("end", ENDS)
async def test_a_call_that_waited(end: End) -> None:
    async with full() as (stage, held), freed_at_once(Waiting, Refusal):
        calls = [
            asyncio.ensure_future(_ended(stage.route(request_id=name_for(end))))
            for _ in range(TIMES)
        ]
        await stage.waits(TIMES)
        await end(stage, held)
        await asyncio.gather(*calls)
        stage.fleet.tick()


@pytest.mark.parametrize("end", ENDS)
async def test_an_item_that_waited(end: End) -> None:
    async with full() as (stage, held), freed_at_once(Waiting, Refusal):
        requests = [asked(request_id=name_for(end)) for _ in range(TIMES)]
        stream = await stage.stream(*requests)
        await stage.waits(TIMES)
        await end(stage, held)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass
        stage.fleet.tick()


async def test_a_caller_that_is_gone() -> None:
    async with full() as (stage, _held), freed_at_once(Waiting, Refusal):
        calls = [stage.route() for _ in range(TIMES)]
        await stage.waits(TIMES)
        for call in calls:
            call.cancel()
        await stage.waits(0)
        del calls, call


async def test_a_caller_whose_deadline_is_over() -> None:
    async with full() as (stage, _held), freed_at_once(Waiting, Refusal):
        calls = [
            asyncio.ensure_future(_ended(stage.router.Route(asked(), timeout=0.3)))
            for _ in range(TIMES)
        ]
        await asyncio.gather(*calls)
        await stage.waits(0)


async def test_a_newcomer_that_is_refused() -> None:
    async with full() as (stage, _held):
        calls = [stage.route() for _ in range(TIMES)]
        await stage.waits(TIMES)
        async with freed_at_once(Waiting, Refusal):
            for _ in range(TIMES):
                await _ended(stage.route())
        for call in calls:
            call.cancel()
