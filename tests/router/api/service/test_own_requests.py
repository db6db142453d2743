"""With keys a caller ends, cancels and sees its own: requests of others are unknown to it."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvroute.v1 import router_pb2
from router.config.settings.queue_settings import QueueSettings
from tests.router.api.service.setting import one_worker, two_models
from tests.stage.keys import a_door, bearer, identity
from tests.stage.served import Served, asked, refusal, served

Code = grpc.StatusCode


def finished(reservation_id: str) -> router_pb2.ReportRequest:
    state = router_pb2.PROGRESS_STATE_FINISHED
    step = router_pb2.Progress(reservation_id=reservation_id, state=state)
    return router_pb2.ReportRequest(progress=[step])


async def result_of(stage: Served, report: router_pb2.ReportRequest, token: str) -> int:
    answer = await stage.router.Report(report, metadata=bearer(token))
    (outcome,) = answer.outcomes
    return int(outcome.result)


APPLIED, UNKNOWN = router_pb2.PROGRESS_RESULT_APPLIED, router_pb2.PROGRESS_RESULT_UNKNOWN


@pytest.mark.parametrize("limits", [{}, {"reservations": 100}], ids=["no quota", "a quota"])
async def test_reports_are_bound_to_the_identity_that_routed(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    own = ("route", "report")
    identities = (
        identity("a", rights=own, limits=limits),
        identity("b", rights=own),
        identity("all", rights=("report", "report_any")),
    )
    async with served(door=a_door(tmp_path, *identities)) as stage:
        one_worker(stage.fleet)
        metadata = bearer("a-token")
        picked = await stage.router.Route(asked(), metadata=metadata)
        call = await stage.stream(asked(), asked(first=1000), metadata=metadata)
        await call.done_writing()
        streamed = [
            result.response.reservation_id async for answer in call for result in answer.results
        ]
        ids = [picked.reservation_id, *streamed]
        assert len(ids) == 3
        reservations = stage.fleet.core.reservations
        for id_ in ids:
            assert await result_of(stage, finished(id_), "b-token") == UNKNOWN
        assert len(reservations) == 3, "another identity ends nothing"
        labels = {"method": "Router/Report", "reason": "PERMISSION_DENIED"}
        assert stage.metric("calls_refused_total", **labels) == 3
        assert await result_of(stage, finished(ids[0]), "a-token") == APPLIED
        assert await result_of(stage, finished(ids[1]), "a-token") == APPLIED
        assert await result_of(stage, finished(ids[2]), "all-token") == APPLIED
        assert len(reservations) == 0


async def test_a_request_that_waits_is_cancelled_by_its_own_identity_alone(tmp_path: Path) -> None:
    door = a_door(tmp_path, identity("a"), identity("b", rights=("route", "report")))
    async with served(door=door, queue=QueueSettings()) as stage:
        stage.fleet.add("w0", total_slots=1)
        metadata = bearer("a-token")
        await stage.router.Route(asked(), metadata=metadata)
        waits = stage.router.Route(asked(request_id="r"), metadata=metadata)
        await stage.waits(1)
        cancelled = router_pb2.Progress(
            request_id="r",
            state=router_pb2.PROGRESS_STATE_FAILED,
            failure_reason=router_pb2.FAILURE_REASON_CANCELLED,
        )
        report = router_pb2.ReportRequest(progress=[cancelled])
        assert await result_of(stage, report, "b-token") == UNKNOWN
        sooner = router_pb2.Progress(request_id="r", priority=9)
        request = router_pb2.ReportRequest(progress=[sooner])
        assert await result_of(stage, request, "b-token") == UNKNOWN
        assert len(stage.desk.admission) == 1
        assert await result_of(stage, report, "a-token") == APPLIED
        assert (await refusal(waits)).code is Code.CANCELLED


async def test_a_step_that_another_replica_forwards_names_its_identity(tmp_path: Path) -> None:
    async with served(door=a_door(tmp_path, identity("a"))) as stage:
        one_worker(stage.fleet)
        picked = await stage.router.Route(asked(), metadata=bearer("a-token"))
        report = finished(picked.reservation_id)

        def forwarded(**about: Any) -> int:
            answer = router_pb2.ReportResponse()
            step = router_pb2.ReportRequest(progress=report.progress, caller="10.0.0.1", **about)
            answer.ParseFromString(stage.reports.of_replica(step.SerializeToString()))
            return int(answer.outcomes[0].result)

        assert forwarded(owner="b") == UNKNOWN
        assert forwarded(owner="") == UNKNOWN
        assert forwarded(owner="a") == APPLIED
        assert forwarded() != UNKNOWN, "of a release without owners, or of one with report_any"


async def test_lists_show_what_an_identity_may_use_and_command(tmp_path: Path) -> None:
    identities = (
        identity("all"),
        identity("m", models=["alp*"]),
        identity("w", workers=["b"]),
        identity("none", models=["alpha"], workers=["b"]),
    )
    seen = {"all": ["a", "b"], "m": ["a"], "w": ["b"], "none": []}
    async with served(door=a_door(tmp_path, *identities)) as stage:
        two_models(stage.fleet)
        for name, workers in seen.items():
            assert await listed(stage, f"{name}-token") == workers
            watch = stage.call("WatchWorkers", metadata=bearer(f"{name}-token"))
            message = await watch.read()
            assert sorted(worker.worker_id for worker in message.changed) == workers
            watch.cancel()


async def test_the_queue_shows_requests_for_models_that_an_identity_may_use(tmp_path: Path) -> None:
    identities = identity("all"), identity("m", models=["alpha"]), identity("n", models=["beta"])
    door = a_door(tmp_path, *identities)
    async with served(door=door, queue=QueueSettings()) as stage:
        stage.fleet.add("a", model="alpha", total_slots=1)
        metadata = bearer("all-token")
        await stage.router.Route(asked(model="alpha"), metadata=metadata)
        waits = stage.router.Route(asked(model="alpha"), metadata=metadata)
        await stage.waits(1)
        for name, count in (("all", 1), ("m", 1), ("n", 0)):
            answer = await stage.call("ListQueue", metadata=bearer(f"{name}-token"))
            assert (answer.waiting, len(answer.requests)) == (count, count), name
        waits.cancel()


async def listed(stage: Served, token: str) -> list[str]:
    answer = await stage.call("ListWorkers", metadata=bearer(token))
    return sorted(worker.worker_id for worker in answer.workers)
