"""One engine on real loopback sockets: events, replay, HTTP."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from events.engines.access import EngineAccess
from indexer.hashing import pack_tokens
from router.request import bodies
from router.request.proving.engine_tokens import Engines
from simulator.engines.scheduler import SchedulerConfig
from simulator.live.addresses import Ports, authority, endpoint, ports_of
from simulator.live.clock import ScaledClock
from simulator.live.engine import EngineConfig
from simulator.live.stand_ins import StandIn, stand_ins

CONFIG = EngineConfig("w0", SchedulerConfig(block_count=256, block_size=4, lora_names=("ad",)))


@pytest.fixture
async def engine() -> AsyncIterator[StandIn]:
    async with stand_ins([CONFIG], ScaledClock(speed=100.0)) as [one]:
        yield one


@pytest.fixture
async def http(engine: StandIn) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(engine.address, timeout=timeout) as session:
        yield session


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(socket.recv_multipart(), 60)


async def test_events_and_their_replay_come_as_from_vllm(engine: StandIn) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(engine.replay_endpoint)
        with context.socket(zmq.SUB) as subscriber:
            subscriber.connect(engine.events_endpoint)
            subscriber.subscribe("kv")
            first = 0
            heard: list[list[bytes]] = []
            while not heard:  # until the subscription has arrived, the engine talks to nobody
                await engine.engine.complete([*range(first, first + 8)], 1)
                first += 8
                if await subscriber.poll(20):
                    heard.append(await receive(subscriber))
        topic, number, payload = heard[0]
        assert topic == b"kv-events"
        [event] = msgspec.msgpack.decode(payload)[1]
        assert event["type"] == "BlockStored"
        assert event["block_size"] == 4

        sequence = int.from_bytes(number, "big")
        await dealer.send_multipart([b"nonsense"])
        await dealer.send_multipart([b"", number])
        assert await receive(dealer) == [b"", topic, number, payload]
        for later in range(sequence + 1, engine.publisher.next_sequence):
            assert (await receive(dealer))[2] == later.to_bytes(8, "big")
        assert await receive(dealer) == [b"", b"", b"\xff" * 8, b""]
        assert engine.publisher.malformed_requests == 1


@pytest.mark.parametrize(("host", "reached"), [("127.0.0.2", "127.0.0.2"), ("::", "127.0.0.1")])
async def test_engines_listen_where_they_are_to(host: str, reached: str) -> None:
    async with (
        stand_ins([CONFIG], ScaledClock(100.0), host=host) as [engine],
        aiohttp.ClientSession(engine.address) as http,
    ):
        for url in (engine.address, engine.events_endpoint, engine.replay_endpoint):
            assert url.partition("://")[2].rpartition(":")[0] == reached
        assert (await complete(http, prompt=[1], max_tokens=1))[0] == 200
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(engine.replay_endpoint)
            await dealer.send_multipart([b"", bytes(8)])
            assert await receive(dealer) == [b"", b"", b"\xff" * 8, b""]
        if host != "::":
            port = int(engine.address.rpartition(":")[2])
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)


def test_ports_follow_one_another() -> None:
    assert ports_of([False] * 2) == [Ports(), Ports()]
    assert ports_of([False] * 2, 8000) == [Ports(8000, 8001, 8002), Ports(8003, 8004, 8005)]
    assert ports_of([False] * 2, 8000, 5557) == [Ports(8000, 5557, 5558), Ports(8001, 5559, 5560)]
    assert ports_of([True], 0, 5557) == [Ports(0, 5557, 5558, 0)]
    assert ports_of([True, False], 10) == [Ports(10, 11, 12, 13), Ports(14, 15, 16)]
    assert [authority(host, 1) for host in ("0.0.0.0", "::", "::1", "10.0.0.1")] == [
        *("127.0.0.1:1", "127.0.0.1:1"),
        *("[::1]:1", "10.0.0.1:1"),
    ]
    assert [endpoint(host, 0) for host in ("::", "::1")] == ["tcp://*:*", "tcp://[::1]:*"]
    assert endpoint("0.0.0.0", 5557) == "tcp://0.0.0.0:5557"


async def test_the_http_api_answers_as_vllm_does(
    engine: StandIn, http: aiohttp.ClientSession
) -> None:
    async def get(path: str) -> Any:
        async with http.get(path) as response:
            assert response.status == 200
            return await response.json() if path != "/health" else None

    await get("/health")
    assert await get("/version") == {"version": "0.32.0"}
    models = (await get("/v1/models"))["data"]
    assert [(one["id"], one["parent"], one["max_model_len"]) for one in models] == [
        ("stand-in", None, 1024),
        ("ad", "stand-in", None),
    ]
    sources = await get("/kv_event_sources")
    assert sources["0"]["endpoint"] == engine.events_endpoint
    status, told = await post(http, "/tokenize", prompt="hé")
    assert (status, told["tokens"], told["count"]) == (200, list("hé".encode()), 3)
    assert (await post(http, "/detokenize", tokens=told["tokens"]))[1] == {"prompt": "hé"}
    assert (await post(http, "/detokenize", tokens=[65, 700]))[1] == {"prompt": "A<700>"}
    status, told = await post(http, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert bytes(told["tokens"]) == b"<|user|>\nhi\n<|assistant|>\n"
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": "x"})):
        assert (await post(http, path, **body))[0] == 400


async def test_a_router_gets_the_tokens_of_each_kind_of_body(engine: StandIn) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    cases: list[tuple[bodies.BodyFormat, dict[str, object], bytes]] = [
        (bodies.COMPLETION, {"prompt": "hi"}, b"hi"),
        (bodies.CHAT, {"messages": messages}, b"<|user|>\nhi\n<|assistant|>\n"),
        (
            bodies.MESSAGES,
            {"messages": messages, "system": "so", "max_tokens": 4},
            b"<|system|>\nso\n<|user|>\nhi\n<|assistant|>\n",
        ),
        (
            bodies.RESPONSES,
            {"input": "hi", "instructions": "so"},
            b"<|system|>\nso\n<|user|>\nhi\n<|assistant|>\n",
        ),
    ]
    engines = Engines()
    try:
        for kind, body, text in cases:
            content = msgspec.json.encode(body)
            made = await engines.ask(
                EngineAccess(engine.address), "vllm", kind, content, "stand-in"
            )
            assert made.token_bytes == pack_tokens(list(text))
    finally:
        await engines.close()


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def complete(http: aiohttp.ClientSession, **body: Any) -> tuple[int, dict[str, Any]]:
    return await post(http, "/v1/completions", **body)


async def stream(http: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    """The parts of a streamed answer, which must end with [DONE]."""
    async with http.post(path, json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_completions_tell_what_was_cached_and_metrics_count_it(
    engine: StandIn, http: aiohttp.ClientSession
) -> None:
    prompt = list(range(20))
    await complete(http, prompt=prompt, max_tokens=3)
    status, body = await complete(http, prompt=prompt, max_tokens=3, return_token_ids=True)
    assert status == 200
    assert body["usage"] == {
        "prompt_tokens": 20,
        "total_tokens": 23,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert len(body["choices"][0]["token_ids"]) == 3
    _, salted = await complete(http, prompt=prompt, max_tokens=1, cache_salt="mine")
    _, adapted = await complete(http, prompt=prompt, max_tokens=1, model="ad")
    for other in (salted, adapted):
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    async with http.get("/metrics") as response:
        text = await response.text()
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["vllm:prefix_cache_queries_total"].value == 80
    assert samples["vllm:prefix_cache_hits_total"].value == 16
    assert samples["vllm:num_requests_running"].value == 0
    assert samples["vllm:num_requests_waiting"].value == 0
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert f'{by_reason}{{engine="0",model_name="stand-in",reason="deferred"}} 0.0' in text
    assert samples["vllm:external_prefix_cache_queries_total"].value == 0
    assert samples["vllm:spec_decode_num_accepted_tokens_total"].value == 0
    assert 'vllm:request_success_total{engine="0",finished_reason="length"' in text
    assert samples["vllm:kv_cache_usage_perc"].value == 0
    assert samples["vllm:num_preemptions_total"].value == 0
    assert samples["vllm:cache_config_info"].labels["num_gpu_blocks"] == "257"
    assert samples["vllm:cache_config_info"].labels["block_size"] == "4"
    assert samples["process_start_time_seconds"].value == engine.engine.started_unix_s

    for name in (
        *("vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"),
        *("vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds"),
    ):
        assert samples[f"{name}_count"].value == 4
        assert samples[f"{name}_bucket"].labels["le"] == "+Inf"  # the last one
        assert samples[f"{name}_bucket"].value == 4
    assert (
        samples["vllm:e2e_request_latency_seconds_sum"].value
        > samples["vllm:time_to_first_token_seconds_sum"].value
        > 0
    )

    async with http.post("/reset_prefix_cache") as response:
        assert response.status == 200
    _, body = await complete(http, prompt=prompt, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_ends_with_usage_and_done(http: aiohttp.ClientSession) -> None:
    usage = {"stream_options": {"include_usage": True}}
    parts = await stream(http, "/v1/completions", prompt="hello", max_tokens=3, **usage)
    assert [len(part["choices"]) for part in parts] == [1, 1, 1, 0]
    assert [part["choices"][0]["finish_reason"] for part in parts[:3]] == [None, None, "length"]
    assert parts[3]["usage"]["completion_tokens"] == 3


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "image_url"}]},
    ]
}


async def test_a_chat_is_answered_and_the_next_turn_finds_it_in_the_cache(
    http: aiohttp.ClientSession,
) -> None:
    status, first = await post(http, "/v1/chat/completions", **CHAT, max_completion_tokens=4)
    assert status == 200
    assert first["object"] == "chat.completion"
    choice = first["choices"][0]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    asked = len("<|system|>\nAnswer in one word.\n<|user|>\nWhy?\n<|assistant|>\n")
    assert first["usage"]["prompt_tokens"] == asked
    assert first["usage"]["completion_tokens"] == 4
    longer = [*CHAT["messages"], choice["message"], {"role": "user", "content": None}]
    _, second = await post(http, "/v1/chat/completions", messages=longer, max_tokens=1)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == asked // 4 * 4


async def test_a_chat_may_be_streamed_and_ends_by_itself(http: aiohttp.ClientSession) -> None:
    parts = await stream(http, "/v1/chat/completions", **CHAT)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert [part["choices"][0]["finish_reason"] for part in parts[-2:]] == [None, "stop"]
    assert len(parts) == 256
    _, whole = await post(http, "/v1/chat/completions", **CHAT)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["message"]["content"] == "".join(one["content"] for one in deltas)


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_vllms_form(http: aiohttp.ClientSession, stream: bool) -> None:
    for body, status, message in (
        ({"prompt": [1] * 2000}, 400, "maximum length is 1024"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [-1]}, 400, ">= 0"),
        ({"prompt": [[1], [2]]}, 400, "prompt"),
        ({"max_tokens": 3}, 400, "prompt"),
        ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [1], "model": "nobody"}, 404, "`nobody` does not exist"),
    ):
        got, reply = await complete(http, **body, stream=stream)
        assert got == status
        assert message in reply["error"]["message"]
        assert reply["error"]["code"] == status
    for chat, message in (({}, "messages"), ({"messages": []}, "messages")):
        got, reply = await post(http, "/v1/chat/completions", **chat, stream=stream)
        assert got == 400
        assert message in reply["error"]["message"]


@pytest.mark.parametrize("body", [b"no JSON", b'{"prompt": "\xff"}', b'{"a": ' + b"[" * 100_000])
async def test_a_body_that_cannot_be_read_is_refused(
    http: aiohttp.ClientSession, body: bytes
) -> None:
    async with http.post("/v1/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "BadRequestError"


async def test_a_client_that_goes_away_aborts_its_request(
    engine: StandIn, http: aiohttp.ClientSession
) -> None:
    for stream in (False, True):
        asked = asyncio.create_task(complete(http, prompt=[1, 2], max_tokens=1000, stream=stream))
        await _until_running(1, engine, http)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await _until_running(0, engine, http)
    assert engine.engine.load().aborted == 2
    assert engine.engine.load().finished == 0


async def test_a_stopped_engine_is_unhealthy(engine: StandIn, http: aiohttp.ClientSession) -> None:
    engine.engine.stop()
    async with http.get("/health") as response:
        assert response.status == 503
    status, body = await complete(http, prompt=[1], max_tokens=1)
    assert status == 503
    assert "stopped" in body["error"]["message"]


async def _until_running(count: int, engine: StandIn, http: aiohttp.ClientSession) -> None:
    """Talks to the engine until it runs so many requests; bounded, since sockets take real time."""
    async with asyncio.timeout(60):
        while engine.engine.load().running != count:
            async with http.get("/health") as response:
                assert response.status == 200
