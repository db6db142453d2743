"""WatchDecisions over real gRPC: who sees which decisions, and the bounds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from indexer.kernel import NativeIndex
from kvroute.client import KvRouteClient
from kvroute.v1 import WatchDecisionsRequest, WatchDecisionsResponse, WatchedDecision
from router.api.service import decision_feed
from router.api.service.grpc_bounds import GrpcBounds
from tests.router.api.service.test_waiting import full
from tests.stage.served import Served, refusal, served
from tests.stage.waiting import until


class Watch:
    """One call of WatchDecisions, and what it has heard."""

    def __init__(self) -> None:
        self.decisions: list[WatchedDecision] = []
        self.left_out = 0
        self.limited = False

    def ids(self) -> list[str]:
        return [decision.request_id for decision in self.decisions]

    async def follow(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            self._take(response)

    def _take(self, response: WatchDecisionsResponse) -> None:
        self.decisions += response.decisions
        self.left_out += response.left_out
        self.limited |= response.limited


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_feed, "EVERY_S", 0.01)


@asynccontextmanager
async def watching(stage: Served, **wanted: Any) -> AsyncIterator[Watch]:
    watch = Watch()
    call = stage.call("WatchDecisions", **wanted)
    await call.read()  # the router looks from here on
    task = asyncio.create_task(watch.follow(call))
    try:
        yield watch
    finally:
        task.cancel()
        call.cancel()


async def test_a_watcher_sees_picks_with_their_receipts_and_refusals() -> None:
    async with served(index=NativeIndex()) as stage:
        async with watching(stage) as watch:
            await refusal(stage.route(request_id="early", model="m"))
            stage.fleet.add("w0")
            answer = await stage.route(request_id="a", tenant="t", model="m")
            await until(lambda: len(watch.decisions) == 2, "both came")
        early, pick = watch.decisions
        assert (early.request_id, early.refusal, early.model) == ("early", "NO_WORKER", "m")
        assert early.message
        assert (pick.request_id, pick.tenant, pick.prompt_tokens) == ("a", "t", 100)
        assert pick.receipt == answer.receipt
        assert pick.reservation_id == answer.reservation_id
        assert pick.predicted_ttft_s > 0
        await until(lambda: not stage.watchers.watch, "no decision is looked at again")


async def test_each_watcher_has_what_it_asked_for(stage: Served) -> None:
    async with (
        watching(stage, tenant="t") as of_tenant,
        watching(stage, worker_id="w1") as of_worker,
        watching(stage, reasons=["UNKNOWN_POLICY"]) as refused,
        watching(stage, slower_than_s=1e6) as slow,
        watching(stage, model="other") as of_model,
    ):
        await stage.route(request_id="a", tenant="t")
        stage.fleet.add("w1")
        await stage.route(request_id="b", allowed_worker_ids=["w1"])
        await refusal(stage.route(request_id="c", policy="none"))
        await refusal(stage.route(request_id="d", allowed_worker_ids=["w9"]))
        each = of_tenant, of_worker, refused
        await until(lambda: all(watch.decisions for watch in each), "each has its own")
    assert of_tenant.ids() == ["a"]
    assert of_worker.ids() == ["b"]
    assert refused.ids() == ["c"]
    assert slow.ids() == of_model.ids() == []


async def test_the_time_in_the_queue_counts_as_slow() -> None:
    async with (
        full() as (stage, first),
        watching(stage) as watch,
        watching(stage, slower_than_s=30) as slow,
    ):
        calls = [
            await stage.queued(request_id=name, queue_timeout_ms=60_000)
            for name in ("waits", "gives up")
        ]
        stage.fleet.now_s += 30.5
        await stage.report(first)
        picked = await calls[0]
        stage.fleet.now_s += 29.5
        stage.desk.dispatch()
        refused = await refusal(calls[1])
        await until(lambda: len(watch.decisions) == len(slow.decisions) == 2, "both came")
    assert picked.queue_ms == 30_500
    assert refused.reason == "QUEUE_TIMEOUT"
    pick, gave_up = slow.decisions
    assert (pick.request_id, pick.waited_s) == ("waits", 30.5)
    assert (gave_up.refusal, gave_up.waited_s) == ("QUEUE_TIMEOUT", 60.0)
    assert watch.decisions == slow.decisions


async def test_a_wait_that_was_short_is_not_slow() -> None:
    async with (
        full() as (stage, first),
        watching(stage) as watch,
        watching(stage, slower_than_s=30) as slow,
    ):
        call = await stage.queued(request_id="waits")
        stage.fleet.now_s += 0.25
        await stage.report(first)
        await call
        await until(lambda: watch.decisions, "the pick came")
    assert watch.decisions[0].waited_s == 0.25
    assert slow.ids() == []


async def test_more_than_so_many_a_second_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision_feed, "LOOKED_A_SECOND", 3)
    async with served("w0") as stage:
        async with watching(stage) as watch:
            for number in range(4):
                await stage.route(request_id=str(number))
            await until(lambda: watch.limited, "the watcher is told")
            await until(lambda: stage.watchers.watch, "the next second begins")
            await stage.route(request_id="next")
            await until(lambda: "next" in watch.ids(), "and its first decision comes")
        assert watch.ids()[:3] == ["0", "1", "2"]
        assert "3" not in watch.ids()


async def test_what_is_over_the_bound_of_a_watcher_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision_feed, "WAITING_MAX", 2)
    monkeypatch.setattr(decision_feed, "EVERY_S", 0.5)
    async with served("w0") as stage:
        async with watching(stage) as watch:
            for number in range(5):
                await stage.route(request_id=str(number))
            await until(lambda: len(watch.decisions) + watch.left_out == 5, "all are accounted for")
        assert watch.left_out >= 1


async def test_a_share_of_the_decisions_is_drawn(stage: Served) -> None:
    async with watching(stage, share=0.5) as half, watching(stage) as whole:
        for number in range(40):
            await stage.route(request_id=str(number))
        await until(lambda: len(whole.decisions) == 40, "all came")
    assert 0 < len(half.decisions) < 40


async def test_watchers_are_bounded_and_a_share_is_checked() -> None:
    async with served(watches_max=1) as stage, watching(stage):
        refused = await refusal(stage.call("WatchDecisions").read())
        assert refused.reason == "TOO_MANY_WATCHES"
        wrong = WatchDecisionsRequest(share=1.5)
        refused = await refusal(stage.workers.WatchDecisions(wrong).read())
        assert refused.reason == "INVALID_FIELD"


async def test_the_client_goes_on_after_the_end_of_a_stream() -> None:
    async with served("w0", bounds=GrpcBounds(age_grace_s=0.1)) as stage:
        async with KvRouteClient(f"127.0.0.1:{stage.server.port}") as client:
            seen: list[str] = []

            async def follow() -> None:
                async for response in client.watch_decisions():
                    seen.extend(decision.request_id for decision in response.decisions)

            task = asyncio.create_task(follow())
            for number in range(3):
                await until(lambda: stage.watchers.watch, "the router looks")
                await stage.route(request_id=str(number))
                await until(lambda n=number: str(n) in seen, "the decision came")
                await until(lambda: not stage.watchers.watch, "the stream came to its age")
            task.cancel()
        assert seen == ["0", "1", "2"]
