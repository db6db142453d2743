"""Bodies and headers as clients send them, and as hostile clients do."""

import json

import msgspec
import pytest

from router.front.openai_body import Kind, patched, read, shape_of
from router.front.refusals import FrontRefusal, Shape

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def body(**fields: object) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


def test_a_plain_chat_says_its_model_and_nothing_else() -> None:
    facts = read(body(), {})
    assert facts.model == "m"
    assert not facts.is_stream
    assert not facts.wants_usage
    assert facts.priority is None
    assert facts.output_tokens_max is None
    assert (facts.session_id, facts.tenant, facts.cache_salt) == ("", "", "")
    assert facts.has_one_prompt


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(("stream", "stream_options", "user", "priority", "max_tokens", "n"))
    facts = read(body(**nulls), {})
    assert not facts.is_stream
    assert facts.priority is None
    assert facts.names_priority, "though it has to be taken out of the body"


@pytest.mark.parametrize(
    ("options", "wants"),
    [({"include_usage": True}, True), ({"include_usage": False}, False), ({"other": 1}, False)],
)
def test_a_client_that_wants_the_usage(options: object, wants: bool) -> None:
    facts = read(body(stream=True, stream_options=options), {})
    assert facts.wants_usage is wants
    assert facts.names_stream_options


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({"x-session-id": "s"}, {"prompt_cache_key": "k"}, "s"),
        ({"x-claude-code-session-id": "s"}, {}, "s"),
        ({"session_id": "s"}, {}, "s"),
        ({"x-session-affinity": "s"}, {}, "s"),
        ({}, {"prompt_cache_key": "k"}, "k"),
        ({}, {"metadata": {"user_id": "user_1_account__session_0a1b2c3d-4e5f"}}, "0a1b2c3d-4e5f"),
        ({}, {"metadata": {"user_id": "somebody"}}, ""),
        ({}, {"metadata": {"user_id": 7}}, ""),
        ({}, {"metadata": [1]}, ""),
        ({}, {"user": "u"}, ""),
        ({"x-session-id": "s" * 2000}, {}, "s" * 1024),
    ],
)
def test_the_session_is_that_of_headers_then_of_the_body(
    headers: dict[str, str], fields: dict[str, object], session: str
) -> None:
    assert read(body(**fields), headers).session_id == session


def test_the_tenant_is_that_of_a_header_then_the_user() -> None:
    assert read(body(user="u"), {"x-tenant-id": "t"}).tenant == "t"
    assert read(body(user="u"), {}).tenant == "u"


@pytest.mark.parametrize(
    ("headers", "fields", "low_first", "priority"),
    [
        ({}, {"priority": 3}, False, 3),
        ({}, {"priority": 3}, True, -3),
        ({"x-priority": "-4"}, {"priority": 3}, False, -4),
        ({}, {"service_tier": "priority"}, False, 1),
        ({}, {"service_tier": "flex"}, False, -1),
        ({}, {"service_tier": "auto"}, False, None),
        ({}, {"service_tier": "flex", "priority": 0}, False, 0),
    ],
)
def test_the_priority_is_the_routers(
    headers: dict[str, str], fields: dict[str, object], low_first: bool, priority: int | None
) -> None:
    assert read(body(**fields), headers, low_first=low_first).priority == priority


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_output_tokens": 9}, 9),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": 1 << 40}, None),
    ],
)
def test_a_limit_on_the_answer_is_read(fields: dict[str, object], expected: int | None) -> None:
    assert read(body(**fields), {}).output_tokens_max == expected


@pytest.mark.parametrize(
    ("prompt", "single"),
    [("text", True), ([1, 2], True), (["a", "b"], False), ([[1], [2]], False), ([], True)],
)
def test_a_list_of_prompts_is_seen(prompt: object, single: bool) -> None:
    spaced = json.dumps({"prompt": prompt}, indent=4).encode()
    assert read(spaced, {}).has_one_prompt is single


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"model": "m"} trailing',
        b'{"model": NaN}',
        b'{"messages": Infinity}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"\x00\x01\x02",
        b'{"model": 1}',
        b'{"model": ["m"]}',
        b'{"stream": "yes"}',
        b'{"stream_options": [true]}',
        b'{"stream_options": {"include_usage": 1.5}}',
        b'{"user": {}}',
        b'{"priority": 1.5}',
        b'{"priority": 99999999999}',
        b'{"service_tier": 3}',
        b'{"max_tokens": -1}',
        b'{"max_tokens": "10"}',
        b'{"n": 0}',
        b'{"prompt_cache_key": []}',
        b'{"model": "' + b"m" * 2000 + b'"}',
    ],
)
def test_a_hostile_body_is_refused_with_a_sentence(hostile: bytes) -> None:
    with pytest.raises(FrontRefusal) as caught:
        read(hostile, {})
    assert caught.value.reason == "INVALID_BODY"
    assert 10 < len(caught.value.message) < 400


def test_a_refusal_names_the_field() -> None:
    with pytest.raises(FrontRefusal) as caught:
        read(b'{"stream_options": {"include_usage": "x"}}', {})
    assert caught.value.param == "stream_options.include_usage"
    assert "Expected `bool | null`" in caught.value.message


@pytest.mark.parametrize("text", ["high", "1e3", "", "9" * 5000])
def test_a_priority_header_is_a_number(text: str) -> None:
    headers = {"x-priority": text}
    if not text:
        assert read(body(), headers).priority is None
        return
    with pytest.raises(FrontRefusal):
        read(body(), headers)


def test_of_a_key_that_is_there_twice_the_last_counts_as_in_the_engines() -> None:
    assert read(b'{"model": "a", "model": "b"}', {}).model == "b"


@pytest.mark.parametrize("text", [b"{}", b" { } ", b'\n{"a": 1}', b'{"a":{"b":[1,"}"]}}'])
def test_absent_fields_are_inserted_and_the_rest_stays(text: bytes) -> None:
    new = patched(text, {"stream_options": {"include_usage": True}}, absent=True)
    assert json.loads(new) == {**json.loads(text), "stream_options": {"include_usage": True}}
    assert new.endswith(text.lstrip()[1:])


def test_present_fields_are_replaced_or_taken_out_and_values_keep_their_bytes() -> None:
    text = b'{"a": 1.50e3, "priority": 5, "s": "\\u00e9", "b": [ 1, 2 ]}'
    new = patched(text, {"priority": msgspec.UNSET, "c": None}, absent=False)
    assert new == b'{"a":1.50e3,"s":"\\u00e9","b":[ 1, 2 ],"c":null}'


def test_without_fields_the_body_is_the_same_object() -> None:
    text = body()
    assert patched(text, {}, absent=True) is text


def test_only_messages_have_anthropics_errors() -> None:
    assert shape_of(Kind.MESSAGES) is Shape.ANTHROPIC
    assert {shape_of(kind) for kind in Kind if kind is not Kind.MESSAGES} == {Shape.OPENAI}
