"""Report over a real socket: progress of reservations, and what it changes."""

import asyncio
from typing import Any

import pytest

from kvroute.v1 import fleet_pb2, router_pb2
from router.api.desk import reports, request_codec
from router.api.desk.reports import PROGRESS_MAX
from tests.stage.fleet import START_S, prompt
from tests.stage.served import Served, asked, refusal, served


class TestReport:
    async def outcomes(self, stage: Served, *steps: dict[str, Any]) -> list[int]:
        progress = [router_pb2.Progress(**step) for step in steps]
        answer = await stage.router.Report(router_pb2.ReportRequest(progress=progress))
        assert [one.reservation_id for one in answer.outcomes] == [
            one.reservation_id for one in progress
        ]
        return [one.result for one in answer.outcomes]

    async def test_a_life_from_pick_to_end(self) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0")
            pick = await stage.router.Route(asked(100))
            held = pick.reservation_id
            assert stage.fleet.loads() == {key: (1, 7, 100)}
            results = await self.outcomes(
                stage,
                {"reservation_id": held, "state": router_pb2.PROGRESS_STATE_RUNNING},
                {"reservation_id": held, "state": router_pb2.PROGRESS_STATE_PREFILL_DONE},
                {"reservation_id": held, "state": router_pb2.PROGRESS_STATE_PREFILL_DONE},
            )
            assert results == [
                router_pb2.PROGRESS_RESULT_APPLIED,
                router_pb2.PROGRESS_RESULT_APPLIED,
                router_pb2.PROGRESS_RESULT_UNCHANGED,
            ]
            assert stage.fleet.loads() == {key: (1, 7, 0)}
            end = {
                "reservation_id": held,
                "state": router_pb2.PROGRESS_STATE_FINISHED,
                "output_tokens": 5,
                "cached_tokens": 64,
            }
            assert await self.outcomes(stage, end, end) == [
                router_pb2.PROGRESS_RESULT_APPLIED,
                router_pb2.PROGRESS_RESULT_UNCHANGED,
            ]
            assert stage.fleet.loads() == {}
            registry = stage.metrics.registry
            labels = {"kind": "reported"}
            assert registry.get_sample_value("kvroute_cached_tokens_total", labels) == 64

    async def test_a_long_report_lets_others_have_a_turn(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reports, "SLICE_S", 0.0)
        async with served() as stage:
            stage.fleet.add("w0")
            seen: list[int] = []
            real = stage.fleet.core.report
            monkeypatch.setattr(
                stage.fleet.core, "report", lambda *step: (seen.append(turns), real(*step))[1]
            )
            turns = 0

            async def others() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            ticker = asyncio.create_task(others())
            step = {"reservation_id": "r", "state": router_pb2.PROGRESS_STATE_RUNNING}
            await self.outcomes(stage, *[step] * 20)
            ticker.cancel()
            assert len(seen) == len(set(seen)) == 20

    async def test_each_step_has_its_own_outcome_in_order(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            held = (await stage.router.Route(asked())).reservation_id
            progress = [
                router_pb2.Progress(
                    reservation_id="elsewhere-1", state=router_pb2.PROGRESS_STATE_FINISHED
                ),
                router_pb2.Progress(reservation_id=held),
                router_pb2.Progress(reservation_id=held, state=77),  # type: ignore[arg-type]
                router_pb2.Progress(
                    reservation_id=held,
                    state=router_pb2.PROGRESS_STATE_FAILED,
                    failure_reason=9,  # type: ignore[arg-type]
                ),
                router_pb2.Progress(
                    reservation_id=held,
                    state=router_pb2.PROGRESS_STATE_FAILED,
                    failure_reason=router_pb2.FAILURE_REASON_WORKER,
                ),
            ]
            answer = await stage.router.Report(router_pb2.ReportRequest(progress=progress))
            assert [(one.result, one.message) for one in answer.outcomes] == [
                (router_pb2.PROGRESS_RESULT_UNKNOWN, ""),
                (router_pb2.PROGRESS_RESULT_INVALID, "unknown state 0"),
                (router_pb2.PROGRESS_RESULT_INVALID, "unknown state 77"),
                (router_pb2.PROGRESS_RESULT_INVALID, "unknown failure_reason 9"),
                (router_pb2.PROGRESS_RESULT_APPLIED, ""),
            ]
            assert stage.fleet.core.endings == {"failed_worker": 1}

    async def test_ids_that_a_caller_counts_up_are_of_nobody(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            for _ in range(3):
                await stage.router.Route(asked())
            guesses = [f"{stage.fleet.core.replica}-{number}" for number in range(100)]
            answer = await stage.router.Report(
                router_pb2.ReportRequest(
                    progress=[
                        router_pb2.Progress(
                            reservation_id=one, state=router_pb2.PROGRESS_STATE_FINISHED
                        )
                        for one in guesses
                    ]
                )
            )
            unknown = router_pb2.PROGRESS_RESULT_UNKNOWN
            assert [one.result for one in answer.outcomes] == [unknown] * 100
            assert len(stage.fleet.core.reservations) == 3

    async def test_an_id_has_a_bound_in_characters(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            at_bound, over = (
                "a" * (request_codec.TEXT_MAX - 2) + "-1",
                "a" * (request_codec.TEXT_MAX - 1) + "-1",
            )
            answer = await stage.router.Report(
                router_pb2.ReportRequest(
                    progress=[
                        router_pb2.Progress(
                            reservation_id=one, state=router_pb2.PROGRESS_STATE_FINISHED
                        )
                        for one in (at_bound, over)
                    ]
                )
            )
            assert [(one.result, one.message) for one in answer.outcomes] == [
                (router_pb2.PROGRESS_RESULT_UNKNOWN, ""),
                (
                    router_pb2.PROGRESS_RESULT_INVALID,
                    "reservation_id is longer than 1024 characters",
                ),
            ]

    async def test_every_reason_of_failure_is_told_apart(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            for reason in router_pb2.FailureReason.values():
                held = (await stage.router.Route(asked())).reservation_id
                await self.outcomes(
                    stage,
                    {
                        "reservation_id": held,
                        "state": router_pb2.PROGRESS_STATE_FAILED,
                        "failure_reason": reason,
                    },
                )
            assert set(stage.fleet.core.endings) == {
                "failed_unknown",
                "failed_worker",
                "failed_timeout",
                "failed_client",
                "failed_cancelled",
            }

    async def test_cached_tokens_of_zero_are_a_report_and_absent_ones_are_none(self) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0")
            stage.fleet.cache(key, prompt(100), 64)
            state = router_pb2.PROGRESS_STATE_FINISHED
            for told in ({}, {"cached_tokens": 0}):
                held = (await stage.router.Route(asked(100))).reservation_id
                await self.outcomes(stage, {"reservation_id": held, "state": state, **told})
            known = stage.fleet.core.fleet.cache_reports[key]
            assert (known.predicted, known.reported) == (64, 0)

    async def test_a_refused_connection_ejects_its_worker_and_shows(self) -> None:
        async with served() as stage:
            stage.fleet.add("w0")
            stage.fleet.add("w1")
            pick = await stage.router.Route(asked(100))
            failed = {
                "reservation_id": pick.reservation_id,
                "state": router_pb2.PROGRESS_STATE_FAILED,
                "failure_reason": router_pb2.FAILURE_REASON_WORKER,
                "refused": True,
            }
            await self.outcomes(stage, failed)
            for worker in (await stage.workers.ListWorkers(fleet_pb2.ListWorkersRequest())).workers:
                is_out = worker.worker_id == pick.worker_id
                assert worker.schedulable != is_out
                assert worker.last_resort == worker.HasField("ejection") == is_out
                if is_out:
                    assert worker.unschedulable_reason == "ejected: connections refused"
                    assert (worker.ejection.reason, worker.ejection.times) == ("refused", 1)
                    assert worker.ejection.until.ToNanoseconds() == int((START_S + 1) * 1e9)
                    assert dict(worker.outcomes) == {"failed_refused": 1}
            (standing,) = stage.fleet.core.fleet.outliers._ejected.values()
            assert standing.accuser == "127.0.0.1"
            receipt = (await stage.router.Route(asked(100))).receipt
            assert dict(receipt.excluded) == {"ejected: connections refused": 1}

    async def test_what_a_replica_hands_on_counts_as_its_callers_word(self) -> None:
        async with served() as stage:
            key = stage.fleet.add("w0")
            held = (await stage.router.Route(asked(100))).reservation_id
            failed = router_pb2.Progress(
                reservation_id=held,
                state=router_pb2.PROGRESS_STATE_FAILED,
                failure_reason=router_pb2.FAILURE_REASON_WORKER,
                refused=True,
            )
            handed_on = router_pb2.ReportRequest(progress=[failed], caller="10.0.0.7")
            stage.reports.of_replica(handed_on.SerializeToString())
            standing = stage.fleet.core.fleet.outliers.standing(key)
            assert standing is not None
            assert standing.accuser == "10.0.0.7"

    async def test_too_many_steps_are_refused(self) -> None:
        async with served() as stage:
            progress = [router_pb2.Progress()] * (PROGRESS_MAX + 1)
            call = stage.router.Report(router_pb2.ReportRequest(progress=progress))
            assert (await refusal(call)).reason == "INVALID_FIELD"

    async def test_no_steps_have_no_outcomes(self) -> None:
        async with served() as stage:
            assert await self.outcomes(stage) == []
