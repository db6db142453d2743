"""What a router, an engine or a caller's function may hand to the client, and what it ends: the
call that it belongs to. No background task dies of it in silence, and the next call is served."""

import asyncio
import gc
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kvroute.client import KvRouteClient, KvRouteError, RetryPolicy, RouterUnreachable
from kvroute.client.connections.lines import OWNER_NAME_MAX
from kvroute.client.connections.report_batches import ReportBatches
from kvroute.client.requests.life import RENEW_S_MAX, RENEW_S_MIN
from kvroute.v1 import Progress, ProgressState, RouteResult
from tests.kvroute.scripted_router import (
    GUARD_S,
    Clock,
    Server,
    opened,
    pick_of,
    status,
)

ONCE = RetryPolicy(attempts=1)
TOKENS = [1, 2, 3]
FINISHED = ProgressState.PROGRESS_STATE_FINISHED
NONSENSE = b"\xff\xff\xff"
CLASSES: list[type[BaseException]] = [
    ValueError, KeyError, OSError, UnicodeError, RuntimeError, RecursionError, MemoryError,
    AttributeError, asyncio.InvalidStateError, TimeoutError, StopAsyncIteration, AssertionError,
]  # fmt: skip


@pytest.fixture(autouse=True)
async def no_task_dies_in_silence() -> AsyncIterator[None]:
    """Fails on what asyncio tells of tasks whose exception nobody took."""
    told: list[dict[str, Any]] = []

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC has one poller for all loops: a late event of an earlier test's call, whose loop is
        # closed, fails in the loop that runs now.
        if "PollerCompletionQueue" not in context["message"]:
            told.append(context)

    asyncio.get_running_loop().set_exception_handler(on_error)
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert told == []


def make_client(server: Server, **settings: Any) -> KvRouteClient:
    clock = settings.pop("clock", None) or Clock()
    return KvRouteClient(server.address, clock=clock, sleep=clock.sleep, **settings)


class Broken:
    """A token that is fine until the test breaks it."""

    def __init__(self) -> None:
        self.error: type[BaseException] | None = None

    def __call__(self) -> str:
        if self.error is not None:
            raise self.error("the caller's own")
        return "token"


# Bytes that are no message


@pytest.fixture
async def nonsense() -> AsyncIterator[str]:
    """A server that answers every call with bytes that are no message."""

    async def one(request: bytes, context: Any) -> bytes:
        return NONSENSE

    async def several(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield NONSENSE

    async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield NONSENSE

    server = grpc.aio.server()
    unary = grpc.unary_unary_rpc_method_handler(one)
    services: dict[str, dict[str, Any]] = {
        "Router": {
            "Route": unary,
            "Report": unary,
            "Explain": unary,
            "RouteStream": grpc.stream_stream_rpc_method_handler(several),
        },
        "Fleet": {
            "ListWorkers": unary,
            "WatchWorkers": grpc.unary_stream_rpc_method_handler(many),
        },
    }
    handlers = [
        grpc.method_handlers_generic_handler(f"kvroute.v1.{name}", methods)
        for name, methods in services.items()
    ]
    server.add_generic_rpc_handlers(tuple(handlers))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def _watch(client: KvRouteClient) -> None:
    async for _ in client.watch_workers():
        pass


@pytest.mark.parametrize("batching", [True, False])
async def test_an_answer_that_is_no_message_is_as_good_as_none(
    nonsense: str, batching: bool
) -> None:
    clock = Clock()
    step = Progress(reservation_id="r-1", state=FINISHED)
    async with KvRouteClient(
        nonsense, clock=clock, sleep=clock.sleep, batching=batching, retry=ONCE
    ) as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.route(token_ids=TOKENS),
            lambda: client.explain(token_ids=TOKENS),
            lambda: client.report(step),
            client.list_workers,
            lambda: _watch(client),
        ]
        for call in calls:
            async with asyncio.timeout(GUARD_S):
                with pytest.raises(RouterUnreachable, match="can't be read"):
                    await call()


async def test_a_result_that_says_nothing_is_an_error_of_its_item_alone(server: Server) -> None:
    server.router.streams_played = asyncio.Queue()
    async with make_client(server, retry=ONCE) as client:
        await opened(client)
        stream = await server.next_stream()
        calls = [asyncio.create_task(client.route(token_ids=TOKENS)) for _ in range(3)]
        items = []
        while len(items) < 3:
            items += await stream.read()
        empty, fine, ok_status = items
        await stream.write(
            RouteResult(index=empty.index),
            RouteResult(index=ok_status.index, status=status(grpc.StatusCode.OK)),
            RouteResult(index=1 << 63),
        )
        await stream.answer(fine)
        done = await asyncio.gather(*calls, return_exceptions=True)
        kinds = Counter(type(one) for one in done)
    assert kinds[RouterUnreachable] == 2
    assert sum(kinds.values()) == 3


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED]
)
async def test_a_connection_that_carried_nonsense_is_worth_another_try(
    server: Server, code: grpc.StatusCode
) -> None:
    server.router.refusals.append(status(code))
    async with make_client(server) as client:
        assert (await client.route(token_ids=TOKENS)).worker_id == "w0"


# Numbers


@pytest.mark.parametrize("lease_s", [math.inf, -math.inf, math.nan, -1.0, 1e-300, 1e300])
async def test_a_lease_of_any_length_makes_renewals_neither_dense_nor_broken(
    server: Server, lease_s: float
) -> None:
    server.router.answer = pick_of(lease_s=lease_s)
    clock = Clock(at_once=False)
    async with make_client(server, clock=clock) as client, client.request(token_ids=TOKENS):
        await asyncio.sleep(0)
    assert all(RENEW_S_MIN <= slept <= RENEW_S_MAX for slept in clock.slept_s)
    assert (await server.next_report()).state == FINISHED


@pytest.mark.parametrize("number", [-1, 1 << 32, 1e9, 1.5, math.nan, "12", None, True, [1]])
async def test_a_count_that_is_none_is_left_out_and_shown(server: Server, number: Any) -> None:
    async with make_client(server, clock=Clock(at_once=False)) as client:
        async with client.request(token_ids=TOKENS) as request:
            await request.prefill_done()
            request.output_tokens = number
            request.cached_tokens = number
        assert client.reports_lost == 0, "they arrived without it"
    assert request.report_error is not None
    await server.next_report()
    told = await server.next_report()
    assert (told.state, told.output_tokens) == (FINISHED, 0)
    assert not told.HasField("cached_tokens")


async def test_a_router_s_name_of_any_length_is_not_kept(server: Server) -> None:
    server.router.answer = pick_of(name="n" * (OWNER_NAME_MAX + 1) + "-1")
    async with make_client(server) as client:
        pick = await client.route(token_ids=TOKENS)
        assert client._transport.open().owner(pick.reservation_id) is None
        server.router.answer = pick_of(name="n" * (OWNER_NAME_MAX - 2) + "-1")
        pick = await client.route(token_ids=TOKENS)
        assert client._transport.open().owner(pick.reservation_id) is not None


@pytest.mark.parametrize("params", ["{", "[]", "7", '"text"', "[" * 100_000])
async def test_hand_over_parameters_that_are_none_are_the_router_s_fault(
    server: Server, params: str
) -> None:
    server.router.answer = pick_of()
    worker = server.router.answer.prefill_worker
    worker.worker_id, worker.engine, worker.prefill_kv_transfer_params = "p", "vllm", params
    async with make_client(server) as client:
        pick = await client.route(token_ids=TOKENS)
    with pytest.raises(RouterUnreachable, match="kv_transfer_params"):
        _ = pick.prefill_worker


# A caller's function


@pytest.mark.parametrize("error", CLASSES)
async def test_a_token_that_raises_fails_those_who_wait_and_nobody_later(
    server: Server, error: type[BaseException]
) -> None:
    token = Broken()
    step = Progress(reservation_id="r-1", state=FINISHED)
    async with asyncio.timeout(GUARD_S), make_client(server, token=token, retry=ONCE) as client:
        await client.route(token_ids=TOKENS)
        token.error = error
        with pytest.raises((KvRouteError, error)):  # here the stream is opened
            await client.route(token_ids=TOKENS)
        with pytest.raises(KvRouteError, match=error.__name__):
            await client.report(step)
        token.error = None
        await client.route(token_ids=TOKENS)
        assert len(await client.report(step)) == 1


async def test_a_stream_that_broke_says_why_and_is_opened_again(server: Server) -> None:
    token = Broken()
    async with asyncio.timeout(GUARD_S), make_client(server, token=token, retry=ONCE) as client:
        for _ in range(3):
            await client.route(token_ids=TOKENS)
        stream = client._transport.open()._lines[0].stream
        assert stream is not None
        while "open" not in repr(stream):  # noqa: ASYNC110  # a socket sets no event here
            await asyncio.sleep(0.002)
        await server.stop()
        await server.start()
        while stream._task is not None:  # noqa: ASYNC110  # until it knows that its stream is gone
            await asyncio.sleep(0.002)
        token.error = LookupError
        with pytest.raises(KvRouteError, match="LookupError"):
            await client.route(token_ids=TOKENS)
        assert client.counts["stream_failures"] == 1
        token.error = None
        await client.route(token_ids=TOKENS)


@pytest.mark.parametrize("error", CLASSES)
async def test_what_breaks_a_report_neither_breaks_the_body_nor_goes_uncounted(
    server: Server, error: type[BaseException]
) -> None:
    token = Broken()
    clock = Clock(at_once=False)
    async with asyncio.timeout(GUARD_S), make_client(server, token=token, clock=clock) as client:
        async with client.request(token_ids=TOKENS) as request:
            token.error = error
            await request.prefill_done()
        assert client.reports_lost == 2
        assert error.__name__ in str(request.report_error)


@pytest.mark.parametrize("error", CLASSES)
async def test_a_report_s_call_that_breaks_fails_its_reports_at_once(
    error: type[BaseException],
) -> None:
    async def send(request: Any, left_s: float) -> Any:
        raise error("broken")

    batches = ReportBatches(send, Counter())
    step = Progress(reservation_id="r-1", state=FINISHED)
    async with asyncio.timeout(GUARD_S):
        told = [batches.report([step], 1e6) for _ in range(3)]
        for failure in await asyncio.gather(*told, return_exceptions=True):
            assert isinstance(failure, KvRouteError)
            assert error.__name__ in str(failure)
    await batches.close()


async def test_a_name_that_dns_cannot_have_is_unreachable() -> None:
    async with KvRouteClient(f"{'x' * 70}.example:1", retry=ONCE) as client:
        with pytest.raises(RouterUnreachable, match="can't be resolved"):
            await client.route(token_ids=TOKENS)
