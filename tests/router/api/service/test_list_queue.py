"""ListQueue and `kvroute queue`: which requests wait, why, and behind which, over real gRPC."""

import asyncio
import json
from typing import Any

import pytest

from events.feed.demand import Demand
from events.feed.replicas import Teller
from events.plane.facts import Epoch
from kvroute.client import KvRouteClient
from kvroute.v1 import ListQueueRequest, ListQueueResponse
from router.api.desk.request_lists import LIMIT, LIMIT_MAX, SLICE_ROWS, TENANTS_MAX, listed
from router.app.calls.queue import show_queue
from router.config.settings.queue_settings import BandSettings, QueueSettings
from router.decide.waiter import Waiter
from tests.router.api.service.test_waiting import full
from tests.stage.served import Served

BANDS = (BandSettings(name="low", from_priority=0), BandSettings(name="high", from_priority=10))
QUEUE = QueueSettings(bands=BANDS, bands_strict=True)


async def waiting(stage: Served, *requests: dict[str, Any]) -> list[asyncio.Future[Any]]:
    """Requests that wait, in this order of arrival."""
    return [await stage.queued(**about) for about in requests]


async def shown(stage: Served, **about: Any) -> int:
    defaults = {"model": "", "limit": 100, "as_json": False, "timeout_s": 5.0}
    return await show_queue(f"127.0.0.1:{stage.server.port}", **defaults | about)


def words(line: str) -> str:
    return " ".join(line.split())


async def test_a_row_says_why_a_request_waits_and_behind_which() -> None:
    async with full(QUEUE) as (stage, _):
        low = {"request_id": "low", "tenant": "blue", "queue_timeout_ms": 4000}
        await waiting(stage, low, {"request_id": "high", "priority": 12})
        stage.fleet.now_s += 0.5
        answer = await stage.call("ListQueue")
        high, low_row = answer.requests
        assert (high.request_id, high.place, high.band, high.priority) == ("high", 0, "high", 12)
        assert (high.held_by, high.behind) == ("room", "")
        assert (high.model, high.role) == ("m", "both")
        assert (low_row.request_id, low_row.place, low_row.behind) == ("low", 1, "high")
        assert (low_row.tenant, low_row.waited_s, low_row.held_by) == ("blue", 0.5, "turn")
        assert low_row.expires_in_s == pytest.approx(3.5)
        assert answer.waiting == 2
        bands = [(one.band, one.count, one.oldest_s) for one in answer.bands]
        assert bands == [("low", 1, 0.5), ("high", 1, 0.5)]
        assert {(one.tenant, one.count) for one in answer.tenants} == {("blue", 1), ("", 1)}


async def test_a_list_is_of_one_model_by_any_of_its_names() -> None:
    async with full() as (stage, _):
        stage.fleet.add("v0", model="n", model_aliases=("alias",), total_slots=1)
        await stage.route(model="n")
        await waiting(stage, {"model": "m", "request_id": "a"}, {"model": "n", "request_id": "b"})
        async with KvRouteClient(f"127.0.0.1:{stage.server.port}") as client:
            answer = await client.list_queue("alias")
            assert [one.request_id for one in answer.requests] == ["b"]
            assert answer.waiting == 1
            assert (await client.list_queue()).waiting == 2
            assert (await client.list_queue("nothing")).waiting == 0


async def test_a_list_is_bounded_and_written_in_slices() -> None:
    async with full(QueueSettings(max_waiting=9000)) as (stage, _):
        for number in range(LIMIT_MAX + 1):
            waiter = Waiter(str(number), 0.0, tenant=str(number % 70))
            stage.desk.admission.queue.offer("m", waiter, 0.0)
        for limit, count in (
            (0, LIMIT),
            (1, 1),
            (LIMIT_MAX, LIMIT_MAX),
            (LIMIT_MAX + 1, LIMIT_MAX),
        ):
            turns = 0
            steps = listed(stage.desk.admission, ListQueueRequest(limit=limit), 0.0)
            while True:
                try:
                    next(steps)
                    turns += 1
                except StopIteration as done:
                    answer = ListQueueResponse.FromString(done.value)
                    break
            assert len(answer.requests) == count
            assert turns == 1 + count // SLICE_ROWS
            assert answer.waiting == LIMIT_MAX + 1
            assert len(answer.tenants) == TENANTS_MAX + 1
            assert answer.tenants[-1].tenant == "other"
            assert sum(one.count for one in answer.tenants) == LIMIT_MAX + 1
        stage.desk.admission.queue.clear(0.0)


async def test_the_command_prints_a_table_and_a_line_of_sums(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with full(QUEUE) as (stage, _):
        low = {"request_id": "[bold]low", "tenant": "blue"}
        await waiting(stage, low, {"request_id": "high", "priority": 12}, {"request_id": "last"})
        stage.fleet.now_s += 0.25
        assert await shown(stage, limit=2) == 0
        head, first, second, more, sums = capsys.readouterr().out.splitlines()
        assert words(head).startswith(
            "model role request place priority waited ends in band tenant"
        )
        assert words(first) == "m both high 0 12 0.2 s 9.8 s high - room -"
        assert words(second) == "m both [bold]low 1 0 0.2 s 9.8 s low blue turn high"
        assert more == "and 1 more (--limit)"
        assert sums.startswith("3 waiting; bands: high 1 (oldest 0.2 s), low 2 (oldest 0.2 s); ")
        assert sums.endswith("tenants: - 2, blue 1")


async def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    async with full() as (stage, _):
        await waiting(stage, {"request_id": "a"})
        assert await shown(stage, as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["waiting"] == 1
        assert told["requests"][0]["requestId"] == "a"


async def test_an_empty_queue_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    async with full() as (stage, _):
        target = f"127.0.0.1:{stage.server.port}"
        assert await shown(stage) == 0
        assert capsys.readouterr().out == f"no request waits in the router at {target}\n"
        assert await shown(stage, model="m") == 0
        assert capsys.readouterr().out == f"no request for 'm' waits in the router at {target}\n"


async def test_what_waits_in_other_routers_is_shown_and_holds_requests_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with full(QUEUE) as (stage, _):
        await waiting(stage, {"request_id": "low"})
        demand = [Demand("m", "both", 10, 3, 1.5)]
        message = Teller("them", Epoch(1, 0)).message({}, stage.fleet.now_s, demand=demand)
        assert message is not None
        stage.fleet.core.on_inflight(message, stage.fleet.now_s)
        answer = await stage.call("ListQueue")
        bands = [(one.band, one.count, one.oldest_s) for one in answer.replica_bands]
        assert bands == [("low", 0, 0.0), ("high", 3, 1.5)]
        assert answer.requests[0].held_by == "room", "no worker has room for any"
        assert not (await stage.call("ListQueue", model="n")).replica_bands
        assert await shown(stage) == 0
        assert "in other replicas: bands: high 3 (oldest 1.5 s), low 0" in capsys.readouterr().out
