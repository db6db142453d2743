"""The openai and anthropic packages against a gateway before stand-in engines."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from router.gateway.server.unpacking import zstd_library
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.clock import ScaledClock
from simulator.live.engine import Engine, EngineConfig
from simulator.live.http_api import HttpApi
from tests.router.gateway.server.test_gateway import DEAD
from tests.stage.gateway import Stage, Worker, a_gateway, answering, begun, cut, streaming

zstd = zstd_library()
PROMPT = [{"role": "user", "content": "hello " * 40}]


@asynccontextmanager
async def before_engines(count: int = 2) -> AsyncIterator[Stage]:
    """A gateway before stand-in engines, which serve the model "stand-in"."""
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(a_gateway())
        for number in range(count):
            scheduler = SchedulerConfig(block_count=512, block_size=16)
            engine = Engine(EngineConfig(f"w{number}", scheduler), ScaledClock(100.0))
            api = HttpApi(engine)
            await api.start()
            stack.push_async_callback(api.stop)
            stack.callback(engine.stop)
            stage.add(f"w{number}", api.address, model="stand-in")
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


WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        "near": {"$ref": "#/$defs/Near"},
        "why": {"type": "string"},
    },
    "required": ["place", "unit", "days", "near"],
    "$defs": {
        "Near": {
            "type": "object",
            "properties": {"sea": {"type": ["boolean", "null"]}},
            "required": ["sea"],
        }
    },
}
ARGUMENTS = {"place": "text", "unit": "celsius", "days": 1, "near": {"sea": False}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = {"type": "function", "function": {"name": "now"}}


async def test_openais_client_gets_the_tool_call_that_it_requires(openai: ModuleType) -> None:
    async with before_engines(1) as stage, openai_client(openai, stage) as client:
        asked: Any = {"model": "stand-in", "messages": PROMPT, "tools": TOOLS}
        for chosen, name, arguments, finish in (
            ("required", "weather", ARGUMENTS, "tool_calls"),
            (NOW, "now", {}, "stop"),
        ):
            whole = await client.chat.completions.create(tool_choice=chosen, **asked)
            (choice,) = whole.choices
            (call,) = choice.message.tool_calls
            assert (call.function.name, choice.finish_reason) == (name, finish)
            assert json.loads(call.function.arguments) == arguments
            assert whole.usage.completion_tokens == len(call.function.arguments)
            async with client.chat.completions.stream(tool_choice=chosen, **asked) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
            (again,) = streamed.message.tool_calls
            assert (again.function.name, streamed.finish_reason) == (name, finish)
            assert again.function.arguments == call.function.arguments
            assert again.id.startswith("call_")
        free = await client.chat.completions.create(max_tokens=8, tool_choice="auto", **asked)
        assert free.choices[0].message.content
        cut = await client.chat.completions.create(max_tokens=8, tool_choice="required", **asked)
        assert cut.choices[0].finish_reason == "length"
        assert len(cut.choices[0].message.tool_calls[0].function.arguments) == 8
        missing = {"type": "function", "function": {"name": "none"}}
        for chosen in ("sometimes", missing):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await client.chat.completions.create(tool_choice=chosen, **asked)
        await stage.until(lambda: stage.open == 0)
        assert stage.finish_reasons == {"tool_calls": 2, "stop": 2, "length": 2}


async def test_anthropics_client_gets_texts_usage_and_tool_calls_of_stand_ins(
    anthropic: ModuleType,
) -> None:
    async with (
        before_engines(1) as stage,
        anthropic.AsyncAnthropic(base_url=stage.base, api_key="k", max_retries=0) as client,
    ):
        asked: Any = {"model": "stand-in", "max_tokens": 600, "messages": PROMPT, "system": "s"}
        count = await client.messages.count_tokens(
            model="stand-in", messages=PROMPT, system=asked["system"]
        )
        first = await client.messages.create(**asked)
        assert (first.usage.input_tokens, first.usage.output_tokens) == (count.input_tokens, 256)
        assert (first.stop_reason, first.usage.cache_read_input_tokens) == ("end_turn", 0)
        async with client.messages.stream(**asked) as stream:
            text = "".join([text async for text in stream.text_stream])
            again = await stream.get_final_message()
        assert text == again.content[0].text == first.content[0].text
        cached = again.usage.cache_read_input_tokens
        assert cached == count.input_tokens // 16 * 16
        assert again.usage.input_tokens == count.input_tokens - cached
        short = await client.messages.create(**asked | {"max_tokens": 4})
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 4)
        asked["tools"] = [{"name": "weather", "input_schema": WEATHER}]
        for chosen in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            whole = await client.messages.create(tool_choice=chosen, **asked)
            async with client.messages.stream(tool_choice=chosen, **asked) as stream:
                streamed = await stream.get_final_message()
            for answer in (whole, streamed):
                (call,) = answer.content
                assert (call.type, call.name, call.input) == ("tool_use", "weather", ARGUMENTS)
                assert answer.stop_reason == "tool_use"
        missing = {"type": "tool", "name": "none"}
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await client.messages.create(tool_choice=missing, **asked)
        await stage.until(lambda: stage.open == 0)
        assert stage.finish_reasons == {"stop": 2, "length": 1, "tool_calls": 4}


async def test_openais_client_goes_on_with_responses_by_their_cache(openai: ModuleType) -> None:
    async with before_engines(2) as stage, openai_client(openai, stage) as client:
        items: list[Any] = [{"role": "user", "content": "hello " * 40}]
        asked: Any = {"model": "stand-in", "instructions": "Be brief.", "max_output_tokens": 8}
        cached: list[int] = []
        for turn in range(4):
            response = await client.responses.create(input=items, stream=turn % 2 == 1, **asked)
            if turn % 2 == 1:
                kinds = []
                async for event in response:
                    kinds.append(event.type)
                    last = event
                assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
                response = last.response
            assert response.output_text
            cached.append(response.usage.input_tokens_details.cached_tokens)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            items.append({"role": "user", "content": f"And {turn}?"})
            await stage.until(lambda: stage.open == 0)
        assert cached[0] == 0 < cached[1] < cached[2] < cached[3]
        assert stage.finish_reasons == {"length": 4}
        ended = await client.responses.create(model="stand-in", input="hello")
        assert ended.status == "completed"
        await stage.until(lambda: stage.open == 0)
        assert stage.finish_reasons == {"length": 4, "stop": 1}
        with pytest.raises(openai.NotFoundError, match="no worker is known to hold"):
            await client.responses.create(input="x", previous_response_id="resp_x", **asked)


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


async def test_anthropics_client_gets_messages_streams_and_errors(anthropic: ModuleType) -> None:
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


RESPONSE_EVENTS = [
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":'
    b'{"id":"resp_1","object":"response","created_at":1,"status":"in_progress","model":"m",'
    b'"output":[],"parallel_tool_calls":true,"tool_choice":"auto","tools":[]}}\n\n',
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    b'"sequence_number":1,"item_id":"i","output_index":0,"content_index":0,"delta":"a",'
    b'"logprobs":[]}\n\n',
]


async def test_codexs_way_a_zstd_body_and_a_streamed_response() -> None:
    httpx = pytest.importorskip("httpx")
    worker = Worker(streaming(*RESPONSE_EVENTS))
    body = {"model": "m", "input": "hello " * 20_000, "stream": True, "store": False}
    content = json.dumps(body).encode()
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/json", "session_id": "s"}
    async with a_gateway(worker) as stage, httpx.AsyncClient(trust_env=False) as client:
        got = b""
        packed = zstd.compress(content, level=3)
        url = f"{stage.base}/v1/responses"
        async with client.stream("POST", url, content=packed, headers=headers) as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_bytes():
                got += part
        assert got == b"".join(RESPONSE_EVENTS)
        assert worker.bodies == [content]
        assert worker.requests[0].headers["session_id"] == "s"


async def test_openais_client_raises_when_a_response_breaks(openai: ModuleType) -> None:
    async def breaks(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request, b"".join(RESPONSE_EVENTS))
        cut(request)
        return response

    async with a_gateway(Worker(breaks)) as stage, openai_client(openai, stage) as client:
        stream = await client.responses.create(model="m", input="x", stream=True)
        kinds: list[str] = []
        with pytest.raises(openai.APIError, match="worker's answer broke"):
            kinds.extend([event.type async for event in stream])


@pytest.mark.parametrize("size", [100, 3 << 20])
async def test_curl_waits_for_100_continue_with_a_long_body(size: int, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl")
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * size}]}
    file = tmp_path / "body"
    file.write_text(json.dumps(body))
    worker = Worker(answering(b'{"choices": []}'))
    async with a_gateway(worker) as stage:
        for most, status in ((32, b"200"), (1, b"413" if size > 1 << 20 else b"200")):
            stage.gateway.server._entrance.room.body_max = most << 20
            child = await asyncio.create_subprocess_exec(
                curl, "-sS", "--noproxy", "*", "-o", str(tmp_path / "answer"), "-w", "%{http_code}",
                "--data-binary", f"@{file}", f"{stage.base}/v1/chat/completions",
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            said, _ = await child.communicate()
            assert said == status
        assert json.loads(worker.bodies[0]) == body
