"""Prompts without tokens, over gRPC: tokens by a real child process or a real HTTP engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from indexer.identity import WorkerKey
from kvroute.v1 import prompts_pb2, prompts_pb2_grpc, router_pb2
from router.api.service import texts as texts_module
from router.api.service.texts import TextWaiting
from router.config.settings.queue_settings import QueueSettings
from router.fleet.health.warnings import WarningCode, WorkerWarning
from router.request.prompt_settings import RendererSettings
from router.request.refusal import Refusal
from router.request.rendering.renderer import Renderer
from router.request.tokens import ModelPrompts, Source
from tests.stage.garbage import freed_at_once
from tests.stage.prompts.engine import CHAT, StandIn, chat, quiet, serving
from tests.stage.prompts.tiny_tokenizer import make_folder
from tests.stage.served import Served, asked, refusal, served
from tests.stage.traces import PARENT, Kept
from tests.stage.waiting import until

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if messages[0].content == 'bad' %}{{ raise_exception('never so') }}{% endif %}"
)
LOCAL = router_pb2.PROMPT_SOURCE_LOCAL
ENGINE = router_pb2.PROMPT_SOURCE_ENGINE
ESTIMATE = router_pb2.PROMPT_SOURCE_ESTIMATE
Code = grpc.StatusCode
GUARD_S = 60.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    folder: Path = make_folder(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    return RendererSettings(folder=str(folder))


def local(settings: RendererSettings) -> dict[str, ModelPrompts]:
    return {"m": ModelPrompts(source=Source.LOCAL, renderer=settings, processes=1)}


def unaudited(settings: RendererSettings) -> dict[str, ModelPrompts]:
    """Of which no share is compared with the engine's tokens later."""
    return {"m": ModelPrompts(renderer=settings, processes=1, audit_share=0.0)}


def warnings(stage: Served, worker_id: str = "w0") -> list[WorkerWarning]:
    source = stage.fleet.view.sources[WorkerKey(worker_id, 0)]
    return stage.fleet.core.fleet.warnings(source, stage.fleet.clock())


@asynccontextmanager
async def with_worker(**about: Any) -> AsyncIterator[Served]:
    address, longest = about.pop("address", ""), about.pop("longest", 0)
    async with served(**about) as stage:
        stage.fleet.add("w0", address=address, max_model_len=longest)
        yield stage


@asynccontextmanager
async def with_engine(engine: StandIn, **about: Any) -> AsyncIterator[Served]:
    """With one worker, which is that engine."""
    async with serving(engine) as at, with_worker(address=at.address, **about) as stage:
        yield stage


async def streamed(stage: Served, *requests: router_pb2.RouteRequest) -> list[Any]:
    """The results of one batch, by index."""
    call = stage.router.RouteStream()
    items = [router_pb2.RouteItem(index=i, request=one) for i, one in enumerate(requests)]
    await call.write(router_pb2.RouteBatch(items=items))
    results: dict[int, Any] = {}
    async with asyncio.timeout(GUARD_S):
        while len(results) < len(requests):
            for result in (await call.read()).results:
                results[result.index] = result
    await call.done_writing()
    return [results[i] for i in range(len(requests))]


async def test_a_body_is_routed_by_the_tokens_that_it_has(settings: RendererSettings) -> None:
    done = Renderer(settings).render(CHAT, chat(), "vllm")
    async with with_worker(models_prompts=local(settings)) as stage:
        wanted = asked(chat_completion_body=chat(), return_tokens=True)
        answer = await stage.router.Route(wanted)
        assert answer.prompt.token_bytes == done.token_bytes
        assert (answer.prompt.count, answer.prompt.source) == (done.count, LOCAL)
        assert (answer.prompt.verified, answer.prompt.shape) == (False, "chat")
        assert answer.worker_id == "w0"
        assert answer.receipt.prompt_tokens == done.count
        quiet_one = await stage.route(chat_completion_body=chat())
        assert (quiet_one.prompt.token_bytes, quiet_one.prompt.count) == (b"", done.count)
        (by_tokens,) = await streamed(stage, asked(token_bytes=done.token_bytes))
        assert not by_tokens.response.HasField("prompt")
        explained = await stage.router.Explain(wanted)
        assert explained.prompt == answer.prompt
        assert explained.worker_id == "w0"
        assert stage.requests("picked") == 3


async def test_a_long_text_takes_the_fast_form_and_matches_what_tokens_matched(
    settings: RendererSettings,
) -> None:
    text = "what is the weather in Paris? " * 400
    async with with_worker(models_prompts=local(settings)) as stage:
        first = await stage.route(text=text, return_tokens=True)
        again = await stage.route(token_bytes=first.prompt.token_bytes)
        known = again.overlap_tokens.usable
        assert known > 1000
        assert (await stage.route(text=text)).overlap_tokens.usable == known


async def test_a_stream_answers_plain_items_at_once_and_texts_when_they_have_tokens(
    settings: RendererSettings,
) -> None:
    async with with_worker(models_prompts=local(settings)) as stage:
        plain, text, bad, malformed = await streamed(
            stage,
            asked(),
            asked(chat_completion_body=chat(), request_id="r"),
            asked(chat_completion_body=chat("bad")),
            asked(chat_completion_body=b"{"),
        )
        assert plain.response.worker_id == text.response.worker_id == "w0"
        assert text.response.prompt.source == LOCAL
        assert bad.status.code == malformed.status.code == Code.INVALID_ARGUMENT.value[0]
        assert "never so" in bad.status.message
        assert stage.requests("refused", "TEMPLATE_REFUSED") == 1
        assert stage.requests("refused", "MALFORMED_BODY") == 1


async def test_without_tokens_a_prompt_is_routed_by_its_length_and_matches_nothing() -> None:
    body = chat("x" * 4000)
    async with with_worker() as stage:
        for _ in range(2):
            answer = await stage.route(chat_completion_body=body, return_tokens=True)
            assert answer.prompt.source == ESTIMATE
            assert answer.prompt.count == len(body) // 4 == answer.receipt.prompt_tokens
            assert (answer.prompt.token_bytes, answer.prompt.verified) == (b"", False)
            assert answer.prompt.estimate_reason.startswith("NO_TOKENIZER: ")
            assert answer.overlap_tokens.raw == answer.overlap_tokens.predicted == 0
            assert answer.new_tokens == answer.prompt.count
        await stage.report(answer.reservation_id, cached_tokens=900, prompt_tokens=1000)
        checked = stage.fleet.core.fleet.self_check
        assert checked.results == {"untrusted": 1}, "nothing is known of the prompt's content"

        refused = await refusal(stage.route(chat_completion_body=body, require_tokens=True))
        assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "NO_TOKENIZER")
        assert stage.requests("refused", "NO_TOKENIZER") == 1


async def test_the_same_id_has_the_same_answer_for_the_same_text_alone() -> None:
    async with with_worker() as stage:
        one = await stage.route(text="one text", request_id="r")
        same = await stage.route(text="one text", request_id="r")
        assert same.reservation_id == one.reservation_id
        refused = await refusal(stage.route(text="two text", request_id="r"))
        assert refused.reason == "REQUEST_ID_REUSED"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (asked(text=""), "EMPTY_PROMPT"),
        (asked(chat_completion_body=b""), "EMPTY_PROMPT"),
        (asked(text="a", model="x" * 2000), "INVALID_FIELD"),
        (asked(text="a", model="unknown"), "UNKNOWN_MODEL"),
        (asked(text="a", tenant="x" * 2000), "INVALID_FIELD"),
    ],
)
async def test_what_is_wrong_beside_the_text_is_refused_and_counted(
    request_: router_pb2.RouteRequest, reason: str
) -> None:
    async with with_worker() as stage:
        refused = await refusal(stage.router.Route(request_))
        assert refused.reason == reason
        (item,) = await streamed(stage, request_)
        assert item.HasField("status")
        assert stage.requests("refused", reason) == 2


async def test_a_body_may_be_larger_than_other_requests_up_to_its_own_limit() -> None:
    async with with_worker(longest=10_000) as stage:
        answer = await stage.route(chat_completion_body=b"x" * (9 << 20))
        assert answer.prompt.count == 5000, "half of the worker's length"
        refused = await refusal(stage.route(token_bytes=bytes(9 << 20)))
        assert refused.reason == "MESSAGE_TOO_LARGE"
        refused = await refusal(stage.route(chat_completion_body=b"x" * ((32 << 20) + 1)))
        assert refused.reason == "MESSAGE_TOO_LARGE"


async def test_a_text_that_is_refused_is_freed_at_once() -> None:
    async with with_worker() as stage, freed_at_once(Refusal):
        for _ in range(3):
            await refusal(stage.route(text="a", model="x" * 2000))
            await streamed(stage, asked(text="a", model="x" * 2000))


async def test_a_caller_that_leaves_while_its_tokens_are_made_leaves_nothing(
    settings: RendererSettings,
) -> None:
    service = StandIn(settings)
    waits = asyncio.Event()
    release = asyncio.Event()

    async def slow(request: Any) -> Any:
        waits.set()
        await release.wait()
        return await StandIn.tokenize(service, request)

    service.tokenize = slow  # type: ignore[method-assign]
    async with with_engine(service) as stage, freed_at_once(TextWaiting):
        before = stage.state()
        call = stage.route(chat_completion_body=chat())
        async with asyncio.timeout(GUARD_S):
            await waits.wait()
            assert stage.texts.open == 1
            call.cancel()
            await until(lambda: not stage.texts.open, "none is open")
        assert stage.state() == before
        assert stage.requests("cancelled") == 1
        release.set()


async def test_a_text_that_is_cancelled_by_its_own_batch_is_counted(
    settings: RendererSettings,
) -> None:
    async with with_worker(models_prompts=local(settings)) as stage:
        call = stage.router.RouteStream()
        item = router_pb2.RouteItem(index=1, request=asked(chat_completion_body=chat()))
        cancel = router_pb2.RouteItem(index=1, cancel=True)
        await call.write(router_pb2.RouteBatch(items=[item, cancel]))
        await call.done_writing()
        assert not [result async for answer in call for result in answer.results]
        assert stage.requests("cancelled") == 1
        assert not stage.texts.open


async def test_rendering_counts_against_the_deadline(settings: RendererSettings) -> None:
    service = StandIn(settings)
    never = asyncio.Event()

    async def silent(request: Any) -> Any:
        await never.wait()

    service.tokenize = silent  # type: ignore[method-assign]
    async with with_engine(service) as stage:
        request = asked(chat_completion_body=chat())
        call = stage.router.RouteStream()
        item = router_pb2.RouteItem(index=1, request=request, timeout_ms=100)
        await call.write(router_pb2.RouteBatch(items=[item]))
        async with asyncio.timeout(GUARD_S):
            while not (got := (await call.read()).results):
                pass
        assert got[0].status.code == Code.DEADLINE_EXCEEDED.value[0]
        call.cancel()
        never.set()


async def test_a_text_waits_in_the_queue_like_any_other(settings: RendererSettings) -> None:
    queue = QueueSettings(max_waiting=8)
    async with served(models_prompts=local(settings), queue=queue) as stage:
        key = stage.fleet.add("w0", total_slots=1)
        first = await stage.route()
        call = stage.route(chat_completion_body=chat())
        async with asyncio.timeout(GUARD_S):
            await stage.waits(1)
            await stage.report(first.reservation_id)
            stage.fleet.say(key, running=0)
            stage.desk.changed()
            answer = await call
        assert answer.prompt.source == LOCAL
        second = stage.route(chat_completion_body=chat())
        async with asyncio.timeout(GUARD_S), freed_at_once(TextWaiting):
            await stage.waits(1)
            second.cancel()
            await stage.waits(0)
        assert stage.requests("cancelled") == 1


async def test_the_engine_s_tokens_prove_ours_and_its_count_bars_them(
    settings: RendererSettings,
) -> None:
    async with with_engine(StandIn(settings), models_prompts=unaudited(settings)) as stage:
        first = await stage.route(chat_completion_body=chat())
        assert (first.prompt.source, first.prompt.verified) == (ENGINE, True)
        await quiet(stage.texts.prompts)
        second = await stage.route(chat_completion_body=chat())
        assert (second.prompt.source, second.prompt.verified) == (LOCAL, True)
        assert not warnings(stage)
        await stage.report(
            second.reservation_id, "prefill_done", prompt_tokens=second.prompt.count + 5
        )
        third = await stage.route(chat_completion_body=chat())
        assert third.prompt.source == ENGINE
        (warning,) = warnings(stage)
        assert warning.code is WarningCode.TOKENS_DIFFER
        assert "such as chat:" in warning.sentence


async def test_a_worker_with_another_template_is_named_and_not_asked_for_tokens(
    settings: RendererSettings, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, TEMPLATE.replace("<|im_end|>", "!<|im_end|>"))
    async with (
        serving(StandIn(settings)) as same,
        serving(StandIn(RendererSettings(folder=str(folder)))) as odd,
        with_worker(address=same.address, models_prompts=unaudited(settings)) as stage,
    ):
        stage.fleet.add("w1", address=odd.address)
        for _ in range(2):
            await stage.route(chat_completion_body=chat())
            await quiet(stage.texts.prompts)
        questions = len(odd.asked)
        for worker_id in ("w0", "w1", "w0", "w1"):
            answer = await stage.route(chat_completion_body=chat(), allowed_worker_ids=[worker_id])
            assert answer.worker_id == worker_id
            assert (answer.prompt.source, answer.prompt.verified) == (LOCAL, worker_id == "w0")
        assert len(odd.asked) == questions
        assert warnings(stage, "w0") == []
        assert [one.code for one in warnings(stage, "w1")] == [WarningCode.TOKENS_DIFFER]


async def test_an_engine_without_tokenize_is_named_with_what_to_do(
    settings: RendererSettings,
) -> None:
    stand_in = StandIn(settings)
    stand_in.answer = lambda: web.Response(status=404)
    async with with_engine(stand_in, models_prompts=unaudited(settings)) as stage:
        answer = await stage.route(chat_completion_body=chat())
        assert (answer.prompt.source, answer.prompt.verified) == (LOCAL, False)
        (warning,) = warnings(stage)
        assert warning.code is WarningCode.TOKENS_UNPROVEN
        assert "has no /tokenize (HTTP status 404)" in warning.sentence
        assert "models[].prompts.source to local" in warning.sentence
        stand_in.answer = None
        await stage.route(chat_completion_body=chat())
        assert not warnings(stage)
    stand_in.answer = lambda: web.Response(status=404)
    async with with_engine(stand_in, models_prompts=local(settings)) as stage:
        await stage.route(chat_completion_body=chat())
        assert not warnings(stage)


async def test_prompts_over_the_bound_are_estimated(
    monkeypatch: pytest.MonkeyPatch, settings: RendererSettings
) -> None:
    monkeypatch.setattr(texts_module, "OPEN_MAX", 0)
    async with with_worker(models_prompts=local(settings)) as stage:
        answer = await stage.route(chat_completion_body=chat())
        assert answer.prompt.estimate_reason.startswith("RENDER_QUEUE_FULL: ")
        refused = await refusal(stage.route(chat_completion_body=chat(), require_tokens=True))
        assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "RENDER_QUEUE_FULL")
        assert refused.retry_s


def explained(stage: Served) -> Any:
    return stage.router.Explain(asked(chat_completion_body=chat()))


def rendered(stage: Served) -> Any:
    stub: Any = prompts_pb2_grpc.PromptsStub(stage.channel)
    return stub.Render(prompts_pb2.RenderRequest(model="m", chat_completion_body=chat()))


@pytest.mark.parametrize("call", [explained, rendered])
async def test_prompts_that_are_not_routed_count_for_the_bound(
    monkeypatch: pytest.MonkeyPatch, settings: RendererSettings, call: Any
) -> None:
    monkeypatch.setattr(texts_module, "OPEN_MAX", 1)
    service = StandIn(settings)
    waits, release = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> Any:
        waits.set()
        await release.wait()
        return await StandIn.tokenize(service, request)

    service.tokenize = slow  # type: ignore[method-assign]
    async with with_engine(service) as stage, asyncio.timeout(GUARD_S):
        first = asyncio.ensure_future(call(stage))
        await waits.wait()
        assert stage.texts.open == 1
        answer = await stage.route(chat_completion_body=chat())
        assert answer.prompt.estimate_reason.startswith("RENDER_QUEUE_FULL: ")
        release.set()
        assert (await first).prompt.count
        assert stage.texts.open == 0


async def test_the_making_of_tokens_is_a_span_beside_that_of_the_route(
    settings: RendererSettings,
) -> None:
    kept = Kept()
    async with with_worker(models_prompts=local(settings), tracing=kept.tracing) as stage:
        answer = await stage.route(chat_completion_body=chat(), traceparent=PARENT.header())
        await stage.route(chat_completion_body=chat())  # has no trace
    render, route = kept.one("kvroute.render"), kept.one("kvroute.route")
    assert render.parent_id == route.parent_id == PARENT.span_id
    assert render.attributes == {
        "kvroute.prompt_tokens": answer.prompt.count,
        "kvroute.tokens_from": "local",
    }


async def test_a_refusal_of_a_body_ends_its_span(settings: RendererSettings) -> None:
    kept = Kept()
    async with with_worker(models_prompts=local(settings), tracing=kept.tracing) as stage:
        body, parent = b'{"messages": 3}', PARENT.header()
        call = stage.route(chat_completion_body=body, traceparent=parent, require_tokens=True)
        await refusal(call)
    assert kept.names() == ["kvroute.render"]
    assert kept.one("kvroute.render").error == "MALFORMED_BODY"


def breaks(*_: Any, **__: Any) -> Any:
    raise RecursionError("broken on purpose")


def break_at(monkeypatch: pytest.MonkeyPatch, stage: Served, name: str) -> None:
    owners = {"tokens_of": stage.texts.prompts, "on_pick": stage.texts.prompts, "route": stage.desk}
    monkeypatch.setattr(owners.get(name, texts_module.text_codec), name, breaks)


@pytest.mark.parametrize("name", ["tokens_of", "put_tokens", "route", "on_pick", "answered"])
async def test_whatever_breaks_settles_its_caller_and_leaves_nothing_reserved(
    settings: RendererSettings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with with_worker(models_prompts=local(settings)) as stage:
        break_at(monkeypatch, stage, name)
        told = await asyncio.wait_for(refusal(stage.route(chat_completion_body=chat())), GUARD_S)
        assert told.code is Code.INTERNAL
        assert not len(stage.fleet.core.reservations)
        monkeypatch.undo()
        await stage.route(chat_completion_body=chat())


@pytest.mark.parametrize("name", ["on_pick", "answered"])
async def test_whatever_breaks_after_a_wait_settles_its_caller_too(
    settings: RendererSettings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with served(models_prompts=local(settings), queue=QueueSettings(max_waiting=8)) as stage:
        key = stage.fleet.add("w0", total_slots=1)
        first = await stage.route()
        call = asyncio.ensure_future(refusal(stage.route(chat_completion_body=chat())))
        async with asyncio.timeout(GUARD_S):
            await stage.waits(1)
            break_at(monkeypatch, stage, name)
            await stage.report(first.reservation_id)
            stage.fleet.say(key, running=0)
            stage.desk.changed()
            assert (await call).code is Code.INTERNAL
        assert not len(stage.fleet.core.reservations)


async def test_too_many_tokens_of_one_engine_refuse_no_request(settings: RendererSettings) -> None:
    stand_in = StandIn(settings)

    def makes_up(count: int) -> None:
        ids = [7] * count
        stand_in.answer = lambda: web.json_response({"token_ids": ids})

    models = {"m": ModelPrompts(processes=1)}
    async with with_engine(stand_in, models_prompts=models, longest=4096) as stage:
        for count in (4096, 4097, 9000, 200_000):
            makes_up(count)
            answer = await stage.route(chat_completion_body=chat())
            assert answer.prompt.source == ESTIMATE
            assert answer.prompt.count < 100
            stage.texts.prompts._engines.forget(stand_in.address)
        makes_up(3000)
        answer = await stage.route(chat_completion_body=chat())
        assert (answer.prompt.source, answer.prompt.count) == (ENGINE, 3000)
        makes_up(9000)
        told = await refusal(stage.route(chat_completion_body=chat(), require_tokens=True))
        assert told.reason == "RENDERER_UNAVAILABLE"
        assert "more than any worker takes" in told.message


async def test_a_caller_that_requires_tokens_has_those_of_the_next_engine(
    settings: RendererSettings,
) -> None:
    bad, good = StandIn(settings), StandIn(settings)
    bad.answer = lambda: web.json_response({"tokens": "none"})
    models = {"m": ModelPrompts(processes=1)}
    async with (
        serving(bad) as at_bad,
        serving(good) as at_good,
        served(models_prompts=models) as stage,
    ):
        stage.fleet.add("bad", address=at_bad.address)
        stage.fleet.add("good", address=at_good.address)
        for _ in range(6):
            stage.texts.prompts._engines.forget(at_bad.address)
            answer = await stage.route(chat_completion_body=chat(), require_tokens=True)
            assert answer.prompt.source == ENGINE
    assert bad.asked
