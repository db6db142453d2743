"""HTTP bodies as prompts: what is sent, what is read of them, and what a request has of them."""

import asyncio
import json
import types
from array import array
from typing import Any

import pytest

from kvroute.client import (
    InvalidRequest,
    KvRouteClient,
    PromptTokens,
    RoutedRequest,
    RouteOptions,
    Usage,
    pack_tokens,
    read_usage,
    route_request,
)
from kvroute.v1 import Progress, ProgressState, PromptSource, router_pb2
from tests.kvroute.scripted_router import Clock, Server, pick_of

MESSAGES = [{"role": "user", "content": "Wie geht's, 世界?"}]
BODY = {"model": "m", "messages": MESSAGES}
FIELDS = ("chat_completion_body", "completion_body", "messages_body", "responses_body")


def make_client(server: Server) -> KvRouteClient:
    clock = Clock(at_once=False)
    return KvRouteClient(server.address, clock=clock, sleep=clock.sleep)


def sent(**options: Any) -> Any:
    return route_request(request_id="r", **options)


@pytest.mark.parametrize("name", FIELDS)
def test_a_dict_is_sent_as_compact_utf_8_with_its_model_and_salt(name: str) -> None:
    request = sent(**{name: BODY | {"cache_salt": "s"}})
    assert json.loads(getattr(request, name)) == BODY | {"cache_salt": "s"}
    assert "世界".encode() in getattr(request, name)
    assert b'": ' not in getattr(request, name)
    assert (request.model, request.cache_salt) == ("m", "s")


@pytest.mark.parametrize("name", FIELDS)
def test_bytes_are_sent_untouched_and_their_model_is_read(name: str) -> None:
    body = b'{ "cache_salt":"s" , "model" : "m",\n "messages":[] }'
    request = sent(**{name: body})
    assert getattr(request, name) == body
    assert (request.model, request.cache_salt) == ("m", "s")


@pytest.mark.parametrize("body", [BODY | {"cache_salt": "s"}, b'{"model": "m", "cache_salt": "s"}'])
def test_the_callers_own_model_and_salt_go_before_the_bodys(body: Any) -> None:
    request = sent(chat_completion_body=body, model="mine", cache_salt="")
    assert (request.model, request.cache_salt) == ("mine", "")
    request = sent(chat_completion_body=body, model="mine")
    assert (request.model, request.cache_salt) == ("mine", "s")


def test_bytes_are_not_parsed_where_nothing_in_them_is_wanted() -> None:
    assert sent(chat_completion_body=b"\xff no JSON", model="m").model == "m"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "chat_completion_body is no JSON: "),
        (b"\xff\xfe\xfd", "chat_completion_body is no JSON: "),
        (b"[" * 100_000, "chat_completion_body is no JSON: "),
        (b"[]", "chat_completion_body is JSON, but no object"),
        (b'{"model": 3}', "model in chat_completion_body is no string"),
        ({"model": ["m"]}, "model in chat_completion_body is no string"),
        ({"model": "m", "cache_salt": 1}, "cache_salt in chat_completion_body is no string"),
        ({"model": "m", "messages": "\ud800"}, "lone surrogate"),
    ],
)
def test_a_body_that_can_t_be_read_is_refused_before_it_is_sent(body: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        sent(chat_completion_body=body)
    assert refused.value.reason == "MALFORMED_BODY"


@pytest.mark.parametrize("value", [{1, 2}, object(), float("nan"), b"bytes"])
def test_a_value_that_is_no_json_is_a_mistake_of_the_caller(value: object) -> None:
    with pytest.raises((TypeError, ValueError)) as mistake:
        sent(chat_completion_body={"model": "m", "messages": value})
    assert not isinstance(mistake.value, InvalidRequest)


def test_a_mapping_that_is_no_dict_is_encoded_like_one() -> None:
    body = types.MappingProxyType({"model": "m", "metadata": types.MappingProxyType({"a": 1})})
    assert sent(completion_body=body).completion_body == b'{"model":"m","metadata":{"a":1}}'


def test_a_body_has_no_second_prompt_beside_it() -> None:
    seconds: list[dict[str, Any]] = [
        {"completion_body": BODY}, {"text": "a"}, {"token_ids": [1]}, {"estimated_tokens": 1},
    ]  # fmt: skip
    for second in seconds:
        with pytest.raises(InvalidRequest, match="prompt"):
            sent(chat_completion_body=BODY, **second)


@pytest.mark.parametrize(
    ("method", "field", "path"),
    [
        ("chat", "chat_completion_body", "/v1/chat/completions"),
        ("completion", "completion_body", "/v1/completions"),
        ("messages", "messages_body", "/v1/messages"),
        ("responses", "responses_body", "/v1/responses"),
    ],
)
async def test_a_request_with_a_body_has_what_is_to_be_sent(
    server: Server, method: str, field: str, path: str
) -> None:
    body = json.dumps(BODY).encode()
    async with make_client(server) as client:
        request: RoutedRequest = getattr(client, method)(body, session_id="s", timeout_s=3)
        with pytest.raises(RuntimeError, match="not routed yet"):
            request.url  # noqa: B018  # the property raises
        assert (request.body, request.path) == (body, path)
        async with request:
            assert request.url == f"http://w0:8000{path}"
            assert request.headers == {"Content-Type": "application/json"}
            assert request.prompt is None, "of a router of an older release"
    asked = server.router.asked[0]
    assert (getattr(asked, field), asked.model, asked.session_id) == (body, "m", "s")


async def test_the_headers_of_a_body_are_those_of_the_pick_too(server: Server) -> None:
    server.router.answer = pick_of(dp_rank=3)
    async with make_client(server) as client, client.chat(BODY) as request:
        assert request.headers["X-data-parallel-rank"] == "3"


async def test_a_request_without_a_body_has_none_to_send(server: Server) -> None:
    async with make_client(server) as client:
        for request in (client.text("a text", model="m"), client.request(token_ids=[1])):
            async with request:
                for name in ("body", "path", "url", "headers"):
                    with pytest.raises(RuntimeError, match="no body"):
                        getattr(request, name)
    assert server.router.asked[0].text == "a text"


async def test_the_proof_of_a_body_s_tokens_is_in_the_pick(server: Server) -> None:
    tokens = [1, 70_000, 4_000_000_000]
    server.router.answer = pick_of(
        prompt=router_pb2.PromptTokens(
            count=3,
            token_bytes=pack_tokens(tokens),
            source=PromptSource.PROMPT_SOURCE_LOCAL,
            verified=True,
            tokenizer_digest="d",
            shape="chat",
        )
    )
    async with make_client(server) as client:
        async with client.chat(BODY, return_tokens=True) as request:
            prompt = request.prompt
        assert prompt == PromptTokens(3, "local", True, "d", "chat", "", pack_tokens(tokens))
        assert prompt.token_ids == array("I", tokens)
        server.router.answer.prompt.source = 99  # type: ignore[assignment]  # a newer router's
        pick = await client.route(chat_completion_body=BODY)
        assert pick.prompt is not None
        assert pick.prompt.source == "unknown"
    assert server.router.asked[0].return_tokens


async def test_the_usage_of_an_answer_is_reported_at_the_end(server: Server) -> None:
    usage = {
        "prompt_tokens": 70,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    async with make_client(server) as client, client.chat(BODY) as request:
        request.read_usage(None, details_enabled=True)
        counts = (request.output_tokens, request.cached_tokens, request.prompt_tokens)
        assert counts == (0, None, None)
        request.read_usage(usage, details_enabled=True)
        request.read_usage({}, details_enabled=True)
    assert await server.next_report() == Progress(
        reservation_id="r-w0",
        state=ProgressState.PROGRESS_STATE_FINISHED,
        output_tokens=8,
        cached_tokens=64,
        prompt_tokens=70,
    )


CHAT_USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}


@pytest.mark.parametrize(
    ("usage", "details_enabled", "read"),
    [
        (CHAT_USAGE, True, Usage(7, 2, 0)),
        (CHAT_USAGE, False, Usage(7, 2, None)),
        ({"input_tokens": 7, "output_tokens": 2}, True, Usage(7, 2, None)),
        (
            {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}},
            True,
            Usage(7, 2, 4),
        ),
        # Anthropic's input_tokens may or may not include the cached ones.
        (
            {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 4},
            True,
            Usage(None, 2, 4),
        ),
        (
            {"input_tokens": 7, "output_tokens": 2, "cache_read_input_tokens": 0},
            True,
            Usage(7, 2, 0),
        ),
        ({"prompt_tokens": "many", "completion_tokens": -1}, True, Usage(None, None, None)),
        ("nonsense", True, Usage(None, None, None)),
        (None, True, Usage(None, None, None)),
    ],
)
def test_the_counts_of_each_api_s_usage_are_read(
    usage: Any, details_enabled: bool, read: Usage
) -> None:
    assert read_usage(usage, details_enabled=details_enabled) == read
    if isinstance(usage, dict):
        held = types.SimpleNamespace(**usage)
        assert read_usage(held, details_enabled=details_enabled) == read


async def test_every_attempt_sends_the_same_body(server: Server) -> None:
    encoded = []
    async with make_client(server) as client:
        async for attempt in client.attempts(chat_completion_body=BODY, request_id="a"):
            async with attempt as request:
                encoded.append(request.body)
                assert request.url.endswith("/v1/chat/completions")
                if attempt.number == 1:
                    raise ConnectionResetError
    assert len(encoded) == 2
    assert encoded[0] is encoded[1]
    first, second = server.router.asked
    assert first.chat_completion_body == second.chat_completion_body == encoded[0]
    assert (first.model, second.model) == ("m", "m")
    assert list(second.excluded_worker_ids) == ["w0"]


async def test_the_options_of_a_request_stay_the_callers(server: Server) -> None:
    options: RouteOptions = {"chat_completion_body": dict(BODY)}
    async with make_client(server) as client:
        await asyncio.gather(client.route(**options), client.explain(**options))
    assert options == {"chat_completion_body": BODY}
