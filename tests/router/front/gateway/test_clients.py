"""The openai and anthropic packages against a gateway before stand-in engines."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import Engine, EngineConfig
from simulator.live.http_face import HttpFace
from tests.router.front.gateway.test_gateway import DEAD
from tests.stage.gateway import Stage, Worker, a_gateway, answering, streaming

PROMPT = [{"role": "user", "content": "hello " * 40}]


@asynccontextmanager
async def before_engines(count: int = 2) -> AsyncIterator[Stage]:
    """A gateway before stand-in engines, which serve the model "stand-in"."""
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(a_gateway())
        for number in range(count):
            scheduler = SchedulerConfig(block_count=512, block_size=16)
            engine = Engine(EngineConfig(f"w{number}", scheduler), ScaledClock(100.0))
            face = HttpFace(engine)
            await face.start()
            stack.push_async_callback(face.stop)
            stack.callback(engine.stop)
            stage.add(f"w{number}", face.address, model="stand-in")
        await stage.gateway.roster.refresh()
        yield stage


@pytest.fixture
def openai() -> ModuleType:
    """Imported on use: that takes seconds, and each process of a run imports this file."""
    return pytest.importorskip("openai")


@pytest.fixture
def anthropic() -> ModuleType:
    return pytest.importorskip("anthropic")


@asynccontextmanager
async def openai_client(openai: Any, stage: Stage) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(
        base_url=f"{stage.base}/v1", api_key="k", max_retries=0
    ) as client:
        yield client


async def test_openais_client_lists_models_chats_and_completes(openai: ModuleType) -> None:
    async with before_engines() as stage, openai_client(openai, stage) as client:
        models = [model.id async for model in client.models.list()]
        assert models == ["stand-in"]
        chat = await client.chat.completions.create(model="stand-in", messages=PROMPT, max_tokens=8)
        assert chat.choices[0].message.content
        assert chat.usage.completion_tokens == 8
        again = await client.completions.create(model="stand-in", prompt="hello", max_tokens=4)
        assert again.choices[0].text
        await stage.until(lambda: stage.open == 0)


async def test_openais_client_streams_with_and_without_usage(openai: ModuleType) -> None:
    async with before_engines() as stage, openai_client(openai, stage) as client:
        for options, usages in ((None, 0), ({"include_usage": True}, 1)):
            more = {} if options is None else {"stream_options": options}
            stream = await client.chat.completions.create(
                model="stand-in", messages=PROMPT, max_tokens=8, stream=True, **more
            )
            chunks = [chunk async for chunk in stream]
            assert len([chunk for chunk in chunks if chunk.usage is not None]) == usages
            assert all(chunk.choices or chunk.usage for chunk in chunks)
        await stage.until(lambda: stage.open == 0)


async def test_openais_client_raises_its_own_errors(openai: ModuleType) -> None:
    async with before_engines(1) as stage, openai_client(openai, stage) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="none", messages=PROMPT)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="stand-in", messages=[])
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.chat.completions.create(
                model="stand-in", messages=PROMPT, max_tokens="many"
            )
        stage.add("full", DEAD, model="full", total_slots=1)
        await stage.gateway.client.route(token_ids=[1, 2, 3], model="full")
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="full", messages=PROMPT)
        assert int(full.value.response.headers["retry-after"]) >= 1


def event(**about: object) -> bytes:
    return f"event: {about['type']}\ndata: {json.dumps(about)}\n\n".encode()


MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None,
}  # fmt: skip
USAGE = {"input_tokens": 7, "output_tokens": 0}
EVENTS = (
    event(type="message_start", message={**MESSAGE, "content": [], "usage": USAGE}),
    event(type="content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"}),
    event(type="content_block_stop", index=0),
    event(type="message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1}),
    event(type="message_stop"),
)


async def test_anthropics_client_gets_messages_streams_and_errors(
    anthropic: ModuleType,
) -> None:
    text = [{"type": "text", "text": "hi"}]
    whole = {**MESSAGE, "content": text, "stop_reason": "end_turn", "usage": USAGE}
    worker = Worker(answering(json.dumps(whole).encode()))
    async with (
        a_gateway(worker) as stage,
        anthropic.AsyncAnthropic(base_url=stage.base, api_key="k", max_retries=0) as client,
    ):
        answer = await client.messages.create(model="m", max_tokens=8, messages=PROMPT)
        assert answer.content[0].text == "hi"
        sent = worker.requests[0].headers.values()
        assert {"k", "Bearer k"} & set(sent), "the key goes on to the engine"
        worker.play = streaming(*EVENTS)
        async with client.messages.stream(model="m", max_tokens=8, messages=PROMPT) as stream:
            assert [text async for text in stream.text_stream] == ["hi"]
        with pytest.raises(anthropic.NotFoundError, match="none"):
            await client.messages.create(model="none", max_tokens=8, messages=PROMPT)
        await stage.until(lambda: stage.open == 0)
