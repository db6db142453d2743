"""A router at all its bounds: requests are refused by priority, while health and reports answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvroute.v1 import router_pb2
from router.api.service.grpc_bounds import GrpcBounds
from router.api.service.inbound import SMALL_BYTES
from router.config.settings.queue_settings import QueueSettings
from tests.stage.served import Served, asked, refusal, served

CALL_S = 60.0
WAITING = 3
Code = grpc.StatusCode


@asynccontextmanager
async def overloaded() -> AsyncIterator[tuple[Served, str, list[Any]]]:
    """One worker with one slot, which a request has (its reservation's id); as many requests of
    priority 0 wait as may; and messages hold all bytes that may be in flight."""
    bounds = GrpcBounds(in_flight_mib_max=1)
    async with served(bounds=bounds, queue=QueueSettings(max_waiting=WAITING)) as stage:
        stage.fleet.add("w0", total_slots=1)
        held = await stage.route()
        waiting = [await stage.queued(request_id=str(number)) for number in range(WAITING)]
        with stage.guard.in_flight.hold(1 << 20):
            yield stage, held.reservation_id, waiting
        for call in waiting:
            call.cancel()


def step(reservation_id: str) -> router_pb2.Progress:
    state = router_pb2.PROGRESS_STATE_FINISHED
    return router_pb2.Progress(reservation_id=reservation_id, state=state)


async def healthy(stage: Served) -> bool:
    health: Any = health_pb2_grpc.HealthStub(stage.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=CALL_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_no_more_than_may_wait_is_taken_and_the_rest_is_told_when_to_come_again() -> None:
    async with overloaded() as (stage, _, waiting):
        refused = await refusal(stage.router.Route(asked(), timeout=CALL_S))
        assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refused.retry_s is not None
        assert refused.retry_s > 0
        assert not any(call.done() for call in waiting)


async def test_a_request_of_higher_priority_takes_the_place_of_the_last_of_the_lowest() -> None:
    async with overloaded() as (stage, held, waiting):
        sooner = asyncio.ensure_future(stage.router.Route(asked(priority=50), timeout=CALL_S))
        refused = await refusal(waiting[-1])
        assert refused.code is Code.RESOURCE_EXHAUSTED
        assert refused.retry_s is not None
        assert refused.retry_s > 0
        await stage.router.Report(router_pb2.ReportRequest(progress=[step(held)]), timeout=CALL_S)
        assert (await sooner).worker_id == "w0"
        assert not any(call.done() for call in waiting[:-1])


async def test_large_messages_are_refused_early_and_health_lists_and_reports_are_answered() -> None:
    async with overloaded() as (stage, held, _):
        large = asked(SMALL_BYTES)
        refused = await refusal(stage.router.Route(large, timeout=CALL_S))
        assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES")
        assert refused.retry_s is not None
        assert await healthy(stage)
        workers = await stage.call("ListWorkers", timeout=CALL_S)
        assert len(workers.workers) == 1
        many = [step(f"{held}-{number:030}") for number in range(2000)]
        report = router_pb2.ReportRequest(progress=[*many, step(held)])
        assert report.ByteSize() > SMALL_BYTES
        answer = await stage.router.Report(report, timeout=CALL_S)
        assert answer.outcomes[-1].result == router_pb2.PROGRESS_RESULT_APPLIED


async def test_reports_have_a_bound_of_their_own() -> None:
    async with overloaded() as (stage, held, _):
        with stage.guard.reports_in_flight.hold(stage.guard.reports_in_flight.bytes_max):
            many = [step(f"{held}-{number:030}") for number in range(2000)]
            report = router_pb2.ReportRequest(progress=many)
            refused = await refusal(stage.router.Report(report, timeout=CALL_S))
            assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES")
            small = router_pb2.ReportRequest(progress=[step(held)])
            answer = await stage.router.Report(small, timeout=CALL_S)
            assert answer.outcomes[0].result == router_pb2.PROGRESS_RESULT_APPLIED
