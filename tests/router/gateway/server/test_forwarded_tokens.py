"""Chats that go on with their prompt's tokens: proven ones, to engines that take them."""

import json
from typing import Any

import pytest
from aiohttp import web

from router.request.tokens import ModelPrompts, Source
from tests.router.gateway.server.test_gateway import BODY, CHAT
from tests.stage.gateway import Worker, a_gateway

TOKENS = [7, 8, 4_000_000_000]
WHOLE = {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": len(TOKENS)}}


def engine(tokens: list[int] | None = TOKENS) -> Worker:
    """An engine that says what its tokens are; None: it can't."""

    async def play(request: web.Request, _: bytes) -> web.StreamResponse:
        if request.path.endswith("/render") or (request.path == "/tokenize" and tokens is None):
            raise web.HTTPNotFound
        if request.path != "/tokenize":
            return web.json_response(WHOLE)
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    return Worker(play)


async def forwarded(body: bytes, kind: str = "vllm", path: str = CHAT, **about: Any) -> bytes:
    """The body that a worker of this kind gets."""
    worker = engine(**about)
    async with a_gateway(
        worker, forward="tokens", prompts=ModelPrompts(source=Source.ENGINE)
    ) as stage:
        (key,) = stage.served.fleet.relays
        stage.served.fleet.say(key, engine=kind)
        await stage.gateway.roster.refresh()
        answer = await stage.ask(path, body)
        assert answer.status == 200, answer.body.decode()
        counted = stage.sample("kvroute_gateway_sent_total", kind="with_tokens", engine=kind)
    (sent,) = (
        body
        for body, request in zip(worker.bodies, worker.requests, strict=True)
        if request.path == path
    )
    assert counted == (sent != body)
    return sent


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("vllm", {"kv_transfer_params": {"prompt_token_ids": TOKENS}}),
        ("sglang", {"input_ids": TOKENS}),
    ],
)
async def test_the_engines_own_tokens_go_on_in_front_of_the_clients_bytes(
    kind: str, field: dict[str, Any]
) -> None:
    body = b'{ "model":"m", "messages":[{"role":"user","content":"h\\u00e9"}] }'
    sent = await forwarded(body, kind)
    assert json.loads(sent) == json.loads(body) | field
    assert sent.endswith(body[1:])


async def test_an_engine_that_takes_none_gets_the_body_alone() -> None:
    body = json.dumps(BODY).encode()
    assert await forwarded(body, "other") == body


async def test_without_tokens_the_body_goes_alone() -> None:
    body = json.dumps(BODY).encode()
    assert await forwarded(body, tokens=None) == body


@pytest.mark.parametrize("field", ["kv_transfer_params", "input_ids"])
async def test_fields_of_the_clients_own_stay(field: str) -> None:
    body = json.dumps(BODY | {field: None}).encode()
    assert await forwarded(body) == body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "hello"}),
        ("/v1/messages", BODY | {"max_tokens": 5}),
    ],
)
async def test_other_paths_go_on_as_they_are(path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    assert await forwarded(content, path=path) == content


async def test_by_default_no_tokens_go_on() -> None:
    worker = engine()
    body = json.dumps(BODY).encode()
    prompts = ModelPrompts(source=Source.ENGINE)
    async with a_gateway(worker, prompts=prompts) as stage, stage.post(CHAT, body) as answer:
        assert answer.status == 200
    assert worker.bodies[-1] == body
