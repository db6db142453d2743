"""Steps about requests that wait: another priority, or the end of the wait, over real gRPC."""

import asyncio
from typing import Any

import grpc
import pytest

from kvroute.client import KvRouteClient, KvRouteError
from kvroute.v1 import FailureReason, Progress, ProgressResult, ProgressState
from kvroute.v1 import ReportRequest as Report
from router.decide.waiter import Fate
from tests.router.api.service.test_list_queue import waiting
from tests.router.api.service.test_waiting import full
from tests.stage.served import Served, refusal

CANCEL = {
    "state": ProgressState.PROGRESS_STATE_FAILED,
    "failure_reason": FailureReason.FAILURE_REASON_CANCELLED,
}
APPLIED = ProgressResult.PROGRESS_RESULT_APPLIED
UNCHANGED = ProgressResult.PROGRESS_RESULT_UNCHANGED
UNKNOWN = ProgressResult.PROGRESS_RESULT_UNKNOWN
INVALID = ProgressResult.PROGRESS_RESULT_INVALID


async def outcome(stage: Served, **step: Any) -> tuple[int, str]:
    """The result of one step, and its message."""
    response = await stage.router.Report(Report(progress=[Progress(**step)]))
    (one,) = response.outcomes
    return one.result, one.message


async def test_a_request_that_waits_gets_another_priority() -> None:
    async with full() as (stage, held):
        a, b = await waiting(stage, {"request_id": "a", "priority": 5}, {"request_id": "b"})
        assert await outcome(stage, request_id="b", priority=6) == (APPLIED, "")
        assert await outcome(stage, request_id="b", priority=6) == (UNCHANGED, "")
        await stage.report(held)
        held = (await b).reservation_id
        assert not a.done()
        await stage.report(held)
        assert (await a).worker_id == "w0"


async def test_a_wait_is_cancelled_by_the_requests_id() -> None:
    async with full() as (stage, _):
        # The caller may have sent it twice.
        calls = [asyncio.ensure_future(refusal(stage.route(request_id="a"))) for _ in range(2)]
        await stage.waits(2)
        assert await outcome(stage, request_id="a", **CANCEL) == (APPLIED, "")
        for call in calls:
            refused = await call
            assert (refused.code, refused.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED")
        assert await outcome(stage, request_id="a", **CANCEL) == (UNKNOWN, "")
        assert stage.desk.admission.queue.counts[Fate.CANCELLED] == 2
        assert stage.requests("cancelled") == 2


@pytest.mark.parametrize("batching", [True, False])
async def test_the_client_steers_and_is_not_called_again(batching: bool) -> None:
    async with full() as (stage, _):
        target = f"127.0.0.1:{stage.server.port}"
        async with KvRouteClient(target, batching=batching) as client:
            call = asyncio.ensure_future(client.route(token_ids=[1, 2, 3], request_id="a"))
            await stage.waits(1)
            steps = [Progress(request_id="a", priority=3), Progress(request_id="a", **CANCEL)]
            outcomes = await client.report(*steps)
            assert [one.result for one in outcomes] == [APPLIED, APPLIED]
            with pytest.raises(KvRouteError) as caught:
                await call
            assert (caught.value.code, caught.value.reason) == (
                grpc.StatusCode.CANCELLED,
                "CANCELLED",
            )
        assert stage.desk.admission.queue.counts[Fate.ARRIVED] == 1


async def test_a_cancel_that_comes_too_late_ends_the_reservation() -> None:
    async with full() as (stage, held):
        (call,) = await waiting(stage, {"request_id": "a"})
        await stage.report(held)
        await call
        assert await outcome(stage, request_id="a", **CANCEL) == (APPLIED, "")
        assert stage.fleet.core.reservations.__len__() == 0
        assert (await outcome(stage, request_id="a", **CANCEL))[0] == UNKNOWN


async def test_a_running_request_keeps_its_place_and_the_outcome_says_so() -> None:
    async with full() as (stage, held):
        (call,) = await waiting(stage, {"request_id": "a"})
        await stage.report(held)
        running = (await call).reservation_id
        keeps = "the request has its worker, where another priority changes nothing"
        assert await outcome(stage, request_id="a", priority=9) == (UNCHANGED, keeps)
        assert await outcome(stage, reservation_id=running, priority=9) == (UNCHANGED, keeps)
        done = ProgressState.PROGRESS_STATE_FINISHED
        told = await outcome(stage, reservation_id=running, priority=9, state=done)
        assert told == (APPLIED, keeps)
        assert await outcome(stage, request_id="a", priority=9) == (UNKNOWN, "")
        assert (await outcome(stage, reservation_id="none", priority=9))[0] == UNKNOWN


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"reservation_id": "r", "priority": 1}, "both a reservation_id and a request_id"),
        ({"request_id": "a" * 1025, "priority": 1}, "request_id is longer than 1024 characters"),
        ({"state": ProgressState.PROGRESS_STATE_FAILED}, "needs failure_reason CANCELLED"),
        ({"state": ProgressState.PROGRESS_STATE_RUNNING, "priority": 1}, "has the state FAILED"),
        ({}, "needs a priority or the state FAILED"),
    ],
)
async def test_a_step_that_means_nothing_is_invalid(step: dict[str, Any], message: str) -> None:
    async with full() as (stage, _):
        await waiting(stage, {"request_id": "a"})
        result, sentence = await outcome(stage, **{"request_id": "a"} | step)
        assert result == INVALID
        assert message in sentence
        assert len(stage.desk.admission) == 1
