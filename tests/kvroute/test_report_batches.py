"""Reports as few calls: what goes with what, and whose error is whose."""

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest

from kvroute.client import (
    ClientClosed,
    ClientOverloaded,
    DeadlineExceeded,
    KvRouteClient,
    KvRouteError,
    RouterUnreachable,
)
from kvroute.client.connections import report_batches as report_batches_module
from kvroute.client.connections.report_batches import (
    BYTES_A_CALL_MAX,
    HOLD_S,
    STEPS_A_CALL_MAX,
    STEPS_MAX,
    ReportBatches,
    hold_s,
    report_pieces,
)
from kvroute.v1 import Progress, ProgressOutcome, ReportRequest, ReportResponse
from tests.kvroute.scripted_router import GUARD_S, Clock, Server, status
from tests.stage.garbage import freed_at_once


class Wire:
    """A router that answers a call when the test does."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[tuple[list[str], float, asyncio.Future[Any]]] = asyncio.Queue()
        self.counts: Counter[str] = Counter()
        self.batches = ReportBatches(self.send, self.counts)

    async def send(self, request: ReportRequest, timeout_s: float) -> ReportResponse:
        answer = asyncio.get_running_loop().create_future()
        names = [one.reservation_id for one in request.progress]
        self.calls.put_nowait((names, timeout_s, answer))
        response = await answer
        if response is None:
            outcomes = [ProgressOutcome(reservation_id=name) for name in names]
            response = ReportResponse(outcomes=outcomes)
        return response  # type: ignore[no-any-return]

    def report(self, *names: str, timeout_s: float = GUARD_S) -> asyncio.Task[list[Any]]:
        steps = [Progress(reservation_id=name) for name in names]
        return asyncio.create_task(self.batches.report(steps, timeout_s))

    async def next(self) -> tuple[list[str], asyncio.Future[Any]]:
        async with asyncio.timeout(GUARD_S):
            names, _, answer = await self.calls.get()
            return names, answer


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setattr(report_batches_module, "HOLD_S", 1000.0)
    return Wire()


def told(outcomes: list[ProgressOutcome]) -> list[str]:
    return [one.reservation_id for one in outcomes]


async def test_a_report_goes_at_once_and_those_that_come_meanwhile_together(wire: Wire) -> None:
    first = wire.report("a")
    names, answer = await wire.next()
    assert names == ["a"]
    later = [wire.report("b"), wire.report("c", "d"), wire.report("e")]
    await asyncio.sleep(0)
    assert wire.calls.empty()
    answer.set_result(None)
    names, answer = await wire.next()
    assert names == ["b", "c", "d", "e"]
    answer.set_result(None)
    assert told(await first) == ["a"]
    assert [told(await one) for one in later] == [["b"], ["c", "d"], ["e"]]
    assert wire.counts == {"report_calls": 2, "reports": 4}


async def test_a_call_that_hangs_holds_the_next_one_back_for_a_moment(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_batches_module, "HOLD_S", 0.01)
    hanging = wire.report("a")
    _, never = await wire.next()
    second = wire.report("b")
    _, answer = await wire.next()
    answer.set_result(None)
    await second
    assert not hanging.done()
    never.set_result(None)
    await hanging


def test_each_unanswered_call_doubles_the_time_that_the_next_one_is_held_back() -> None:
    holds = [hold_s(unanswered) for unanswered in range(1, 6)]
    assert holds == [HOLD_S * 2**i for i in range(5)]
    assert sum(holds) > 5.0, "the default deadline of a report: 5 calls are open at most"
    assert hold_s(10_000) > 1000.0


async def test_a_call_holds_back_the_next_one_by_how_many_are_unanswered(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def none(unanswered: int) -> float:
        seen.append(unanswered)
        return 0.0

    monkeypatch.setattr(report_batches_module, "hold_s", none)
    reports, answers = [], []
    for name in ("a", "b", "c"):
        reports.append(wire.report(name))
        answers.append((await wire.next())[1])
    answers.pop().set_result(None)
    await reports.pop()
    reports.append(wire.report("d"))
    answers.append((await wire.next())[1])
    for answer in answers:
        answer.set_result(None)
    await asyncio.gather(*reports)
    assert seen == [1, 2, 3, 3]


async def test_an_error_is_that_of_everybody_in_the_call_and_nobody_else(wire: Wire) -> None:
    first = wire.report("a")
    _, answer = await wire.next()
    both = [wire.report("b"), wire.report("c")]
    answer.set_result(None)
    _, answer = await wire.next()
    metadata = grpc.aio.Metadata()
    answer.set_exception(
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "gone")
    )
    assert told(await first) == ["a"]
    for one in both:
        with pytest.raises(RouterUnreachable, match="gone"):
            await one
    last = wire.report("d")
    (await wire.next())[1].set_result(None)
    await last


async def test_a_report_that_failed_is_freed_at_once(wire: Wire) -> None:
    async with freed_at_once(KvRouteError):
        for _ in range(3):
            report = wire.report("a")
            (await wire.next())[1].set_result("no response")
            await asyncio.wait({report})
            assert isinstance(report.exception(), KvRouteError)
        del report


async def test_each_report_has_its_own_deadline_and_the_call_the_longest(wire: Wire) -> None:
    first = wire.report("a")
    names, _, answer = await wire.calls.get()
    short, long = wire.report("b", timeout_s=0.01), wire.report("c", timeout_s=15.0)
    with pytest.raises(DeadlineExceeded, match=r"no outcome in 0\.01 s"):
        await short
    answer.set_result(None)
    await first
    names, timeout_s, answer = await wire.calls.get()
    assert names == ["b", "c"]
    assert 10.0 < timeout_s <= 15.0
    answer.set_result(None)
    assert told(await long) == ["c"]


async def test_a_caller_that_leaves_has_told_it_all_the_same(wire: Wire) -> None:
    first = wire.report("a")
    _, answer = await wire.next()
    leaving = wire.report("b")
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    answer.set_result(None)
    await first
    names, answer = await wire.next()
    assert names == ["b"]
    answer.set_result(None)


async def test_a_call_is_bounded_but_for_one_report_alone(wire: Wire) -> None:
    reports = [wire.report("a")]
    _, answer = await wire.next()
    half = ["h"] * (STEPS_A_CALL_MAX // 2)
    reports += [wire.report(*half), wire.report(*half), wire.report("b"), wire.report(*half * 5)]
    sizes = []
    for _ in range(3):
        answer.set_result(None)
        names, answer = await wire.next()
        sizes.append(len(names))
    answer.set_result(None)
    await asyncio.gather(*reports)
    assert sizes == [STEPS_A_CALL_MAX, 1, STEPS_A_CALL_MAX // 2 * 5]


async def test_steps_that_wait_are_bounded(wire: Wire) -> None:
    first = wire.report("a")
    _, answer = await wire.next()
    many = wire.report(*["m"] * STEPS_MAX)
    await asyncio.sleep(0)
    with pytest.raises(ClientOverloaded, match=f"{STEPS_MAX} is the most"):
        await wire.report("b")
    assert wire.counts["report_overflows"] == 1
    answer.set_result(None)
    await first
    (await wire.next())[1].set_result(None)
    await many
    assert repr(wire.batches) == "<ReportBatches 0 steps waiting, 0 calls>"


async def test_closing_ends_who_waits_and_leaves_no_task(wire: Wire) -> None:
    reports = [wire.report("a")]
    await wire.next()
    reports.append(wire.report("b"))
    await asyncio.sleep(0)
    await wire.batches.close()
    for one in (*reports, wire.report("c")):
        with pytest.raises(ClientClosed):
            await one
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_many_requests_report_in_few_calls(server: Server) -> None:
    clock = Clock()
    async with KvRouteClient(server.address, clock=clock, sleep=clock.sleep) as client:
        steps = [Progress(reservation_id=f"r{i}", state=3) for i in range(100)]  # type: ignore[arg-type]
        outcomes = await asyncio.gather(*map(client.report, steps))
        assert [told(one) for one in outcomes] == [[f"r{i}"] for i in range(100)]
        assert client.counts["reports"] == 100
        assert client.counts["report_calls"] <= 3


async def test_reports_that_share_a_call_are_retried_each_by_itself(server: Server) -> None:
    server.router.report_refusals.append(status(grpc.StatusCode.UNAVAILABLE))
    clock = Clock()
    async with KvRouteClient(server.address, clock=clock, sleep=clock.sleep) as client:
        steps = [Progress(reservation_id=f"r{i}", state=3) for i in range(5)]  # type: ignore[arg-type]
        outcomes = await asyncio.gather(*map(client.report, steps))
        assert [told(one) for one in outcomes] == [[f"r{i}"] for i in range(5)]


async def test_without_batching_each_report_is_a_call(server: Server) -> None:
    async with KvRouteClient(server.address, batching=False) as client:
        await asyncio.gather(*(client.report(Progress(reservation_id=str(i))) for i in range(5)))
        assert "report_calls" not in client.counts
    assert server.router.told.qsize() == 5


# Calls that routers take


def test_steps_are_split_by_number_and_by_bytes() -> None:
    many = [Progress(reservation_id=str(i)) for i in range(2 * STEPS_A_CALL_MAX + 1)]
    pieces = list(report_pieces(many))
    assert [len(piece) for piece in pieces] == [STEPS_A_CALL_MAX, STEPS_A_CALL_MAX, 1]
    assert [one for piece in pieces for one in piece] == many
    long = [Progress(reservation_id="r" * (BYTES_A_CALL_MAX // 4 - 100)) for _ in range(9)]
    assert [len(piece) for piece in report_pieces(long)] == [4, 4, 1]
    assert list(report_pieces([])) == [[]]
    large = [Progress(reservation_id="r" * size) for size in (1, 2 * BYTES_A_CALL_MAX, 1)]
    assert [len(piece) for piece in report_pieces(large)] == [1, 1, 1]


async def test_reports_of_several_callers_share_a_call_up_to_its_bytes(wire: Wire) -> None:
    first = wire.report("a")
    _, answer = await wire.next()
    names = [f"{i}" * (BYTES_A_CALL_MAX // 2 - 100) for i in range(3)]
    later = [wire.report(name) for name in names]
    await asyncio.sleep(0)
    answer.set_result(None)
    for those in (names[:2], names[2:]):
        told_of, answer = await wire.next()
        assert told_of == those
        answer.set_result(None)
    await asyncio.gather(first, *later)


@pytest.mark.parametrize("batching", [True, False])
async def test_a_report_of_many_steps_is_several_calls_with_one_outcome_each(
    batching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    await server.start("127.0.0.1:0")
    sizes: list[int] = []
    report = server.router.Report

    async def noted(request: ReportRequest, context: Any) -> ReportResponse:
        sizes.append(len(request.progress))
        return await report(request, context)

    monkeypatch.setattr(server.router, "Report", noted)
    await server.stop()
    await server.start()
    async with KvRouteClient(server.address, batching=batching, timeout_s=GUARD_S) as client:
        names = [f"r-{i}" for i in range(3 * STEPS_A_CALL_MAX + 5)]
        outcomes = await client.report(*(Progress(reservation_id=name) for name in names))
    await server.stop()
    assert told(outcomes) == names
    assert sizes == [STEPS_A_CALL_MAX] * 3 + [5]
