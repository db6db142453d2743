"""Several routers on one fleet, over real NATS: load, Reports and fleet commands cross over."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

from events.feed import replicas
from events.feed.replicas import FULL_S, Inflight, decode_inflight
from events.plane import nats_client, subjects
from events.plane.facts import VERSION, Control
from kvroute.client import KvRouteClient, KvRouteError, Pick
from kvroute.v1 import Progress, ProgressResult, ProgressState
from router.app.processes.router_process import RouterApp
from router.cluster.children.process import end
from router.cluster.replicas import replica_link
from router.cluster.replicas.replica_link import HEARD_PER_S
from tests.stage.loopback import (
    Stage,
    a_broker,
    a_prompt,
    a_stage,
    all_schedulable,
    router_app,
    router_process,
    serve_config,
)
from tests.stage.waiting import free_port, until


@asynccontextmanager
async def another(
    stage: Stage, *, ready: bool = True
) -> AsyncIterator[tuple[RouterApp, KvRouteClient]]:
    """One more router on a stage, which sees its workers."""
    async with router_app(serve_config(stage.nats.url)) as (app, client):
        if ready:
            await all_schedulable(app, len(stage.engines))
        yield app, client


Heard = list[tuple[float, Inflight]]
"""(when, what) of what routers tell one another."""


@asynccontextmanager
async def listening(stage: Stage) -> AsyncIterator[Heard]:
    """Everything that routers tell one another, as it comes."""
    heard: Heard = []

    async def came(message: Msg) -> None:
        told = decode_inflight(message.data)
        assert isinstance(told, Inflight)
        heard.append((stage.clock(), told))

    async with a_broker(stage.nats.url, "listener") as broker:
        await broker.subscribe(subjects.every_inflight("default"), came)
        yield heard


def of(heard: Heard, app: RouterApp) -> Heard:
    return [one for one in heard if one[1].replica == app.replica]


def reserved(app: RouterApp) -> int:
    return sum(load.requests for load in app.core.fleet.loads.values())


def of_replicas(app: RouterApp) -> int:
    return sum(load.replicas.requests for load in app.core.fleet.loads.values())


def finished(pick: Pick) -> Progress:
    state = ProgressState.PROGRESS_STATE_FINISHED
    return Progress(reservation_id=pick.reservation_id, state=state, cached_tokens=3)


async def test_a_pick_here_is_load_there_until_it_ends() -> None:
    rng = random.Random(1)
    async with a_stage(engine_count=2) as stage, another(stage) as (there, client):
        picks = [await stage.client.route(token_ids=a_prompt(rng)) for _ in range(3)]
        await until(lambda: of_replicas(there) == 3, "three requests of the other replica")
        (one, two) = await client.list_workers()
        assert one.reserved_by_replicas + two.reserved_by_replicas == 3
        assert (one.reserved, two.reserved) == (0, 0)
        for pick in picks:
            await stage.finish(pick)
        await until(lambda: of_replicas(there) == 0, "nothing of the other replica")
        assert of_replicas(stage.router) == 0


async def test_facts_that_wait_to_be_read_hold_up_no_word_of_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_client, "PING_S", 600.0)  # nothing gives the silent connection up
    rng = random.Random(8)
    async with a_stage(engine_count=2) as stage, another(stage) as (there, _):
        facts = there.links.broker._client._transport._io_writer.transport  # type: ignore[union-attr]
        facts.pause_reading()
        try:
            pick = await stage.client.route(token_ids=a_prompt(rng))
            await until(lambda: of_replicas(there) == 1, "a request of the other replica")
            await stage.finish(pick)
            await until(lambda: of_replicas(there) == 0, "its end")
            assert not facts.is_reading()
        finally:
            facts.resume_reading()


async def test_a_command_that_reached_nobody_is_said_again_after_an_outage() -> None:
    async with a_stage(engine_count=2) as stage, another(stage) as (there, _):
        given = Control(VERSION, "1", "drain", "worker-0", at_s=there.clock())
        there.commands.apply(given)
        assert "worker-0" in there.core.fleet.drained
        assert there.links.replicas is not None
        there.links.replicas._client.abort()
        await until(lambda: "worker-0" in stage.router.core.fleet.drained, "the command here, too")


async def test_alone_a_router_tells_seldom_and_two_that_meet_tell_all_news_at_once() -> None:
    rng = random.Random(5)
    async with a_stage(engine_count=2) as stage, listening(stage) as heard:
        since_s = stage.clock()
        before = len(heard)
        while len(heard) < before + 4:
            await stage.finish(await stage.client.route(token_ids=a_prompt(rng)))
        assert not any(message.workers for _, message in heard), "nobody listens"
        assert heard[before + 3][0] - since_s > FULL_S, "of three pauses two were whole"
        await stage.client.route(token_ids=a_prompt(rng))
        async with router_app(serve_config(stage.nats.url)) as (there, _):
            await until(lambda: of(heard, there), "its first word")
            first_s, _ = of(heard, there)[0]
            await until(lambda: len(there.core.fleet.replicas) == 1, "the other")
            _, answer = next(one for one in of(heard, stage.router) if one[0] >= first_s)
            assert answer.full
            await until(lambda: of_replicas(there) == 1, "what the other has reserved")
            await stage.client.route(token_ids=a_prompt(rng))
            await until(lambda: not heard[-1][1].full, "a message between full ones")
            before, since_s = len(of(heard, stage.router)), stage.clock()
            for _ in range(50):
                await stage.finish(await stage.client.route(token_ids=a_prompt(rng)))
            await until(lambda: len(of(heard, stage.router)) > before + 1, "its news")
            news = len(of(heard, stage.router)) - before
            assert news <= (stage.clock() - since_s) * HEARD_PER_S + 3, "there is a pause"
            assert there.core.fleet.replicas.met == stage.router.core.fleet.replicas.met == 1
            assert not there.core.fleet.replicas.results - Counter(applied=1 << 30), (
                "nor heard ourselves"
            )


async def test_a_router_that_meets_another_answers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (replicas, replica_link):
        monkeypatch.setattr(module, "FULL_S", 600.0)
    async with (
        a_stage(engine_count=1) as stage,
        router_app(serve_config(stage.nats.url)) as (there, _),
    ):
        await until(lambda: there.core.fleet.replicas.met, "the other's answer")


async def test_a_report_finds_its_owner_through_any_replica() -> None:
    rng = random.Random(2)
    async with a_stage(engine_count=2) as stage, another(stage) as (there, client):
        pick = await stage.client.route(token_ids=a_prompt(rng))
        own = await client.route(token_ids=a_prompt(rng))
        assert (reserved(stage.router), reserved(there)) == (1, 1)
        nobodys = Progress(reservation_id="gone-1", state=ProgressState.PROGRESS_STATE_FINISHED)
        outcomes = await client.report(finished(pick), finished(own), nobodys)
        assert [one.result for one in outcomes] == [
            ProgressResult.PROGRESS_RESULT_APPLIED,
            ProgressResult.PROGRESS_RESULT_APPLIED,
            ProgressResult.PROGRESS_RESULT_UNKNOWN,
        ]
        assert [one.reservation_id for one in outcomes][2] == "gone-1"
        assert "gone" in outcomes[2].message
        assert (reserved(stage.router), reserved(there)) == (0, 0)
        (again,) = await client.report(finished(pick))
        assert again.result == ProgressResult.PROGRESS_RESULT_UNCHANGED
        assert there.links.link is not None
        assert there.links.link.forwarded == {"answered": 2, "no_answer": 1}


async def test_a_replica_that_stops_takes_no_more_reports_of_others() -> None:
    rng = random.Random(3)
    async with a_stage(engine_count=2) as stage, another(stage) as (there, client):
        pick = await stage.client.route(token_ids=a_prompt(rng))
        assert stage.router.links.link is not None
        assert there.links.link is not None
        await stage.router.links.link.stop()
        (outcome,) = await client.report(finished(pick))
        assert outcome.result == ProgressResult.PROGRESS_RESULT_UNKNOWN
        assert there.links.link.forwarded == {"no_answer": 1}
        assert reserved(stage.router) == 1


async def test_reports_with_ids_of_any_form_leave_the_connection_to_nats_as_it_is() -> None:
    rng = random.Random(9)
    async with a_stage(engine_count=1) as stage, another(stage) as (there, client):
        assert there.links.broker is not None
        assert there.links.link is not None
        changes: list[bool] = []
        there.links.broker.on_connection(changes.append)
        pick = await stage.client.route(token_ids=a_prompt(rng))
        odd = [
            "a" * 5000 + "-1",
            "a" * 1000 + "-1",
            "%ff *.>-1",
            "a b\r\nPUB x 0\r\n-1",
            "é" * 99 + "-1",
        ]
        finished_at = ProgressState.PROGRESS_STATE_FINISHED
        outcomes = await client.report(
            *(Progress(reservation_id=one, state=finished_at) for one in odd), finished(pick)
        )
        assert [one.result for one in outcomes] == [
            ProgressResult.PROGRESS_RESULT_INVALID,
            *[ProgressResult.PROGRESS_RESULT_UNKNOWN] * 4,
            ProgressResult.PROGRESS_RESULT_APPLIED,
        ]
        assert there.links.link.forwarded == {"answered": 1}, "the others name no replica"
        assert changes == []


async def test_fleet_commands_reach_replicas_that_start_later() -> None:
    async with a_stage(engine_count=2) as stage:
        await stage.client.drain_worker("worker-0")
        async with another(stage, ready=False) as (there, client):
            await until(lambda: list(there.core.fleet.drained) == ["worker-0"], "the drain")
            await client.undrain_worker("worker-0")
            await until(lambda: not stage.router.core.fleet.drained, "the end of the drain")


async def test_a_drain_here_and_an_undrain_there_at_the_same_moment_end_alike() -> None:
    async with a_stage(engine_count=2) as stage, another(stage) as (there, client):
        apps = [stage.router, there]

        def all_came(commands: int) -> bool:
            counted = ("drain", "undrain", "overtaken")
            return all(sum(app.commands.counts[one] for one in counted) == commands for app in apps)

        for i in range(20):
            one, other = (stage.client, client) if i % 2 else (client, stage.client)
            answers = await asyncio.gather(
                one.drain_worker("worker-0"),
                other.undrain_worker("worker-0"),
                return_exceptions=True,
            )
            await until(lambda i=i: all_came(2 * i + 2), "both commands at both replicas")
            drained = ["worker-0" in app.core.fleet.drained for app in apps]
            assert drained[0] == drained[1]
            lost = answers[1] if drained[0] else answers[0]
            won = answers[0] if drained[0] else answers[1]
            assert won == 1
            overtaken = isinstance(lost, KvRouteError) and lost.reason == "OVERTAKEN"
            assert lost == 1 or overtaken, "it came first, or was overtaken"


async def test_a_replica_that_is_killed_gives_its_load_back() -> None:
    rng = random.Random(4)
    async with a_stage(engine_count=2) as stage:
        address = f"127.0.0.1:{free_port()}"
        process = await router_process(stage.nats.url, address)
        try:
            async with KvRouteClient(address) as client:
                await client.wait_ready(30.0)
                for _ in range(5):
                    await client.route(token_ids=a_prompt(rng))
            await until(
                lambda: of_replicas(stage.router) == 5, "five requests of the other replica"
            )
            process.kill()
            await process.wait()
            assert of_replicas(stage.router) == 5, "it may come back"
            await until(lambda: of_replicas(stage.router) == 0, "its load given back")
            assert len(stage.router.core.fleet.replicas) == 0
        finally:
            await end(process)
