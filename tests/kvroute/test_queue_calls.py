"""Requests that wait in one of two routers, changed by their ids from a client of both."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvroute.client import KvRouteClient, Pick, RouterUnreachable
from kvroute.client.errors import KvRouteError
from kvroute.v1 import Progress, ProgressResult, ProgressState
from router.config.settings.queue_settings import QueueSettings
from tests.kvroute.scripted_router import until
from tests.stage.served import Served, served

APPLIED = ProgressResult.PROGRESS_RESULT_APPLIED
UNCHANGED = ProgressResult.PROGRESS_RESULT_UNCHANGED
UNKNOWN = ProgressResult.PROGRESS_RESULT_UNKNOWN
TOKENS = list(range(100))


def client_of(*stages: Served, batching: bool = True) -> KvRouteClient:
    targets = [f"127.0.0.1:{stage.server.port}" for stage in stages]
    return KvRouteClient(targets, timeout_s=60.0, fallback=False, batching=batching)


@asynccontextmanager
async def two_full() -> AsyncIterator[tuple[list[Served], KvRouteClient, Pick]]:
    """Two routers whose workers have their one slot taken; a client of the second one, and the pick
    that has its slot."""
    async with AsyncExitStack() as stack:
        stages = []
        for name in ("here", "there"):
            stage = await stack.enter_async_context(served(queue=QueueSettings(), replica=name))
            stage.fleet.add("w0", total_slots=1)
            stages.append(stage)
        async with client_of(stages[0]) as here, client_of(stages[1]) as there:
            await here.route(token_ids=TOKENS)
            pick = await there.route(token_ids=TOKENS)
            yield stages, there, pick


async def finish(client: KvRouteClient, pick: Pick) -> None:
    state = ProgressState.PROGRESS_STATE_FINISHED
    await client.report(Progress(reservation_id=pick.reservation_id, state=state))


@pytest.mark.parametrize("batching", [True, False])
async def test_a_priority_changes_in_the_router_where_the_request_waits(batching: bool) -> None:
    async with two_full() as (stages, there, pick), client_of(*stages, batching=batching) as both:
        calls = {}
        for name in ("first", "second"):
            calls[name] = asyncio.create_task(there.route(token_ids=TOKENS, request_id=name))
            await until(lambda: len(stages[1].desk.admission) == len(calls))
        assert (await both.change_priority("second", 50)).result == APPLIED
        assert (await both.change_priority("second", 50)).result == UNCHANGED
        await finish(there, pick)
        second = await calls["second"]
        assert not calls["first"].done()
        running = await both.change_priority("second", 60)
        assert running.result == UNCHANGED
        assert "changes nothing" in running.message
        await finish(there, second)
        await calls["first"]


async def test_a_cancelled_wait_ends_for_its_caller_and_a_cancelled_pick_ends_its_load() -> None:
    async with two_full() as (stages, there, pick), client_of(*stages) as both:
        call = asyncio.create_task(there.route(token_ids=TOKENS, request_id="mine"))
        await until(lambda: len(stages[1].desk.admission) == 1)
        assert (await both.cancel("mine")).result == APPLIED
        with pytest.raises(KvRouteError, match="cancelled the wait"):
            await call
        assert len(stages[1].desk.admission) == 0
        await finish(there, pick)
        await there.route(token_ids=TOKENS, request_id="mine")
        assert (await both.cancel("mine")).result == APPLIED
        assert not stages[1].fleet.core.fleet.loads[next(iter(stages[1].fleet.relays))].requests


async def test_a_request_that_no_router_knows_is_unknown() -> None:
    async with two_full() as (stages, _, _), client_of(*stages) as both:
        assert (await both.change_priority("nobody's", 1)).result == UNKNOWN
        assert (await both.cancel("nobody's")).result == UNKNOWN
        with pytest.raises(ValueError, match="request_id is empty"):
            await both.cancel("")


async def test_a_router_that_is_gone_matters_only_for_requests_that_no_other_knows() -> None:
    async with two_full() as (stages, there, _), client_of(*stages) as both:
        assert (await both.cancel("nobody's")).result == UNKNOWN
        call = asyncio.create_task(there.route(token_ids=TOKENS, request_id="mine"))
        await until(lambda: len(stages[1].desk.admission) == 1)
        await stages[0].server.drain(0)
        assert (await both.change_priority("mine", 5)).result == APPLIED
        with pytest.raises(RouterUnreachable):
            await both.change_priority("nobody's", 5)
        assert (await both.cancel("mine")).result == APPLIED
        with pytest.raises(KvRouteError, match="cancelled the wait"):
            await call
