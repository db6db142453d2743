"""The route stream against the router: nothing is lost when it ends connections, or drains."""

import asyncio

import pytest

from kvroute.client import KvRouteClient, Pick, RetryPolicy, RouterUnreachable, UnknownModel
from router.api.service.grpc_bounds import GrpcBounds
from router.config.settings.serving_settings import GrpcSettings
from router.fleet.reservations.reservations import Ending
from tests.kvroute.scripted_router import opened, until
from tests.stage.served import Served, served

ONCE = RetryPolicy(attempts=1)
TOKENS = list(range(100))


def client_of(stage: Served, retry: RetryPolicy = ONCE) -> KvRouteClient:
    return KvRouteClient(
        f"127.0.0.1:{stage.server.port}", retry=retry, timeout_s=60.0, fallback=False
    )


async def test_callers_never_notice_that_connections_have_an_age() -> None:
    settings = GrpcSettings(listen="127.0.0.1:0", max_connection_age_s=0.1)
    async with (
        served(grpc_settings=settings, bounds=GrpcBounds(age_grace_s=0.25)) as stage,
        client_of(stage) as client,
    ):
        stage.fleet.add("w0", total_blocks=None, total_slots=None)
        picks: list[Pick] = []

        async def call() -> None:
            while client.counts.get("streams", 0) < 6:
                picks.append(await client.route(token_ids=TOKENS))

        async with asyncio.timeout(60):
            await asyncio.gather(*(call() for _ in range(8)))
        assert len({pick.reservation_id for pick in picks}) == len(picks)
        assert len(stage.fleet.core.reservations) == len(picks), "and none was made twice"


async def test_a_draining_router_answers_what_it_has_and_the_next_call_finds_nobody() -> None:
    async with served() as stage, client_of(stage) as client:
        stage.fleet.add("w0")
        await opened(client)
        before = len(stage.fleet.core.reservations)
        calls = [asyncio.create_task(client.route(token_ids=TOKENS)) for _ in range(20)]
        await until(lambda: len(stage.fleet.core.reservations) > before)
        stage.stopping.set()
        async with asyncio.timeout(60):
            picks = await asyncio.gather(*calls)
            assert len({pick.reservation_id for pick in picks}) == 20
            await stage.server.drain(10.0)
        with pytest.raises(RouterUnreachable):
            await client.route(token_ids=TOKENS)


@pytest.mark.parametrize("turns", range(12))
async def test_a_caller_that_leaves_after_the_decision_leaves_nothing_reserved(turns: int) -> None:
    async with served() as stage, client_of(stage) as client:
        stage.fleet.add("w0")
        await opened(client)
        core = stage.fleet.core
        before = len(core.reservations)
        call = asyncio.create_task(client.route(token_ids=TOKENS, request_id="leaves"))
        while core.reservations.of_request("leaves") is None:  # noqa: ASYNC110  # no turn missed
            await asyncio.sleep(0)
        for _ in range(turns):  # of the event loop, in some of which the answer arrives
            await asyncio.sleep(0)
        if call.done():
            return
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        await until(lambda: core.endings[Ending.FAILED_CANCELLED] == 1)
        assert len(core.reservations) == before


async def test_refusals_come_item_by_item() -> None:
    async with served() as stage, client_of(stage) as client:
        stage.fleet.add("w0")
        await opened(client)
        good = [client.route(token_ids=TOKENS) for _ in range(10)]
        bad = [client.route(token_ids=TOKENS, model="none") for _ in range(10)]
        answers = await asyncio.gather(*good, *bad, return_exceptions=True)
        assert all(isinstance(answer, Pick) for answer in answers[:10])
        assert all(isinstance(answer, UnknownModel) for answer in answers[10:])
        assert client.counts["batches"] < 10
