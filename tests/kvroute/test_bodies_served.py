"""The Python client's chat(), completion(), messages() and text() against a real router, whose
children render prompts, and an engine that answers over HTTP."""

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvroute.client import InvalidRequest, KvRouteClient, NoTokens, Pick, UnknownModel
from router.request import bodies
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from router.request.tokens import ModelPrompts
from tests.stage.prompts.engine import CHAT, StandIn, quiet, serving
from tests.stage.prompts.renderers import OTHER_TEMPLATE, local, of_template
from tests.stage.served import Served, served

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello " * 40}]}


class Engine(StandIn):
    """Answers chats, too, with the usage that its own tokens make."""

    bodies: list[bytes]

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.bodies.append(body)
        done = self.renderer.render(CHAT, body, "vllm")
        usage = {"prompt_tokens": done.count, "completion_tokens": 5, "prompt_tokens_details": None}
        return web.json_response({"choices": [], "usage": usage})

    async def tokenize(self, request: web.Request) -> web.Response:
        if request.path == "/v1/chat/completions":
            return await self.chat(request)
        return await super().tokenize(request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    return of_template(tmp_path_factory.mktemp("other"), OTHER_TEMPLATE)


@asynccontextmanager
async def routed(
    *, address: str = "", **models: ModelPrompts
) -> AsyncIterator[tuple[Served, KvRouteClient]]:
    """A router with a worker, and a client of it."""
    async with served(models_prompts=models) as stage:
        stage.fleet.add("w0", address=address)
        async with KvRouteClient(f"127.0.0.1:{stage.server.port}") as client:
            yield stage, client


async def sent(http: aiohttp.ClientSession, request: Any) -> Any:
    async with http.post(request.url, data=request.body, headers=request.headers) as response:
        return await response.json()


async def test_chats_are_proven_by_their_engine_and_report_what_it_counted(
    folder: RendererSettings,
) -> None:
    engine = Engine(folder)
    engine.bodies = []
    model = ModelPrompts(renderer=folder, processes=1, audit_share=0.0)
    async with (
        serving(engine) as at,
        routed(address=at.address, m=model) as (stage, client),
        aiohttp.ClientSession() as http,
    ):
        picks: list[Pick] = []
        for _ in range(2):
            async with client.chat(BODY, return_tokens=True) as request:
                answer = await sent(http, request)
                request.read_usage(answer["usage"], details_enabled=True)
                assert engine.bodies[-1] == request.body
                assert json.loads(request.body) == BODY
            picks.append(request.pick)
            await quiet(stage.texts.prompts)
        first, second = (pick.prompt for pick in picks)
        assert first is not None
        assert second is not None
        assert (first.source, first.verified) == ("engine", True)
        assert (second.source, second.verified, second.shape) == ("local", True, "chat")
        assert second.tokenizer_digest == Renderer(folder).digest
        done = Renderer(folder).render(CHAT, json.dumps(BODY).encode(), "vllm")
        assert second.token_ids == first.token_ids == array("I", done.token_bytes)
        assert second.count == done.count
        assert picks[1].overlap_tokens.usable > 0, "the first request's blocks are predicted"
        assert not stage.texts.prompts.differences
        assert len(stage.fleet.core.reservations) == 0


async def test_a_count_of_the_engine_that_differs_bars_the_shape(
    folder: RendererSettings, other: RendererSettings
) -> None:
    """The engine tokenises as the router does, but its chats take another template."""
    engine = Engine(folder)
    engine.bodies = []
    model = ModelPrompts(renderer=folder, processes=1, audit_share=0.0)
    async with (
        serving(engine) as at,
        routed(address=at.address, m=model) as (stage, client),
        aiohttp.ClientSession() as http,
    ):
        await client.route(chat_completion_body=BODY)
        await quiet(stage.texts.prompts)
        own, engine.renderer = engine.renderer, Renderer(other)
        async with client.chat(BODY) as request:
            assert request.prompt is not None
            assert request.prompt.source == "local"
            request.read_usage((await sent(http, request))["usage"], details_enabled=True)
        engine.renderer = own
        assert stage.texts.prompts.differences["m"] == 1
        pick = await client.route(chat_completion_body=BODY)
        assert pick.prompt is not None
        assert pick.prompt.source == "engine"


async def test_completions_messages_responses_and_texts_have_tokens_like_chats(
    folder: RendererSettings,
) -> None:
    renderer = Renderer(folder)
    async with routed(m=local(folder)) as (_, client):
        words = "hello again " * 20
        completion = {"model": "m", "prompt": words}
        messages = BODY | {"max_tokens": 8}
        response = {"model": "m", "input": words}
        for request, kind, content in (
            (client.completion(completion), bodies.COMPLETION, json.dumps(completion)),
            (client.messages(messages), bodies.MESSAGES, json.dumps(messages)),
            (client.responses(response), bodies.RESPONSES, json.dumps(response)),
            (client.text(words, model="m"), bodies.TEXT, words),
        ):
            async with request:
                assert request.prompt is not None
                wanted = renderer.render(kind, content.encode(), "vllm")
                assert (request.prompt.count, request.prompt.source) == (wanted.count, "local")


async def test_every_attempt_has_the_tokens_and_another_worker(folder: RendererSettings) -> None:
    async with routed(m=local(folder)) as (stage, client):
        stage.fleet.add("w1")
        workers = []
        async for attempt in client.attempts(chat_completion_body=BODY):
            async with attempt as request:
                workers.append(request.pick.worker_id)
                assert request.prompt is not None
                assert request.prompt.source == "local"
                if attempt.number == 1:
                    raise ConnectionResetError
        assert sorted(workers) == ["w0", "w1"]


async def test_without_tokens_a_chat_goes_by_its_length_or_is_refused() -> None:
    async with routed() as (_, client):
        async with client.chat(BODY) as request:
            assert request.prompt is not None
            assert (request.prompt.source, request.prompt.verified) == ("estimate", False)
            assert request.prompt.count == len(request.body) // 4
            assert request.prompt.estimate_reason.startswith("NO_TOKENIZER: ")
            assert len(request.prompt.token_ids) == 0
        with pytest.raises(NoTokens):
            await client.route(chat_completion_body=BODY, require_tokens=True)


async def test_a_bad_body_and_an_unknown_model_are_the_callers_mistakes(
    folder: RendererSettings,
) -> None:
    async with routed(m=local(folder)) as (stage, client):
        with pytest.raises(UnknownModel, match="none"):
            await client.route(chat_completion_body=BODY | {"model": "none"})
        with pytest.raises(InvalidRequest, match="messages"):
            async with client.chat({"model": "m", "messages": 7}):
                pass
        assert len(stage.fleet.core.reservations) == 0


async def test_render_and_list_tokenizers_show_what_a_chat_gets(folder: RendererSettings) -> None:
    async with routed(m=local(folder)) as (_, client):
        rendered = await client.render(chat_completion_body=BODY)
        pick = await client.route(chat_completion_body=BODY, return_tokens=True)
        assert pick.prompt is not None
        assert rendered.prompt.token_bytes == pick.prompt.token_bytes
        assert (await client.render(text="hello", model="m")).prompt.count > 0
        with pytest.raises(InvalidRequest, match="give a text or a body"):
            await client.render(model="m")
        again = await client.render(chat_completion_body=BODY, source="local")
        assert again.prompt == rendered.prompt
        (tokenizer,) = await client.list_tokenizers("m")
        assert (tokenizer.model, tokenizer.source) == ("m", "local")
        assert tokenizer.digest == rendered.prompt.tokenizer_digest
        assert await client.list_tokenizers("none") == []
