"""The route stream against a real gRPC server, whose streams the test plays where it matters."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import uvloop

from kvroute.client import (
    ClientClosed,
    ClientOverloaded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    KvRouteClient,
    KvRouteError,
    NoWorker,
    Overloaded,
    Pick,
    RetryPolicy,
    RouterUnreachable,
    UnknownModel,
)
from kvroute.client.connections import route_stream as stream_module
from kvroute.client.connections.route_stream_items import BATCH_BYTES_MAX, SENDINGS_MAX
from kvroute.client.errors import PermissionDenied
from kvroute.v1 import RouteItem, RouteResult
from tests.kvroute.scripted_router import (
    GUARD_S,
    Clock,
    PlayedStream,
    Server,
    is_open,
    opened,
    pick_of,
    status,
    until,
)

Code = grpc.StatusCode
TOKENS = [1, 2, 3]
ONCE = RetryPolicy(attempts=1)


def make_client(server: Server, **settings: Any) -> KvRouteClient:
    """These tests count calls and tokens: the fallback's list of workers would be one more."""
    clock = Clock()
    return KvRouteClient(server.address, clock=clock, sleep=clock.sleep, fallback=False, **settings)


def ask(client: KvRouteClient, name: str, **options: Any) -> asyncio.Task[Pick]:
    return asyncio.create_task(client.route(token_ids=TOKENS, request_id=name, **options))


def names(items: list[RouteItem]) -> list[str]:
    return [item.request.request_id for item in items]


@asynccontextmanager
async def played(
    server: Server, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[KvRouteClient, PlayedStream]]:
    """A client with a stream open whose other end is the test; nothing but answers lets the next
    batch go."""
    monkeypatch.setattr(stream_module, "HOLD_S", 1000.0)
    server.router.streams_played = asyncio.Queue()
    async with make_client(server, **settings) as client:
        await opened(client)
        stream = await server.next_stream()
        server.router.asked.clear()
        yield client, stream


# When there is a stream


async def test_one_request_opens_no_stream_and_a_second_does_not_wait_for_it(
    server: Server,
) -> None:
    server.router.streams_silent = True
    async with make_client(server) as client:
        await client.route(token_ids=TOKENS)
        assert client.counts.get("streams", 0) == 0
        assert client._transport.lines is not None
        stream = client._transport.lines._lines[0].stream
        assert stream is not None
        assert stream._task is None
        await client.route(token_ids=TOKENS)
        assert stream._task is not None
    assert len(server.router.asked) == 2


async def test_once_open_every_route_goes_over_the_stream(server: Server) -> None:
    async with make_client(server) as client:
        await opened(client)
        server.router.asked.clear()
        picks = [await client.route(token_ids=TOKENS, request_id=str(i)) for i in range(3)]
    assert [pick.request_id for pick in picks] == ["0", "1", "2"]
    assert [pick.worker_id for pick in picks] == ["w0"] * 3
    assert [names(list(batch.items)) for batch in server.router.batches] == [["0"], ["1"], ["2"]]
    counted = {name: count for name, count in client.counts.items() if count}
    assert counted == {"lines": 1, "streams": 1, "batches": 3, "items": 3}


async def test_the_stream_can_be_turned_off(server: Server) -> None:
    async with make_client(server, batching=False) as client:
        for _ in range(5):
            await client.route(token_ids=TOKENS)
        assert client._transport.lines is not None
        assert client._transport.lines._lines[0].stream is None
    assert len(server.router.asked) == 5
    assert server.router.batches == []


async def test_a_request_larger_than_a_batch_goes_by_itself(server: Server) -> None:
    async with make_client(server) as client:
        await opened(client)
        server.router.asked.clear()
        await client.route(token_ids=bytes(BATCH_BYTES_MAX + 4))
    assert len(server.router.asked) == 1
    assert server.router.batches == []


# Batches


async def test_calls_that_come_while_a_batch_is_unanswered_go_as_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        first = ask(client, "a")
        batch = await stream.read()
        assert names(batch) == ["a"]
        later = [ask(client, name) for name in "bcd"]
        await until(lambda: all(line.calls == 4 for line in client._transport.open()._lines))
        assert stream._batches.empty()
        await stream.answer(*batch)
        assert (await first).reservation_id == "r-a"
        batch = await stream.read()
        assert names(batch) == ["b", "c", "d"]
        await stream.answer(*batch)
        assert [(await one).reservation_id for one in later] == ["r-b", "r-c", "r-d"]


async def test_calls_made_at_once_are_one_batch(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        calls = [ask(client, str(i)) for i in range(20)]
        batch = await stream.read()
        assert names(batch) == [str(i) for i in range(20)]
        await stream.answer(*batch)
        await asyncio.gather(*calls)


async def test_a_late_answer_of_an_older_batch_lets_nothing_go(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        first, slow = ask(client, "first"), ask(client, "slow")
        older = await stream.read()
        await stream.answer(older[0])
        await first
        second = ask(client, "second")
        newer = await stream.read()
        await stream.answer(older[1])
        await slow
        third, fourth = ask(client, "third"), ask(client, "fourth")
        await stream.answer(*newer)
        await second
        last = await stream.read()
        assert names(last) == ["third", "fourth"]
        await stream.answer(*last)
        await asyncio.gather(third, fourth)


async def test_an_empty_message_lets_the_next_batch_go(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        first = ask(client, "a")
        queued = await stream.read()
        second = ask(client, "b")
        await stream.write()  # the router read the batch, and keeps its item in a queue
        batch = await stream.read()
        assert names(batch) == ["b"]
        await stream.answer(*batch)
        await second
        assert not first.done()
        await stream.answer(*queued)
        await first


async def test_a_router_that_says_nothing_holds_no_batch_back_for_long(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        monkeypatch.setattr(stream_module, "HOLD_S", 0.01)
        first = ask(client, "a")
        batch = await stream.read()
        second = ask(client, "b")
        batch += await stream.read()
        assert names(batch) == ["a", "b"]
        await stream.answer(*batch)
        await asyncio.gather(first, second)


async def test_answers_may_come_in_any_order(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        calls = {name: ask(client, name) for name in "abc"}
        batch = {item.request.request_id: item for item in await stream.read()}
        for name in "cab":
            await stream.answer(batch[name], worker_id=f"w-{name}")
            assert (await calls[name]).worker_id == f"w-{name}"


async def test_an_answer_that_nobody_asked_for_is_counted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        await stream.write(RouteResult(index=99, response=pick_of()))
        await until(lambda: client.counts.get("late") == 1)


# Errors


REFUSALS = [
    (status(Code.INVALID_ARGUMENT, "EMPTY_PROMPT"), InvalidRequest),
    (status(Code.NOT_FOUND, "UNKNOWN_MODEL"), UnknownModel),
    (status(Code.ALREADY_EXISTS, "REQUEST_ID_REUSED"), DuplicateRequest),
    (status(Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", retry_after_s=0.5), Overloaded),
    (status(Code.UNAVAILABLE, "NO_WORKER"), NoWorker),
    (status(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"), DeadlineExceeded),
    (status(Code.INTERNAL, "INTERNAL"), KvRouteError),
]


@pytest.mark.parametrize(("refusal", "kind"), REFUSALS)
async def test_an_item_s_error_is_what_a_call_would_raise(
    server: Server, refusal: Any, kind: type[KvRouteError]
) -> None:
    async with make_client(server, retry=ONCE) as client:
        server.router.refusals.append(refusal)
        with pytest.raises(kind) as by_call:
            await client.route(token_ids=TOKENS)
        await opened(client)
        server.router.refusals.append(refusal)
        with pytest.raises(kind) as by_item:
            await client.route(token_ids=TOKENS)
    assert server.router.batches
    assert type(by_item.value) is type(by_call.value)
    assert vars(by_item.value) == vars(by_call.value)


async def test_an_item_that_is_worth_another_try_gets_it(server: Server) -> None:
    async with make_client(server, retry=RetryPolicy(backoff_s=0.0)) as client:
        await opened(client)
        server.router.asked.clear()
        full = status(Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", retry_after_s=0.5)
        server.router.refusals.extend([full, full])
        pick = await client.route(token_ids=TOKENS)
    assert pick.worker_id == "w0"
    first, second, third = server.router.asked
    assert first == second == third
    assert len(server.router.batches) == 3


async def test_an_error_of_one_item_leaves_the_others_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch, retry=ONCE) as (client, stream):
        good, bad = ask(client, "good"), ask(client, "bad")
        first, second = await stream.read()
        refusal = status(Code.NOT_FOUND, "UNKNOWN_MODEL")
        await stream.write(
            RouteResult(index=second.index, status=refusal),
            RouteResult(index=first.index, response=pick_of()),
        )
        assert (await good).worker_id == "w0"
        with pytest.raises(UnknownModel):
            await bad


# Deadlines and cancels


async def test_an_item_has_its_own_deadline_and_tells_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        short, long = ask(client, "short", timeout_s=0.05), ask(client, "long", timeout_s=20.0)
        items = await stream.read()
        assert 1 <= items[0].timeout_ms <= 50
        assert 10_000 < items[1].timeout_ms <= 20_000
        with pytest.raises(DeadlineExceeded, match="no answer in"):
            await short
        await stream.answer(items[1])
        await long
        (cancel,) = await stream.read()
        assert (cancel.index, cancel.cancel) == (items[0].index, True)
        await stream.answer(items[0])
        await until(lambda: client.counts.get("late") == 1)


async def test_a_cancelled_caller_s_item_is_cancelled(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        leaving, staying = ask(client, "leaving"), ask(client, "staying")
        items = await stream.read()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await stream.answer(items[1])
        await staying
        (cancel,) = await stream.read()
        assert (cancel.index, cancel.WhichOneof("action")) == (items[0].index, "cancel")
        assert client.counts["cancels"] == 1


async def test_who_is_cancelled_before_the_writing_is_never_heard_of(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        first = ask(client, "a")
        batch = await stream.read()
        leaving, staying = ask(client, "leaving"), ask(client, "staying")
        await until(lambda: all(line.calls == 3 for line in client._transport.open()._lines))
        leaving.cancel()
        await asyncio.wait({leaving})
        await stream.answer(*batch)
        await first
        batch = await stream.read()
        assert names(batch) == ["staying"]
        await stream.answer(*batch)
        await staying


# The ends of streams


@pytest.mark.parametrize(
    "end",
    [None, status(Code.UNAVAILABLE), status(Code.INTERNAL), status(Code.DEADLINE_EXCEEDED)],
    ids=["OK", "UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED"],
)
async def test_what_a_stream_leaves_unanswered_goes_over_the_next(
    server: Server, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    async with played(server, monkeypatch, retry=ONCE) as (client, stream):
        calls = {name: ask(client, name) for name in "abc"}
        batch = await stream.read()
        await stream.answer(batch[1])
        await calls["b"]
        calls["d"] = ask(client, "d")
        await stream.read()
        calls["e"] = ask(client, "e")
        await until(lambda: all(line.calls == 4 for line in client._transport.open()._lines))
        stream.end(end)
        following = await server.next_stream()
        again = await following.read()
        assert names(again) == ["a", "c", "d", "e"], "first what was sent"
        assert [item.request for item in again[:2]] == [batch[0].request, batch[2].request]
        await following.answer(*again)
        assert [(await call).reservation_id for call in calls.values()] == [
            f"r-{name}" for name in calls
        ]
        assert client.counts["again"] == 3


async def test_a_stream_that_ends_idle_is_opened_anew_when_it_is_needed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch, retry=ONCE) as (client, stream):
        stream.end()
        line = await client._transport.line(GUARD_S)
        assert line.stream is not None
        await until(lambda: line.stream is not None and line.stream._task is None)
        assert server.router.streams_played is not None
        assert server.router.streams_played.empty()
        call = ask(client, "a")
        following = await server.next_stream()
        await following.answer(*await following.read())
        await call


async def test_an_item_that_every_stream_ends_on_fails_at_last(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch, retry=ONCE) as (client, stream):
        call = ask(client, "a")
        for i in range(SENDINGS_MAX):
            assert names(await stream.read()) == ["a"]
            stream.end()
            if i < SENDINGS_MAX - 1:
                stream = await server.next_stream()
        with pytest.raises(RouterUnreachable, match="streams end before they answer"):
            await call
        assert server.router.asked == []


async def test_streams_that_end_at_once_are_given_up_for_single_calls(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        server.router.streams_end = True
        stream.end()
        await client.route(token_ids=TOKENS)
        assert len(server.router.asked) == 1
        assert client.counts["streams_refused"] == 1


async def test_a_router_that_restarts_is_found_again(server: Server) -> None:
    clock = Clock()
    async with KvRouteClient(server.address, clock=clock, sleep=clock.sleep) as client:
        await opened(client)
        server.router.routes.clear()
        calls = [ask(client, str(i)) for i in range(5)]
        await until(lambda: server.router.batches)
        await server.stop()
        server.router.routes.set()

        async def start() -> None:
            await server.start()
            line = await client._transport.line(GUARD_S)
            while not await line.settled():  # noqa: ASYNC110  # gRPC's backoff is its own
                await asyncio.sleep(0.005)

        async def come_back() -> None:
            if not starting.done():
                await asyncio.wait({starting})

        starting = asyncio.create_task(start())
        clock.before_waking = come_back
        async with asyncio.timeout(GUARD_S):
            picks = await asyncio.gather(*calls)
    assert [pick.request_id for pick in picks] == [str(i) for i in range(5)]


async def test_a_router_that_is_gone_is_unreachable(server: Server) -> None:
    async with make_client(server) as client:
        await opened(client)
        await server.stop()
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS)
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS)


async def test_a_router_without_streams_is_asked_one_by_one_for_good(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.router.stream_refusals.extend([status(Code.UNIMPLEMENTED)] * 9)
    async with make_client(server) as client:
        for _ in range(10):
            await client.route(token_ids=TOKENS)
        await until(lambda: client.counts.get("streams_refused"))
        for _ in range(10):
            await client.route(token_ids=TOKENS)
        assert client.counts["streams_refused"] == 1
    assert len(server.router.asked) == 20
    assert len(server.router.stream_refusals) == 8
    assert caplog.text.count("the router has no RouteStream") == 1


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.UNKNOWN])
async def test_streams_that_do_not_get_through_are_tried_now_and_then_and_told_once(
    server: Server, code: Code, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(stream_module, "PAUSE_S_MAX", 0.02)
    server.router.stream_refusals.extend([status(code)] * 3)
    async with make_client(server) as client, asyncio.timeout(GUARD_S):
        while not server.router.batches:
            await client.route(token_ids=TOKENS)
        assert client.counts["streams_refused"] == 3
    assert caplog.text.count("streams are refused") == 1


async def test_after_a_refused_stream_there_is_a_pause(server: Server) -> None:
    server.router.stream_refusals.extend([status(Code.INTERNAL)] * 9)
    async with make_client(server) as client:
        for _ in range(2):
            await client.route(token_ids=TOKENS)
        await until(lambda: client.counts.get("streams_refused"))
        for _ in range(20):
            await client.route(token_ids=TOKENS)
        assert client.counts["streams_refused"] == 1


async def test_a_proxy_that_gathers_whole_calls_delays_nobody(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_module, "OPEN_TIMEOUT_S", 0.05)
    server.router.streams_silent = True
    async with make_client(server) as client, asyncio.timeout(GUARD_S):
        while not client.counts.get("streams_refused"):
            await client.route(token_ids=TOKENS)
    assert server.router.batches == []
    assert "was not answered in 0.05 s" in caplog.text


async def test_who_may_not_open_another_stream_is_told_and_not_retried(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch) as (client, stream):
        server.router.stream_refusals.append(status(Code.UNAUTHENTICATED))
        stream.end()
        with pytest.raises(PermissionDenied):
            await client.route(token_ids=TOKENS)
        await client.route(token_ids=TOKENS)
    assert len(server.router.asked) == 1, "one by one, until another stream gets through"


async def test_each_stream_has_the_present_token(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter(["call", "call", "stream", "stream again"])
    async with played(server, monkeypatch, token=lambda: next(tokens)) as (client, stream):
        assert stream.metadata["authorization"] in {"Bearer call", "Bearer stream"}
        stream.end()
        call = ask(client, "a")
        following = await server.next_stream()
        assert following.metadata["authorization"] == "Bearer stream again"
        await following.answer(*await following.read())
        await call


# Bounds and ends


async def test_unanswered_routes_are_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch, routes_max=3) as (client, stream):
        calls = [ask(client, name) for name in "abc"]
        batch = await stream.read()
        with pytest.raises(ClientOverloaded, match="3 requests are unanswered"):
            await client.route(token_ids=TOKENS)
        assert client.counts["overflows"] == 1
        await stream.answer(*batch)
        await asyncio.gather(*calls)
        call = ask(client, "d")
        await stream.answer(*await stream.read())
        await call


async def test_unanswered_bytes_are_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played(server, monkeypatch, route_bytes_max=100) as (client, stream):
        call = asyncio.create_task(client.route(token_ids=bytes(80)))
        batch = await stream.read()
        with pytest.raises(ClientOverloaded, match="bytes of requests are unanswered"):
            await client.route(token_ids=bytes(80))
        await stream.answer(*batch)
        await call


async def test_closing_ends_who_waits_and_leaves_no_task(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.router.streams_played = asyncio.Queue()
    client = make_client(server)
    await opened(client)
    stream = await server.next_stream()
    calls = [ask(client, "sent")]
    await stream.read()
    calls.append(ask(client, "waiting"))
    await until(lambda: all(line.calls == 2 for line in client._transport.open()._lines))
    await client.close()
    for call in calls:
        with pytest.raises(ClientClosed):
            await call
    with pytest.raises(ClientClosed):
        await client.route(token_ids=TOKENS)
    ours = [task for task in asyncio.all_tasks() if "kvroute/client" in repr(task)]
    assert ours == []


async def test_closing_resets_a_stream_only_while_calls_wait(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that meets a reset before it knows its last answer sent takes that answer back."""
    async with played(server, monkeypatch) as (client, stream):
        asked = ask(client, "answered")
        await stream.answer(*await stream.read())
        await asked
    await server.stop()
    assert stream.resets == 0


async def test_closing_with_an_idle_stream_or_one_half_open_leaves_no_task(server: Server) -> None:
    for silent in (False, True):
        server.router.streams_silent = silent
        async with make_client(server) as client:
            for _ in range(2):
                await client.route(token_ids=TOKENS)
            if not silent:
                await until(lambda client=client: is_open(client))  # type: ignore[misc]
        ours = [task for task in asyncio.all_tasks() if "kvroute/client" in repr(task)]
        assert ours == []


async def test_the_stream_tells_its_state(server: Server) -> None:
    async with make_client(server) as client:
        await opened(client)
        (line,) = client._transport.open()._lines
        assert repr(line.stream) == "<RouteStream open, <RouteStreamItems 0 waiting, 0 sent>>"


async def test_many_callers_get_their_own_answers(server: Server, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    async with make_client(server) as client:
        await opened(client)
        picks = await asyncio.gather(
            *(client.route(token_ids=[i], request_id=f"r{i}") for i in range(500))
        )
    assert [pick.request_id for pick in picks] == [f"r{i}" for i in range(500)]
    assert len(server.router.batches) < 50
    assert [one for one in caplog.records if one.name.startswith("kvroute")] == []


def test_the_stream_runs_on_uvloop() -> None:
    async def main() -> int:
        server = Server()
        await server.start("127.0.0.1:0")
        async with KvRouteClient(server.address) as client:
            await opened(client)
            await asyncio.gather(*(client.route(token_ids=TOKENS) for _ in range(50)))
        await server.stop()
        return len(server.router.batches)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert 1 <= runner.run(main()) < 25
