"""Report over a real socket: progress of reservations, and what it changes."""

import asyncio
from typing import Any

import pytest

from kvroute.v1 import router_pb2
from router.api.desk import reports, request_codec
from router.api.desk.reports import PROGRESS_MAX
from tests.stage.fleet import START_S, prompt
from tests.stage.served import Served, refusal, served

APPLIED, UNCHANGED = router_pb2.PROGRESS_RESULT_APPLIED, router_pb2.PROGRESS_RESULT_UNCHANGED
UNKNOWN, INVALID = router_pb2.PROGRESS_RESULT_UNKNOWN, router_pb2.PROGRESS_RESULT_INVALID


def step(reservation_id: str, state: str, **told: Any) -> router_pb2.Progress:
    number = router_pb2.ProgressState.Value(f"PROGRESS_STATE_{state}")
    return router_pb2.Progress(reservation_id=reservation_id, state=number, **told)


class TestReport:
    async def outcomes(self, stage: Served, *steps: router_pb2.Progress) -> list[tuple[int, str]]:
        """The result of each step, and its message."""
        answer = await stage.router.Report(router_pb2.ReportRequest(progress=steps))
        ids = [one.reservation_id for one in answer.outcomes]
        assert ids == [one.reservation_id[: request_codec.TEXT_MAX] for one in steps]
        return [(one.result, one.message) for one in answer.outcomes]

    async def test_a_life_from_pick_to_end(self, empty: Served) -> None:
        key = empty.fleet.add("w0")
        pick = await empty.route(100)
        held = pick.reservation_id
        assert empty.fleet.loads() == {key: (1, 7, 100)}
        computed = step(held, "PREFILL_DONE")
        results = await self.outcomes(empty, step(held, "RUNNING"), computed, computed)
        assert results == [(APPLIED, ""), (APPLIED, ""), (UNCHANGED, "")]
        assert empty.fleet.loads() == {key: (1, 7, 0)}
        end = step(held, "FINISHED", output_tokens=5, cached_tokens=64)
        assert await self.outcomes(empty, end, end) == [(APPLIED, ""), (UNCHANGED, "")]
        assert empty.fleet.loads() == {}
        assert empty.metric("cached_tokens_total", kind="reported") == 64

    async def test_a_long_report_lets_others_have_a_turn(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reports, "SLICE_S", 0.0)
        async with served("w0") as stage:
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
            await self.outcomes(stage, *[step("r", "RUNNING")] * 20)
            ticker.cancel()
            assert len(seen) == len(set(seen)) == 20

    async def test_each_step_has_its_own_outcome_in_order(self, stage: Served) -> None:
        held = (await stage.route()).reservation_id
        told = await self.outcomes(
            stage,
            step("elsewhere-1", "FINISHED"),
            router_pb2.Progress(reservation_id=held),
            router_pb2.Progress(reservation_id=held, state=77),  # type: ignore[arg-type]
            step(held, "FAILED", failure_reason=9),
            step(held, "FAILED", failure_reason=router_pb2.FAILURE_REASON_WORKER),
        )
        states = "expected PREFILL_DONE, RUNNING, FINISHED or FAILED"
        assert told == [
            (UNKNOWN, ""),
            (INVALID, f"unknown state 0: {states}"),
            (INVALID, f"unknown state 77: {states}"),
            (INVALID, "unknown failure_reason 9: expected a kvroute.v1.FailureReason"),
            (APPLIED, ""),
        ]
        assert stage.fleet.core.endings == {"failed_worker": 1}

    async def test_ids_that_a_caller_counts_up_are_of_nobody(self, stage: Served) -> None:
        for _ in range(3):
            await stage.route()
        replica = stage.fleet.core.replica
        guesses = [step(f"{replica}-{number}", "FINISHED") for number in range(100)]
        assert await self.outcomes(stage, *guesses) == [(UNKNOWN, "")] * 100
        assert len(stage.fleet.core.reservations) == 3

    async def test_an_id_has_a_bound_in_characters(self, stage: Served) -> None:
        ids = ("a" * (request_codec.TEXT_MAX - 2) + "-1", "a" * (request_codec.TEXT_MAX - 1) + "-1")
        assert await self.outcomes(stage, *(step(one, "FINISHED") for one in ids)) == [
            (UNKNOWN, ""),
            (INVALID, "reservation_id is longer than 1024 characters"),
        ]

    async def test_every_reason_of_failure_is_told_apart(self, stage: Served) -> None:
        for reason in router_pb2.FailureReason.values():
            held = (await stage.route()).reservation_id
            await self.outcomes(stage, step(held, "FAILED", failure_reason=reason))
        assert set(stage.fleet.core.endings) == {
            "failed_unknown",
            "failed_worker",
            "failed_timeout",
            "failed_client",
            "failed_cancelled",
        }

    async def test_cached_tokens_of_zero_are_a_report_and_absent_ones_are_none(
        self, empty: Served
    ) -> None:
        key = empty.fleet.add("w0")
        empty.fleet.cache(key, prompt(100), 64)
        for told in ({}, {"cached_tokens": 0}):
            held = (await empty.route(100)).reservation_id
            await self.outcomes(empty, step(held, "FINISHED", **told))
        known = empty.fleet.core.fleet.cache_reports[key]
        assert (known.predicted, known.reported) == (64, 0)

    async def test_a_refused_connection_ejects_its_worker_and_shows(self) -> None:
        async with served("w0", "w1") as stage:
            pick = await stage.route(100)
            reason = router_pb2.FAILURE_REASON_WORKER
            failed = step(pick.reservation_id, "FAILED", failure_reason=reason, refused=True)
            await self.outcomes(stage, failed)
            for worker in (await stage.call("ListWorkers")).workers:
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
            receipt = (await stage.route(100)).receipt
            assert dict(receipt.excluded) == {"ejected: connections refused": 1}

    async def test_what_a_replica_hands_on_counts_as_its_callers_word(self, empty: Served) -> None:
        key = empty.fleet.add("w0")
        held = (await empty.route(100)).reservation_id
        reason = router_pb2.FAILURE_REASON_WORKER
        failed = step(held, "FAILED", failure_reason=reason, refused=True)
        handed_on = router_pb2.ReportRequest(progress=[failed], caller="10.0.0.7")
        empty.reports.of_replica(handed_on.SerializeToString())
        standing = empty.fleet.core.fleet.outliers.standing(key)
        assert standing is not None
        assert standing.accuser == "10.0.0.7"

    async def test_too_many_steps_are_refused(self, empty: Served) -> None:
        progress = [router_pb2.Progress()] * (PROGRESS_MAX + 1)
        call = empty.router.Report(router_pb2.ReportRequest(progress=progress))
        assert (await refusal(call)).reason == "INVALID_FIELD"

    async def test_no_steps_have_no_outcomes(self, empty: Served) -> None:
        assert await self.outcomes(empty) == []
