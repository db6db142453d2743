"""Requests that wait at a router for a worker with room, over real gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from indexer.kernel import NativeIndex
from kvroute.client import KvRouteClient
from kvroute.v1 import router_pb2
from router.api.service import route_streams
from router.config.settings.queue_settings import (
    BandSettings,
    QueueSettings,
    TenantSettings,
    TenantsSettings,
)
from router.request.tokens import ModelPrompts, Source
from tests.stage.served import Served, asked, refusal, served
from tests.stage.waiting import until

QUEUE = QueueSettings()


@asynccontextmanager
async def full(queue: QueueSettings = QUEUE, **about: Any) -> AsyncIterator[tuple[Served, str]]:
    """A fleet of one worker with one slot, which a request has taken: its reservation's id."""
    async with served(queue=queue, **about) as stage:
        stage.fleet.add("w0", total_slots=1)
        answer = await stage.route()
        yield stage, answer.reservation_id


async def test_a_request_waits_until_a_worker_has_room() -> None:
    async with full() as (stage, first):
        call = await stage.queued()
        stage.fleet.now_s += 0.25
        await stage.report(first)
        answer = await call
        assert answer.worker_id == "w0"
        assert answer.queue_ms == 250
        assert answer.queue_ahead == 0
        assert stage.requests("picked") == 2
        assert stage.requests("refused", "ALL_WORKERS_FULL") == 0


async def test_requests_that_wait_have_their_turn_by_priority_then_arrival() -> None:
    async with full() as (stage, held):
        calls: dict[str, asyncio.Future[Any]] = {}
        for name, priority in (("low", 0), ("first", 5), ("second", 5)):
            calls[name] = await stage.queued(request_id=name, priority=priority)
        for name in ("first", "second", "low"):
            await stage.report(held)
            held = (await calls.pop(name)).reservation_id
            assert not any(call.done() for call in calls.values())


async def test_an_answer_says_how_many_were_ahead_when_its_request_came() -> None:
    async with full() as (stage, held):
        calls = [await stage.queued(priority=priority) for priority in (0, 0, 5)]
        ahead = []
        for call in (calls[2], calls[0], calls[1]):
            await stage.report(held)
            answer = await call
            ahead.append(answer.queue_ahead)
            held = answer.reservation_id
        assert ahead == [0, 0, 1]
        await stage.report(held)
        assert not (await stage.route()).HasField("queue_ahead")


async def test_a_newcomer_goes_behind_those_that_wait_though_a_worker_has_room() -> None:
    async with full() as (stage, held):
        picky = await stage.queued(request_id="picky", allowed_worker_ids=["w0"])
        stage.fleet.add("w1", total_slots=1)  # room, but not for the one that waits
        assert (await stage.route()).worker_id == "w1"
        assert not picky.done()
        await stage.report(held)
        assert (await picky).worker_id == "w0"


async def test_a_wait_that_is_over_ends_with_its_reason_and_a_time_to_come_back() -> None:
    async with full(QueueSettings(timeout_s=2.0)) as (stage, _):
        call = await stage.queued()
        stage.fleet.now_s += 2.0
        stage.desk.dispatch()
        told = await refusal(call)
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        assert told.retry_s is not None
        assert stage.requests("refused", "QUEUE_TIMEOUT") == 1
        assert stage.fleet.core.reservations.__len__() == 1


async def test_a_wait_that_can_not_end_in_time_is_refused_as_the_request_comes() -> None:
    async with full(QueueSettings(early_refusal="slo")) as (stage, held):
        calls = [await stage.queued() for _ in range(6)]
        for call in calls[:3]:  # one goes each second
            stage.fleet.now_s += 1.0
            await stage.report(held)
            held = (await call).reservation_id
        told = await refusal(stage.route(ttft_slo_ms=1000))
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WAIT_TOO_LONG")
        assert told.retry_s is not None
        assert told.retry_s > 1
        assert stage.requests("refused", "WAIT_TOO_LONG") == 1
        in_time = await stage.queued(ttft_slo_ms=9000)
        for call in (*calls, in_time):
            call.cancel()


async def test_a_request_that_may_not_wait_is_refused_at_once() -> None:
    async with full() as (stage, _):
        told = await refusal(stage.route(queue_timeout_ms=0))
        assert told.reason == "ALL_WORKERS_FULL"


async def test_without_a_queue_nothing_waits() -> None:
    async with full(QueueSettings(max_waiting=0)) as (stage, _):
        assert (await refusal(stage.route())).reason == "ALL_WORKERS_FULL"


async def test_a_caller_that_is_gone_leaves_the_queue_at_once() -> None:
    async with full() as (stage, held):
        call = stage.route()
        await stage.waits(1)
        call.cancel()
        await stage.waits(0)
        assert stage.requests("cancelled") == 1
        await stage.report(held)
        assert stage.fleet.core.reservations.__len__() == 0


async def test_the_same_request_twice_waits_twice_and_gets_one_answer() -> None:
    async with full() as (stage, held):
        calls = [await stage.queued(request_id="r") for _ in range(2)]
        await stage.report(held)
        first, second = await asyncio.gather(*calls)
        assert first == second
        assert stage.fleet.core.reservations.__len__() == 1


async def test_a_full_queue_refuses_a_newcomer() -> None:
    async with full(QueueSettings(max_waiting=1)) as (stage, _):
        call = await stage.queued()
        told = await refusal(stage.route())
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert told.retry_s is not None
        call.cancel()


async def test_a_newcomer_of_higher_priority_takes_a_place() -> None:
    async with full(QueueSettings(max_waiting=1)) as (stage, held):
        low = await stage.queued()
        high = asyncio.ensure_future(stage.route(priority=11))
        assert (await refusal(low)).reason == "QUEUE_FULL"
        await stage.report(held)
        assert (await high).worker_id == "w0"


async def test_a_router_that_stops_refuses_what_waits() -> None:
    async with full() as (stage, _):
        call = await stage.queued()
        stage.desk.close()
        told = await refusal(call)
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert (await refusal(stage.route())).reason == "ALL_WORKERS_FULL"


async def test_the_client_waits_too() -> None:
    async with full() as (stage, held), KvRouteClient(f"127.0.0.1:{stage.server.port}") as client:
        call = asyncio.ensure_future(client.route(token_ids=[1, 2, 3]))
        await stage.waits(1)
        await stage.report(held)
        assert (await call).worker_id == "w0"


async def test_items_of_a_stream_wait_and_others_go_ahead() -> None:
    async with full() as (stage, held):
        stream = await stage.stream(asked(), asked(), asked())
        assert not (await stream.read()).results  # at once, and empty
        await stage.waits(3)
        await stream.write(
            router_pb2.RouteBatch(items=[router_pb2.RouteItem(index=2, cancel=True)])
        )
        assert not (await stream.read()).results
        assert len(stage.desk.admission) == 2
        for index in (1, 3):
            await stage.report(held)
            (result,) = (await stream.read()).results
            assert result.index == index
            held = result.response.reservation_id
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_stream_says_where_items_stand_that_want_to_know() -> None:
    async with full() as (stage, held):
        stream = await stage.stream(asked(), asked(), asked(queue_progress=True))
        messages = [await stream.read(), await stream.read()]  # the batch's answer is empty
        told = [result for message in messages for result in message.results]
        assert [(one.index, one.waiting.ahead) for one in told] == [(3, 2)]
        assert not any(one.waiting.HasField("expected_ms") for one in told)
        stage.fleet.now_s += 2.0
        await stage.report(held)
        (result,) = (await stream.read()).results
        assert (result.index, result.response.queue_ms) == (1, 2000)
        stream.cancel()


async def test_where_items_stand_is_said_again_until_their_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route_streams, "TOLD_EACH_S", 0.001)
    async with full() as (stage, held):
        stream = await stage.stream(*[asked(queue_progress=True)] * 2)
        await stage.waits(2)
        stage.fleet.now_s += 2.0
        await stage.report(held)
        seen: dict[int, router_pb2.RouteResult] = {}
        while not {1, 2} <= seen.keys() or not seen[2].waiting.expected_ms:
            for result in (await stream.read()).results:
                if result.HasField("response") or result.index == 2:
                    seen[result.index] = result
        assert seen[2].waiting.ahead == 0
        assert seen[2].waiting.waited_ms == 2000
        await stage.report(seen[1].response.reservation_id)
        while not seen[2].HasField("response"):
            (seen[2],) = (await stream.read()).results
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_the_client_hears_where_its_request_stands() -> None:
    heard: list[router_pb2.QueueProgress] = []
    async with full() as (stage, held), KvRouteClient(f"127.0.0.1:{stage.server.port}") as client:
        for _ in range(2):  # calls of their own, until a stream is open
            await stage.report(held)
            held = (await client.route(token_ids=[1])).reservation_id
        await until(lambda: client.counts["streams"], "a stream is open")
        call = asyncio.ensure_future(client.route(token_ids=[1, 2, 3], on_queued=heard.append))
        await stage.waits(1)
        await stage.report(held)
        pick = await call
        assert pick.queue_ahead == 0
        assert [one.ahead for one in heard] == [0]


async def test_a_stream_that_ends_waits_for_its_items() -> None:
    async with full() as (stage, held):
        stream = await stage.stream(asked())
        await stream.done_writing()
        await stream.read()
        await stage.waits(1)
        await stage.report(held)
        (result,) = (await stream.read()).results
        assert result.index == 1
        assert await stream.read() is grpc.aio.EOF


async def test_a_stream_that_breaks_leaves_nothing_waiting() -> None:
    async with full() as (stage, _):
        stream = await stage.stream(asked())
        await stage.waits(1)
        stream.cancel()
        await stage.waits(0)


async def test_an_item_waits_no_longer_than_its_own_bound() -> None:
    async with full() as (stage, _):
        stream = stage.router.RouteStream()
        item = router_pb2.RouteItem(index=1, request=asked(), timeout_ms=500)
        await stream.write(router_pb2.RouteBatch(items=[item]))
        await stream.read()
        stage.fleet.now_s += 0.5
        stage.desk.dispatch()
        (result,) = (await stream.read()).results
        assert result.status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        stream.cancel()


async def test_learned_capacity_makes_requests_wait_and_refuses_none() -> None:
    async with served(queue=QueueSettings(timeout_s=1.0)) as stage:
        worker = stage.fleet.add("w0", total_slots=None, running=2, waiting=2, used_blocks=10)
        for _ in range(3):  # samples that agree: it runs two at once
            stage.fleet.now_s += 0.1
            stage.fleet.say(worker)
        call = await stage.queued()
        stage.fleet.now_s += 1.0
        stage.desk.dispatch()
        assert (await call).worker_id == "w0"


async def test_a_tenant_at_its_quota_waits_while_workers_have_room() -> None:
    tenants = TenantsSettings(named={"t": TenantSettings(in_flight_max=1)})
    async with served("w0", queue=QueueSettings(tenants=tenants)) as stage:
        held = (await stage.route(tenant="t")).reservation_id
        second = await stage.queued(tenant="t")
        assert (await stage.route(tenant="other")).worker_id == "w0"
        told = await refusal(stage.route(tenant="t", queue_timeout_ms=0))
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUOTA")
        await stage.report(held)
        held = (await second).reservation_id
        await stage.report(held)
        await stage.route(tenant="t")  # nothing is counted for longer than it runs


async def test_the_same_request_twice_counts_once_for_its_tenant() -> None:
    tenants = TenantsSettings(default=TenantSettings(in_flight_max=2))
    async with served("w0", queue=QueueSettings(tenants=tenants)) as stage:
        for _ in range(3):
            answer = await stage.route(request_id="r", tenant="t")
        await stage.report(answer.reservation_id)
        for number in range(2):
            await stage.route(request_id=f"r{number}", tenant="t")
        call = await stage.queued(tenant="t")
        call.cancel()


async def test_tokens_a_second_bound_a_tenant() -> None:
    tenants = TenantsSettings(default=TenantSettings(tokens_per_s=100.0))
    async with served("w0", queue=QueueSettings(tenants=tenants)) as stage:
        await stage.route(150)
        call = await stage.queued(1)
        stage.fleet.now_s += 0.6
        stage.desk.dispatch()
        await call


@pytest.mark.parametrize("by_body", [True, False])
async def test_an_estimated_prompt_is_charged_by_its_bytes_until_it_is_counted(
    by_body: bool,
) -> None:
    """The quota of a second is 2,000; the estimate that is routed, 50 tokens at most."""
    tenants = TenantsSettings(default=TenantSettings(tokens_per_s=2000.0))
    off = {"m": ModelPrompts(source=Source.OFF)}
    async with served(queue=QueueSettings(tenants=tenants), models_prompts=off) as stage:
        stage.fleet.add("w0", max_model_len=100)

        def sends(size: int) -> Any:
            about: dict[str, Any] = {"charged_tokens": size}
            if by_body:
                text = "x" * (4 * size)
                messages = [{"role": "user", "content": text}]
                about = {"chat_completion_body": json.dumps({"messages": messages}).encode()}
            return stage.route(1, model="m", queue_timeout_ms=0, **about)

        async def is_held() -> bool:
            try:
                answer = await sends(1)
            except grpc.aio.AioRpcError:
                return True
            await stage.report(answer.reservation_id)
            return False

        first = (await sends(9000)).reservation_id
        assert await is_held()
        for _ in range(2):
            await stage.report(first, prompt_tokens=5000)
            assert await is_held(), "3,000 past a second's"
        stage.fleet.now_s += 1.6
        assert not await is_held()
        for _ in range(3):
            stage.fleet.now_s += 1.0
            await is_held()
        assert len(stage.desk.admission._charged) <= 1, "nothing is kept of those that ended"


async def test_room_is_kept_for_the_high_band() -> None:
    bands = (
        BandSettings(name="low", from_priority=0, share_percent=50),
        BandSettings(name="high", from_priority=10),
    )
    async with served(queue=QueueSettings(bands=bands, bands_aging=0)) as stage:
        stage.fleet.add("w0", total_slots=4)
        held = [(await stage.route()).reservation_id for _ in range(2)]
        low = await stage.queued()
        told = await refusal(stage.route(queue_timeout_ms=0))
        assert told.reason == "ALL_WORKERS_FULL"
        for _ in range(2):
            await stage.route(priority=10)
        assert not low.done()
        await stage.report(held[0])
        assert not low.done()
        await stage.report(held[1])
        assert not low.done()  # two of the high band run: half of the slots
        call = asyncio.ensure_future(stage.route(priority=10))
        assert (await call).worker_id == "w0"
        low.cancel()


@pytest.mark.parametrize("native", [True, False])
async def test_a_request_waits_until_its_blocks_fit(native: bool) -> None:
    index = {"index": NativeIndex()} if native else {}
    async with served(queue=QueueSettings(), **index) as stage:
        stage.fleet.add("w0", total_blocks=100)  # of 16 tokens
        held = (await stage.route(800, expected_output_tokens=0)).reservation_id
        fits = asked(800, first=5_000, expected_output_tokens=0)  # exactly
        second = (await stage.router.Route(fits)).reservation_id
        await stage.report(second)
        call = await stage.queued(800, first=9_000, expected_output_tokens=1)
        shares = asked(808, expected_output_tokens=1)  # its start is in use there
        shared = (await stage.router.Route(shares)).reservation_id
        await stage.report(held)
        assert not call.done()  # the other request still uses these blocks
        await stage.report(shared)
        assert (await call).worker_id == "w0"


async def test_an_idle_worker_takes_what_fits_nowhere_else() -> None:
    async with served(queue=QueueSettings()) as stage:
        stage.fleet.add("w0", total_blocks=10)
        assert (await stage.route(800)).worker_id == "w0"


async def test_blocks_are_not_looked_at_ahead_where_nothing_waits() -> None:
    async with served(queue=QueueSettings(max_waiting=0)) as stage:
        stage.fleet.add("w0", total_blocks=100)
        for first in (0, 5_000):
            await stage.route(1000, first=first)


@pytest.mark.parametrize("stream", [False, True])
async def test_other_models_are_answered_at_once_while_requests_wait(stream: bool) -> None:
    async with served(queue=QueueSettings(), index=NativeIndex()) as stage:
        stage.fleet.add("w0", model="a", model_aliases=("alias",), total_slots=1)
        stage.fleet.add("w1", model="b")
        held = (await stage.route(model="a")).reservation_id
        first = await stage.queued(model="a")
        before = stage.metrics.tally.picks[0]
        if stream:
            call = await stage.stream(*[asked(model="b")] * 3)
            answered = 0
            while answered < 3:
                answered += len((await call.read()).results)
            call.cancel()
        else:
            await stage.route(model="b")
        assert stage.metrics.tally.picks[0] == before + (3 if stream else 1)
        await stage.report(held)
        assert (await first).worker_id == "w0"
