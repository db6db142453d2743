"""Orders and holds of requests that wait which look at the workers, over real gRPC."""

import asyncio
from typing import Any

from router.config.settings.queue_settings import QueueSettings, SiblingsSettings
from router.decide.queue_order.own_order import OwnView
from tests.router.api.service.test_waiting import full
from tests.stage.fleet import prompt
from tests.stage.served import Served

OWN = f"{__name__}:from_gold"


def from_gold(request: OwnView) -> float:
    return request.waited_s + (10.0 if request.tenant == "gold" else 0.0) + request.load


async def called(stage: Served, **about: Any) -> "asyncio.Future[Any]":
    """A call whose request waits."""
    call = await stage.queued(**about)
    stage.fleet.now_s += 0.01  # waiting requests are not ranked more often than they could change
    return call


async def test_lpm_takes_what_a_worker_with_room_holds() -> None:
    async with full(QueueSettings(order="lpm")) as (stage, held):
        (key,) = stage.fleet.relays
        stage.fleet.cache(key, prompt(160, 5000))
        cold = await called(stage, tokens=160, first=9000)
        warm = await called(stage, tokens=160, first=5000)
        await stage.report(held)
        answer = await warm
        assert answer.overlap_tokens.usable == 144
        assert not cold.done()
        await stage.report(answer.reservation_id)
        await cold


async def test_dfs_weight_takes_prompts_that_share_a_prefix_together() -> None:
    async with full(QueueSettings(order="dfs-weight")) as (stage, held):
        alone = await called(stage, tokens=160, first=9000)
        pair = [await called(stage, tokens=160 + 16 * i, first=5000) for i in range(2)]
        for call in (pair[1], pair[0], alone):  # the longer one is a child of the shorter one
            await stage.report(held)
            held = (await call).reservation_id


async def test_a_function_of_the_operators_ranks() -> None:
    async with full(QueueSettings(order=OWN)) as (stage, held):
        first = await called(stage)
        gold = await called(stage, tenant="gold")
        await stage.report(held)
        held = (await gold).reservation_id
        await stage.report(held)
        await first
        assert not stage.desk.admission.queue.own_failures


async def test_a_sibling_follows_the_prefill_of_the_first() -> None:
    siblings = SiblingsSettings(enabled=True)
    async with full(QueueSettings(siblings=siblings)) as (stage, held):
        stage.desk.admission.queue.siblings.min_blocks = 4
        first = await called(stage, tokens=160, first=5000)
        second = await called(stage, tokens=176, first=5000)
        stage.fleet.add("w1", total_slots=1)
        await stage.report(held)
        answer = await first
        stage.desk.dispatch()
        assert not second.done(), "a worker has room, and the prefix is being computed"
        await stage.report(answer.reservation_id, "prefill_done")
        await second
