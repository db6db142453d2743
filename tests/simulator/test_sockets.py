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

from simulator.clock import ScaledClock
from simulator.engine import EngineConfig
from simulator.fleet import StandIn, stand_ins
from simulator.scheduler import SchedulerConfig

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
    return await asyncio.wait_for(socket.recv_multipart(), 10)


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


async def test_the_http_face_answers_as_vllm_does(
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
    async with http.post("/tokenize", json={"prompt": "hé"}) as response:
        assert (await response.json())["tokens"] == list("hé".encode())


async def complete(http: aiohttp.ClientSession, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


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
    assert samples["vllm:kv_cache_usage_perc"].value == 0
    assert samples["vllm:num_preemptions_total"].value == 0
    assert samples["vllm:cache_config_info"].labels["num_gpu_blocks"] == "257"
    assert samples["vllm:cache_config_info"].labels["block_size"] == "4"
    assert samples["process_start_time_seconds"].value == engine.engine.started_unix_s

    async with http.post("/reset_prefix_cache") as response:
        assert response.status == 200
    _, body = await complete(http, prompt=prompt, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_ends_with_usage_and_done(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    async with http.post("/v1/completions", json=body | options) as response:
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    parts = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [len(part["choices"]) for part in parts] == [1, 1, 1, 0]
    assert [part["choices"][0]["finish_reason"] for part in parts[:3]] == [None, None, "length"]
    assert parts[3]["usage"]["completion_tokens"] == 3


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
    async with asyncio.timeout(10):
        while engine.engine.load().running != count:
            async with http.get("/health") as response:
                assert response.status == 200
