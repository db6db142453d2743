"""/v1/responses: a request that goes on from a response goes to the worker that holds it."""

import json
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.stage.gateway import Stage, Worker, a_gateway, answering, begun, cut, streaming

PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "m", "input": "hello"}


def response(name: str) -> bytes:
    about = {"id": name, "object": "response", "output": [{"id": "msg_1"}]}
    return json.dumps(about).encode()


def events(name: str) -> list[bytes]:
    return [
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"%s"}}\n\n'
        % name.encode(),
        b'event: response.output_text.delta\ndata: {"delta":"hi"}\n\n',
        b'event: response.completed\ndata: {"response":{"id":"resp_other","usage":null}}\n\n',
    ]


async def given(stage: Stage, **about: Any) -> None:
    assert (await stage.ask(PATH, {**ASK, **about})).status == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_goes_on_where_its_response_is(is_stream: bool) -> None:
    workers = [Worker(answering(b"{}")) for _ in range(3)]
    for number, worker in enumerate(workers):
        name = f"resp_{number}"
        worker.play = streaming(*events(name)) if is_stream else answering(response(name))
    async with a_gateway(*workers) as stage:
        while sum(not worker.bodies for worker in workers):
            await given(stage)
        assert stage.sample("kvroute_known", what="responses") == len(workers)
        for number, worker in enumerate(workers):
            before = len(worker.bodies)
            for _ in range(4):
                await given(stage, previous_response_id=f"resp_{number}")
            assert len(worker.bodies) == before + 4


async def test_a_response_that_no_worker_is_known_to_hold_is_an_error() -> None:
    workers = [Worker(answering(response("resp_a"))) for _ in range(2)]
    async with a_gateway(*workers) as stage:
        answer = await stage.ask(PATH, {**ASK, "previous_response_id": "resp_x"})
        assert answer.status == 404
        error = answer.error
        assert (error["code"], error["param"]) == (
            "previous_response_not_found",
            "previous_response_id",
        )
        await given(stage)
        (holder,) = [number for number, worker in enumerate(workers) if worker.bodies]
        excluded = f"w{holder}"
        stage.served.fleet.core.drain(excluded)
        answer = await stage.ask(PATH, {**ASK, "previous_response_id": "resp_a"})
        assert answer.status == 404
        message = answer.error["message"]
        assert "worker that holds the response can't serve" in message


async def test_a_fleet_of_one_worker_is_asked_for_any_response() -> None:
    worker = Worker(answering(response("resp_a")))
    async with a_gateway(worker) as stage:
        await given(stage, previous_response_id="resp_from_before_the_gateway_began")
        assert len(worker.bodies) == 1


async def test_an_answer_that_breaks_ends_with_an_event_of_its_protocol() -> None:
    created = events("resp_a")[0].replace(b'"type"', b'"sequence_number":0,"type"')
    delta = b'data: {"type":"response.output_text.delta","sequence_number": 41,"delta":"a"}\n\n'

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        response = await begun(request, created + delta)
        cut(request)
        return response

    got = b""
    async with (
        a_gateway(Worker(play)) as stage,
        stage.post(PATH, {**ASK, "stream": True}) as answer,
    ):
        with suppress(aiohttp.ClientPayloadError):
            async for chunk in answer.content.iter_any():
                got += chunk
    assert got.startswith(created + delta)
    name, _, data = got.removeprefix(created + delta).partition(b"\n")
    last = json.loads(data.removeprefix(b"data: "))
    assert (name, last["type"], last["sequence_number"]) == (b"event: error", "error", 42)
    assert last["code"] == last["error"]["code"] == "WORKER_FAILED"
