"""Routers that take calls and say nothing: when they count as silent, and where calls go then."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from kvroute.client import DeadlineExceeded, KvRouteClient, Pick
from kvroute.client.connections.line import Line
from kvroute.client.connections.silence import SILENT_S, Quiet, from_router
from kvroute.client.errors import ClientClosed, InvalidRequest, unreachable
from kvroute.v1 import Receipt
from router.fleet.reservations.reservations import Ending
from tests.kvroute.scripted_router import GUARD_S, Server, pick_of, until
from tests.kvroute.test_fallback import worker
from tests.stage.proxy import Proxy, proxy_to
from tests.stage.served import served

TOKENS = list(range(64))
SHORT_S = 0.4
"""A bound for these tests: a router that is well and a little late does no harm here."""


# The rule


def test_the_default_bound_is_two_seconds() -> None:
    assert SILENT_S == 2.0


def test_a_router_is_silent_after_a_bound_of_which_half_had_a_health_check() -> None:
    quiet = Quiet(2.0)
    assert quiet.probe_at_s is None, "nothing is owed"
    quiet.call_began(10.0)
    quiet.call_began(10.9)
    assert quiet.probe_at_s == 11.0
    assert not quiet.silent, "not before the check has failed"
    assert quiet.unanswered(11.0)
    assert quiet.silent


def test_a_word_while_the_health_check_is_open_prevents_it() -> None:
    quiet = Quiet(2.0)
    quiet.call_began(10.0)
    quiet.call_began(10.0)
    quiet.call_ended(11.5, answered=True)
    assert not quiet.unanswered(11.0)
    assert quiet.probe_at_s == 12.5, "one call is still open"


def test_calls_that_end_unanswered_leave_the_debt() -> None:
    quiet = Quiet(2.0)
    for now_s in (10.0, 10.5, 11.0):
        quiet.call_began(now_s)
        quiet.call_ended(now_s + 0.4, answered=False)
    assert quiet.probe_at_s == 11.0
    assert quiet.unanswered(11.0)


def test_idle_time_is_no_silence() -> None:
    quiet = Quiet(2.0)
    quiet.call_began(10.0)
    quiet.call_ended(10.1, answered=True)
    assert quiet.probe_at_s is None
    quiet.call_began(900.0)
    assert quiet.probe_at_s == 901.0


def test_a_connection_that_ended_owes_nothing() -> None:
    quiet = Quiet(2.0)
    quiet.call_began(10.0)
    quiet.gone()
    assert quiet.probe_at_s is None
    assert not quiet.unanswered(11.0)


def test_the_first_word_ends_a_silence_and_the_end_of_a_connection_does_not() -> None:
    quiet = Quiet(2.0)
    quiet.call_began(10.0)
    quiet.unanswered(11.0)
    quiet.gone()
    assert quiet.silent
    quiet.answered(30.0)
    assert not quiet.silent
    assert quiet.probe_at_s == 31.0, "the call is still open"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (InvalidRequest(grpc.StatusCode.INVALID_ARGUMENT, "EMPTY", "no prompt"), True),
        (DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "late"), True),
        (DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, "late"), False),
        (unreachable("cut"), False),
        (ClientClosed(), False),
        (asyncio.CancelledError(), False),
    ],
)
def test_what_counts_as_a_word(error: BaseException, word: bool) -> None:
    assert from_router(error) is word


# Calls


@asynccontextmanager
async def two_routers(**settings: Any) -> AsyncIterator[tuple[KvRouteClient, Proxy, list[Server]]]:
    """Router 0 is behind a proxy, router 1 is not."""
    async with AsyncExitStack() as stack:
        servers = [Server() for _ in range(2)]
        for i, server in enumerate(servers):
            await server.start("127.0.0.1:0")
            stack.push_async_callback(server.stop)
            name = Receipt(replica=f"r-replica-{i}")
            server.router.answer = pick_of(f"w{i}", name=f"replica-{i}-1", receipt=name)
        proxy = await stack.enter_async_context(proxy_to(servers[0].port))
        targets = [f"127.0.0.1:{proxy.port}", servers[1].address]
        settings = {"timeout_s": GUARD_S, "fallback": False, "silent_s": SHORT_S} | settings
        client = await stack.enter_async_context(KvRouteClient(targets, **settings))
        await client.route(token_ids=TOKENS)
        for line in client._transport.open()._lines:
            assert await line.settled()
        seen: set[str] = set()
        async with asyncio.timeout(GUARD_S):
            while len(seen) < 2 or not _on_streams(client):
                seen.add((await client.route(token_ids=TOKENS)).worker_id)
        yield client, proxy, servers


def _on_streams(client: KvRouteClient) -> bool:
    batching = [line.stream for line in client._transport.open()._lines]
    return all(stream is None or stream.takes(100) for stream in batching)


def behind(client: KvRouteClient, proxy: Proxy) -> Line:
    """The line that goes through a proxy."""
    target = f"127.0.0.1:{proxy.port}"
    return next(line for line in client._transport.open()._lines if line.address.target == target)


async def route_all(client: KvRouteClient, count: int) -> list[Pick]:
    async with asyncio.timeout(GUARD_S):
        return await asyncio.gather(*(client.route(token_ids=TOKENS) for _ in range(count)))


@pytest.mark.parametrize("batching", [True, False])
async def test_open_picks_of_a_router_that_hangs_go_to_the_other_one(batching: bool) -> None:
    async with two_routers(batching=batching) as (client, proxy, _):
        line = behind(client, proxy)
        proxy.stall()
        picks = await route_all(client, 20)
        assert {pick.worker_id for pick in picks} == {"w1"}
        assert client.counts["picks_moved"]
        await until(lambda: line.watch.silent)
        assert client.counts["silences"]
        picks = await route_all(client, 20)
        assert {pick.worker_id for pick in picks} == {"w1"}


@pytest.mark.parametrize("batching", [True, False])
async def test_a_router_that_is_well_again_is_used_again(batching: bool) -> None:
    async with two_routers(batching=batching) as (client, proxy, _):
        line = behind(client, proxy)
        proxy.stall()
        await route_all(client, 8)
        await until(lambda: line.watch.silent)
        await proxy.heal()
        await until(lambda: not line.watch.silent)
        assert client.counts["silences_over"]
        async with asyncio.timeout(GUARD_S):
            while (await client.route(token_ids=TOKENS)).worker_id != "w0":
                pass


async def test_a_silent_router_whose_connections_are_reset_comes_back_too() -> None:
    async with two_routers() as (client, proxy, _):
        line = behind(client, proxy)
        proxy.stall()
        await route_all(client, 8)
        await until(lambda: line.watch.silent)
        proxy.cut()
        await proxy.heal()
        await until(lambda: not line.watch.silent)


async def test_a_slow_answer_of_a_router_that_is_well_is_waited_for() -> None:
    async with two_routers(batching=False, silent_s=SILENT_S) as (client, _, servers):
        for server in servers:
            server.router.routes.clear()
        probes = client.counts.get("probes", 0)
        calls = [asyncio.create_task(client.route(token_ids=TOKENS)) for _ in range(4)]
        await until(lambda: client.counts.get("probes", 0) >= probes + 2)
        assert client.counts.get("picks_moved", 0) == 0
        for server in servers:
            server.router.routes.set()
        async with asyncio.timeout(GUARD_S):
            assert {pick.worker_id for pick in await asyncio.gather(*calls)} == {"w0", "w1"}


async def test_with_nobody_else_calls_wait_for_the_silent_router() -> None:
    server = Server()
    await server.start("127.0.0.1:0")
    async with (
        proxy_to(server.port) as proxy,
        KvRouteClient(f"127.0.0.1:{proxy.port}", timeout_s=GUARD_S, silent_s=SHORT_S) as client,
    ):
        await client.route(token_ids=TOKENS)
        proxy.stall()
        call = asyncio.create_task(client.route(token_ids=TOKENS))
        await until(lambda: client.counts.get("silences", 0))
        assert not call.done(), "the fallback has no list yet"
        await proxy.heal()
        async with asyncio.timeout(GUARD_S):
            assert not (await call).fallback
    assert client.counts.get("picks_moved", 0) == 0
    await server.stop()


async def test_with_one_router_the_fallback_takes_the_open_picks_and_later_ones() -> None:
    server = Server()
    server.fleet.statuses = [worker("a"), worker("b")]
    await server.start("127.0.0.1:0")
    async with (
        proxy_to(server.port) as proxy,
        KvRouteClient(f"127.0.0.1:{proxy.port}", timeout_s=GUARD_S, silent_s=SHORT_S) as client,
    ):
        while not client.counts.get("worker_lists", 0):
            await client.route(token_ids=TOKENS)
        proxy.stall()
        assert all(pick.fallback for pick in await route_all(client, 10))
        moved = client.counts["picks_moved"]
        assert moved
        assert all(pick.fallback for pick in await route_all(client, 10))
        assert client.counts["picks_moved"] == moved, "these never went to the silent router"
        assert client.counts["outages"]
        await proxy.heal()
        async with asyncio.timeout(GUARD_S):
            while (await client.route(token_ids=TOKENS)).fallback:
                pass
    await server.stop()


async def test_requests_of_a_silent_router_are_not_held_up_by_their_reports() -> None:
    async with two_routers(report_timeout_s=GUARD_S) as (client, proxy, _):
        line = behind(client, proxy)
        requests = [client.request(token_ids=TOKENS) for _ in range(4)]
        async with asyncio.timeout(GUARD_S / 2):
            for request in requests:
                await request.__aenter__()
            theirs = [request for request in requests if request.pick.worker_id == "w0"]
            assert theirs
            proxy.stall()
            await route_all(client, 4)
            await until(lambda: line.watch.silent)
            for request in requests:
                await request.prefill_done()
                await request.finished()
        await proxy.heal()
    assert client.reports_lost == 0, "they went when the router was well"


# What the silent router has reserved


async def test_what_a_silent_router_reserved_for_moved_picks_ends() -> None:
    """The answers are stalled, not the requests: so the router has reserved, and hears cancels."""
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(served())
        stage.fleet.add("w0", total_blocks=None, total_slots=None)
        proxy = await stack.enter_async_context(proxy_to(stage.server.port))
        other = Server()
        await other.start("127.0.0.1:0")
        stack.push_async_callback(other.stop)
        other.router.answer = pick_of("other", name="replica-other-1")
        client = await stack.enter_async_context(
            KvRouteClient(
                [f"127.0.0.1:{proxy.port}", other.address],
                timeout_s=GUARD_S,
                silent_s=SHORT_S,
                fallback=False,
            )
        )
        seen: Counter[str] = Counter()
        async with asyncio.timeout(GUARD_S):
            while len(seen) < 2 or not _on_streams(client):
                seen[(await client.route(token_ids=TOKENS)).worker_id] += 1
        core = stage.fleet.core
        before = len(core.reservations)
        proxy.stall_answers()
        picks = await route_all(client, 10)
        assert {pick.worker_id for pick in picks} == {"other"}
        moved = client.counts["picks_moved"]
        assert moved
        await until(lambda: core.endings[Ending.FAILED_CANCELLED] >= moved)
        await until(lambda: len(core.reservations) == before)
