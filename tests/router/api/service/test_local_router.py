"""The router's calls for a port in the same process, held to those over gRPC."""

import asyncio
from pathlib import Path

import pytest

from indexer.hashing import block_hashes, pack_tokens
from indexer.identity import WorkerKey
from kvroute.client import (
    DeadlineExceeded,
    KvRouteError,
    NoWorker,
    RouteOptions,
    UnknownModel,
    UnusableAnswer,
)
from kvroute.v1 import MultimodalItem
from router.api.desk.desk import LONG_BYTES
from router.api.service.grpc_bounds import GrpcBounds
from router.config.settings.queue_settings import QueueSettings
from router.fleet.reservations.reservations import Ending
from router.request.prompt_settings import RendererSettings
from router.request.tokens import ModelPrompts, Source
from tests.stage.fleet import prompt
from tests.stage.gateway import Worker, a_gateway, answering
from tests.stage.picker import a_picker, picked, request_body, request_headers
from tests.stage.prompts.tiny_tokenizer import make_folder
from tests.stage.served import Served, served
from tests.stage.waiting import until

TOKENS = list(range(64))


def open_count(stage: Served) -> int:
    return len(stage.fleet.core.reservations)


async def test_a_request_is_picked_reported_and_over() -> None:
    async with served("w0", "w1") as stage, stage.local() as router:
        stage.fleet.cache(WorkerKey("w1", 0), prompt(64))
        over_grpc = await stage.route(tokens=64)
        await stage.report(over_grpc.reservation_id)
        async with router.request(token_ids=TOKENS, model="m") as request:
            assert request.pick.worker_id == over_grpc.worker_id == "w1"
            assert request.pick.overlap_tokens.usable == over_grpc.overlap_tokens.usable == 48
            assert open_count(stage) == 1
            await request.prefill_done()
            request.cached_tokens = 48
        assert open_count(stage) == 0
        assert stage.fleet.core.endings[Ending.FINISHED] == 2
        assert stage.requests("picked") == 2


async def test_a_failed_attempt_goes_to_another_worker() -> None:
    async with served("w0", "w1") as stage, stage.local() as router:
        tried = []
        async for attempt in router.attempts(token_ids=TOKENS):
            async with attempt as request:
                tried.append(request.pick.worker_id)
                if len(tried) == 1:
                    raise UnusableAnswer("half an answer")
        assert sorted(tried) == ["w0", "w1"]
        assert router.counts["retries"] == 1
        assert open_count(stage) == 0


async def test_refusals_are_the_errors_of_grpc() -> None:
    async with served() as stage, stage.local() as router:
        with pytest.raises(NoWorker) as none:
            await router.route(token_ids=TOKENS, timeout_s=0.01)
        assert none.value.reason == "NO_WORKER"
        stage.fleet.add("w0")
        with pytest.raises(UnknownModel) as unknown:
            await router.route(token_ids=TOKENS, model="other")
        assert unknown.value.reason == "UNKNOWN_MODEL"
        assert "other" in unknown.value.message
        assert stage.requests("refused", "UNKNOWN_MODEL") == 1
        assert open_count(stage) == 0


async def test_a_worker_that_comes_serves_a_request_that_is_tried_again() -> None:
    async with served() as stage, stage.local() as router:
        routing = asyncio.ensure_future(router.route(token_ids=TOKENS, timeout_s=60.0))
        await until(lambda: stage.requests("refused", "NO_WORKER") > 0, "it was refused")
        stage.fleet.add("w0")
        assert (await routing).worker_id == "w0"


async def test_messages_have_the_bounds_of_route() -> None:
    async with served("w0") as stage, stage.local() as router:
        with pytest.raises(KvRouteError) as large:
            await router.route(token_ids=bytes(9 << 20))
        assert large.value.reason == "MESSAGE_TOO_LARGE"
        labels = {"method": "Router/Route", "reason": "MESSAGE_TOO_LARGE"}
        assert stage.metric("calls_refused_total", **labels) == 1
        assert stage.guard.in_flight.bytes == 0


@pytest.mark.parametrize("is_text", [True, False])
async def test_requests_count_as_in_flight_by_their_size(is_text: bool) -> None:
    bounds = GrpcBounds(in_flight_mib_max=1)
    size = 700 << 10
    prompt: RouteOptions = {"text": "x" * size} if is_text else {"token_ids": bytes(size)}
    off = {"m": ModelPrompts(source=Source.OFF)}
    async with (
        served(bounds=bounds, queue=QueueSettings(), models_prompts=off) as stage,
        stage.local() as router,
    ):
        stage.fleet.add("w0", total_slots=1, total_blocks=100_000)
        await router.route(token_ids=TOKENS)
        first = asyncio.ensure_future(router.route(timeout_s=60.0, model="m", **prompt))
        await stage.waits(1)
        assert size <= stage.guard.in_flight.bytes < size + 1024
        with pytest.raises(KvRouteError) as refused:
            await router.route(timeout_s=0.01, **prompt)
        assert refused.value.reason == "TOO_MANY_BYTES"
        first.cancel()
        await until(lambda: not stage.guard.in_flight.bytes, "it left")


async def test_every_form_of_a_prompt_is_taken() -> None:
    async with served() as stage, stage.local() as router:
        stage.fleet.cache(stage.fleet.add("w0"), prompt(64))
        tokens = pack_tokens(TOKENS)
        hashes = block_hashes(tokens, 16)
        for form in (
            RouteOptions(token_ids=TOKENS),
            RouteOptions(block_hashes=hashes, block_size=16, prompt_tokens=64),
        ):
            assert (await router.route(**form)).overlap_tokens.usable == 48, form
        pick = await router.route(
            estimated_tokens=64,
            required_labels={},
            allowed_worker_ids=("w0",),
            multimodal_items=[MultimodalItem(id="picture", token_count=3)],
        )
        assert (pick.new_tokens, pick.overlap_tokens.raw, pick.worker_id) == (64, 0, "w0")


async def test_a_long_prompt_is_answered_in_steps() -> None:
    async with served("w0") as stage, stage.local() as router:
        pick = await router.route(token_ids=range(LONG_BYTES))
        assert pick.worker_id == "w0"
        assert stage.guard.in_flight.bytes == 0


async def test_a_text_gets_its_tokens(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "{{ messages[0].content }}")
    renderer = RendererSettings(folder=str(folder))
    prompts = {"m": ModelPrompts(source=Source.LOCAL, renderer=renderer, processes=1)}
    async with served("w0", models_prompts=prompts) as stage, stage.local() as router:
        pick = await router.route(text="some words", timeout_s=60.0)
        assert pick.prompt is not None
        assert pick.prompt.source == "local"
        await stage.texts.prompts.close()


@pytest.mark.parametrize("leaves", [True, False], ids=["it is cancelled", "its time is over"])
async def test_a_request_that_waits_no_longer_leaves_the_queue(leaves: bool) -> None:
    async with served(queue=QueueSettings()) as stage, stage.local() as router:
        stage.fleet.add("w0", total_slots=1)
        await router.route(token_ids=TOKENS)
        timeout_s = 60.0 if leaves else 0.05
        second = asyncio.ensure_future(router.route(token_ids=TOKENS, timeout_s=timeout_s))
        if leaves:
            await stage.waits(1)
            second.cancel()
        with pytest.raises(asyncio.CancelledError if leaves else DeadlineExceeded):
            await second
        assert len(stage.desk.admission) == 0
        assert open_count(stage) == 1


async def test_workers_are_listed() -> None:
    async with served("w0") as stage, stage.local() as router:
        assert [each.worker_id for each in await router.list_workers()] == ["w0"]


async def test_workers_that_stopped_answering_are_listed_alone() -> None:
    async with served() as stage, stage.local() as router:
        well, silent, sick, new = (stage.fleet.add(f"w{n}") for n in range(4))
        stage.fleet.turn(4.0, silent=[silent])
        stage.fleet.say(sick, healthy=False, probed=True)
        stage.fleet.say(new, healthy=False, probed=False)
        assert await router.list_workers(away=True) != await router.list_workers()
        away = [each.worker_id for each in await router.list_workers(away=True)]
        assert away == [silent.worker_id, sick.worker_id]
        stage.fleet.beat(silent)
        stage.fleet.say(silent)
        stage.fleet.say(sick, healthy=True)
        assert await router.list_workers(away=True) == []
        assert well.worker_id in [each.worker_id for each in await router.list_workers()]


async def test_workers_that_fell_silent_together_are_not_away() -> None:
    """The broker may have failed, and not they."""
    async with served() as stage, stage.local() as router:
        keys = [stage.fleet.add(f"w{n}") for n in range(4)]
        stage.fleet.turn(4.0, silent=keys)
        assert await router.list_workers(away=True) == []


async def test_a_gateway_in_the_routers_process() -> None:
    worker = Worker(answering(b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}'))
    async with a_gateway(worker, in_process=True, answer_headers=True) as stage:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        answer = await stage.ask("/v1/chat/completions", body)
        assert answer.status == 200
        assert answer.headers["X-Kvroute-Worker"] == "w0"
        await stage.until(lambda: stage.endings == {Ending.FINISHED: 1})
        body["model"] = "unknown"
        assert (await stage.ask("/v1/chat/completions", body)).status == 404
        stage.served.stopping.set()


async def test_a_picker_in_the_routers_process() -> None:
    async with a_picker(Worker(answering(b"{}")), in_process=True) as stage:
        call = stage.call()
        await call.write(request_headers("/v1/chat/completions"))
        await call.write(request_body(b'{"model":"m","messages":[]}'))
        assert picked(await call.read())
        assert stage.open == 1
        call.cancel()
        await stage.idle()
        assert stage.endings == {Ending.FAILED_CANCELLED: 1}
