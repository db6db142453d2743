"""The operator's own numbers, from an engine's page of metrics to its loads."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from events.engines.access import EngineAccess
from events.engines.pages.metrics_page import LINES_MAX
from events.engines.pages.probe import Probe
from events.engines.table import READINGS

LOADS = """{"loads": [{"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 0},
                      {"dp_rank": 1, "num_running_reqs": 2, "num_waiting_reqs": 0}]}"""
VLLM = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
GAUGES = 'sglang:gen_throughput{dp_rank="1"} 12.5\nroom_celsius 21\n'
WANTED = {"tokens_per_s": "sglang:gen_throughput", "celsius": "room_celsius"}


@asynccontextmanager
async def probing(
    engine: str, pages: dict[str, str], wanted: dict[str, str]
) -> AsyncIterator[tuple[Probe, Counter[str]]]:
    """A probe of an engine with these pages, and the requests for each; others are not there."""
    requested = Counter[str]()

    async def page(request: web.Request) -> web.Response:
        requested[request.path] += 1
        text = pages.get(request.path)
        return web.Response(status=404) if text is None else web.Response(text=text)

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        access = EngineAccess(str(server.make_url("")))
        yield Probe(session, engine, access, own_numbers=wanted), requested


async def test_they_are_on_the_page_of_metrics_where_the_load_is_on_another() -> None:
    """They come with the next load, which waits for no other page."""
    pages = {"/v1/loads": LOADS, "/metrics": GAUGES}
    async with probing("sglang", pages, WANTED) as (probe, requested):
        assert await probe.ask_load()
        assert requested == {"/v1/loads": 1}
        assert probe.loads[0].own_numbers == {}
        await probe.ask_own_numbers()
        assert await probe.ask_load()
        assert {rank: load.own_numbers for rank, load in probe.loads.items()} == {
            0: {"celsius": 21.0},
            1: {"celsius": 21.0, "tokens_per_s": 12.5},
        }


@pytest.mark.parametrize("wanted", [{}, {"celsius": "room_celsius"}])
async def test_the_page_of_metrics_is_requested_once_where_it_has_the_load(
    wanted: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with probing("vllm", {"/metrics": VLLM + GAUGES}, wanted) as (probe, requested):
        assert await probe.ask_load()
        await probe.ask_own_numbers()
        assert probe.loads[0].own_numbers == ({"celsius": 21.0} if wanted else {})
        assert requested == {"/metrics": 1}
        assert not caplog.records


async def test_nobody_requests_the_page_of_metrics_for_no_number() -> None:
    async with probing("sglang", {"/v1/loads": LOADS}, {}) as (probe, requested):
        assert await probe.ask_load()
        await probe.ask_own_numbers()
        assert requested == {"/v1/loads": 1}


async def test_a_number_that_the_page_lacks_is_absent_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = {"/metrics": VLLM + "room_celsius 21\n"}
    async with probing("vllm", pages, WANTED) as (probe, _):
        assert await probe.ask_load()
        assert probe.loads[0].own_numbers == {"celsius": 21.0}
        pages["/metrics"] = VLLM
        assert await probe.ask_load()
        assert probe.loads[0].own_numbers == {}
        (record,) = caplog.records
        assert "/metrics has no sglang:gen_throughput yet (engines.numbers.tokens_per_s)" in (
            record.getMessage()
        )


@pytest.mark.parametrize(
    "metrics", [None, 'room_celsius{a="} 1\n', "room_celsius 1\n" * (LINES_MAX + 1)]
)
async def test_a_page_of_metrics_that_says_nothing_costs_no_load(metrics: str | None) -> None:
    pages = {"/v1/loads": LOADS} | ({} if metrics is None else {"/metrics": metrics})
    async with probing("sglang", pages, WANTED) as (probe, _):
        assert await probe.ask_load()
        await probe.ask_own_numbers()
        assert await probe.ask_load()
        assert [load.own_numbers for load in probe.loads.values()] == [{}, {}]
        assert ("404" if metrics is None else "the metrics page") in probe.trouble
        pages["/metrics"] = GAUGES
        await probe.ask_own_numbers()
        assert await probe.ask_load()
        assert probe.loads[0].own_numbers == {"celsius": 21.0}
        assert probe.trouble == ""


@pytest.mark.parametrize("engine", READINGS)
def test_the_page_of_metrics_is_a_load_page_of_each_engine(engine: str) -> None:
    reading = READINGS[engine]
    assert reading.metrics_path in [page.path for page in reading.load_pages]
