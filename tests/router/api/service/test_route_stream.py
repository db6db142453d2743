"""RouteStream over a real socket: batches, cancellations, ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from indexer.hashing import pack_tokens
from indexer.kernel import NativeIndex
from kvroute.v1 import router_pb2
from router.api.service.grpc_bounds import GrpcBounds
from router.config.settings.routing_settings import HotPrefixSettings
from router.decide.core.progress import Pick
from router.fleet.reservations.reservations import Ending, Reservation
from router.request.request import Request
from router.request.wire.batches import ITEMS_MAX
from tests.router.api.service.setting import Code, batch, tasks
from tests.stage.served import Served, asked, refusal, served, taken_apart


class TestRouteStream:
    async def test_results_come_by_index_good_and_bad_mixed(self, stage: Served) -> None:
        items = [
            router_pb2.RouteItem(index=900 + i, request=asked(0 if i % 3 == 0 else 40))
            for i in range(50)
        ]
        results = {one.index: one for one in await batch(stage, *items)}
        assert set(results) == {900 + i for i in range(50)}
        for i in range(50):
            which = results[900 + i].WhichOneof("result")
            assert which == ("status" if i % 3 == 0 else "response")
        assert len(stage.fleet.core.reservations) == 33

    async def test_batches_follow_one_another_on_one_call(self, stage: Served) -> None:
        call = stage.router.RouteStream()
        for i in range(5):
            item = router_pb2.RouteItem(index=i, request=asked())
            await call.write(router_pb2.RouteBatch(items=[item]))
            answer = await call.read()
            assert [one.index for one in answer.results] == [i]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    async def test_an_item_without_a_request_is_told_so(self, stage: Served) -> None:
        empty, good = await batch(
            stage,
            router_pb2.RouteItem(index=1),
            router_pb2.RouteItem(index=2, cancel=True),
            router_pb2.RouteItem(index=3, request=asked()),
        )
        assert (empty.index, taken_apart(empty.status).reason) == (1, "INVALID_FIELD")
        assert (good.index, good.response.worker_id) == (3, "w0")

    async def test_a_batch_too_big_ends_the_call_and_reserves_nothing(self, stage: Served) -> None:
        call = stage.router.RouteStream()
        items = [router_pb2.RouteItem(index=i) for i in range(ITEMS_MAX + 1)]
        items[0].request.CopyFrom(asked())
        await call.write(router_pb2.RouteBatch(items=items))
        refused = await refusal(call.read())
        assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert f"at most {ITEMS_MAX} are taken" in refused.message
        assert stage.fleet.loads() == {}

    async def test_a_fault_of_ours_ends_one_item(
        self, monkeypatch: pytest.MonkeyPatch, stage: Served
    ) -> None:
        write = stage.desk._writer.answer

        def breaks(pick: Pick, *about: Any) -> bytes:
            if pick.reservation.request_id == "bad":
                raise ValueError("broken")
            return write(pick, *about)

        monkeypatch.setattr(stage.desk, "_writer", SimpleNamespace(answer=breaks))
        bad, good = await batch(
            stage,
            router_pb2.RouteItem(index=1, request=asked(request_id="bad")),
            router_pb2.RouteItem(index=2, request=asked(request_id="good")),
        )
        assert taken_apart(bad.status).code is Code.INTERNAL
        assert good.response.worker_id == "w0"
        assert len(stage.fleet.core.reservations) == 1

    async def test_items_with_one_index_are_each_counted_with_their_own_prompt(self) -> None:
        counted: list[tuple[int, bytes | None]] = []

        def on_pick(one: Reservation, request: Request, now_s: float) -> None:
            counted.append((one.prompt_tokens, request.prompt.leading_tokens(16)))

        copied = HotPrefixSettings(enabled=True)
        async with served("w0", index=NativeIndex(), hot_prefixes=copied) as stage:
            stage.fleet.hot.on_pick = on_pick  # type: ignore[method-assign]
            requests = [asked(32, first=1000), asked(48, first=2000), asked(64, first=3000)]
            items = [router_pb2.RouteItem(index=7, request=one) for one in requests]
            results = await batch(stage, *items)
            assert [one.index for one in results] == [7, 7, 7]
        assert counted == [
            (32, pack_tokens(range(1000, 1016))),
            (48, pack_tokens(range(2000, 2016))),
            (64, pack_tokens(range(3000, 3016))),
        ]

    async def test_it_ends_when_the_server_drains(self, stage: Served) -> None:
        call = await stage.stream(asked())
        await call.read()
        stage.stopping.set()
        async with asyncio.timeout(60):
            assert await call.read() is grpc.aio.EOF
            await stage.server.drain(60)

    async def test_calls_under_way_when_the_server_drains_are_answered_or_unavailable(self) -> None:
        answered, ends = 0, list[Code]()
        flows = asyncio.Event()

        async def call_until_refused(stage: Served) -> None:
            nonlocal answered
            while not ends:
                try:
                    await stage.router.Explain(asked())
                except grpc.aio.AioRpcError as error:
                    ends.append(error.code())
                answered += 1
                if answered == 100:
                    flows.set()

        async with served("w0") as stage, asyncio.timeout(60):
            callers = [asyncio.create_task(call_until_refused(stage)) for _ in range(16)]
            await flows.wait()
            await stage.server.drain(10)
            await asyncio.gather(*callers)
        assert set(ends) == {Code.UNAVAILABLE}

    async def test_a_client_that_leaves_leaves_no_task_behind(self, stage: Served) -> None:
        before = tasks()
        call = await stage.stream(asked())
        await call.read()
        assert tasks() - before
        call.cancel()
        async with asyncio.timeout(60):
            while left := tasks() - before:
                await asyncio.wait(left, timeout=0.01)

    async def test_a_client_learns_at_once_that_streams_get_through(self) -> None:
        async with served() as stage, asyncio.timeout(60):
            call = stage.router.RouteStream()
            await call.initial_metadata()
            assert not call.done()
            call.cancel()

    async def test_a_cancel_after_the_answer_leaves_nothing_reserved(self) -> None:
        async with served("w0") as stage, asyncio.timeout(60):
            call = stage.router.RouteStream()
            items = [router_pb2.RouteItem(index=i, request=asked(first=i)) for i in range(2)]
            await call.write(router_pb2.RouteBatch(items=items))
            answers: dict[int, router_pb2.RouteResponse] = {}
            while len(answers) < 2:  # in one message or two
                answers |= {one.index: one.response for one in (await call.read()).results}
            kept = answers[0].reservation_id
            cancel = router_pb2.RouteItem(index=1, cancel=True)
            await call.write(router_pb2.RouteBatch(items=[cancel]))
            assert not (await call.read()).results
            assert [one.id for one in stage.fleet.core.reservations._open.values()] == [kept]
            assert stage.fleet.core.endings == {Ending.FAILED_CANCELLED: 1}
            call.cancel()

    async def test_no_connection_s_age_ever_breaks_a_stream(self) -> None:
        # A stream ends by itself 0.2 s before the grace: enough on a busy machine.
        async with (
            served(bounds=GrpcBounds(age_s=0.1, age_grace_s=1.0)) as stage,
            asyncio.timeout(60),
        ):
            stage.fleet.add("w0")
            written = answered = streams = 0
            while streams < 3:
                streams += 1
                call = stage.router.RouteStream()
                while True:
                    item = router_pb2.RouteItem(index=written, request=asked())
                    try:
                        await call.write(router_pb2.RouteBatch(items=[item]))
                    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                        break  # it ended since we read; to a write, gRPC doesn't tell how
                    written += 1
                    if (answer := await call.read()) is grpc.aio.EOF:
                        assert await call.code() is Code.OK
                        break
                    answered += len(answer.results)
            assert written - answered <= streams, "only what was on the way is left"
