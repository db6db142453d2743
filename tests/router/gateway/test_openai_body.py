"""Bodies and headers as clients send them, and as hostile clients do."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from router.gateway.lenient import flag, whole
from router.gateway.openai_body import INT32_MAX, TEXT_MAX, Facts
from router.gateway.refusals import GatewayRefusal
from router.gateway.top_level import changed
from router.request import bodies

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def read(
    content: bytes,
    headers: Mapping[str, str],
    kind: bodies.BodyFormat = bodies.CHAT,
    *,
    low_first: bool = False,
) -> Facts:
    return Facts(content, headers, kind, low_first=low_first)


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
        ({}, {"user": "u"}, ""),
        ({"x-session-id": "s" * 2000}, {}, "s" * 1024),
        ({}, {"metadata": {"user_id": "user_1_account__session_0a1b2c3d-4e5f"}}, "0a1b2c3d-4e5f"),
        ({}, {"metadata": {"user_id": "somebody"}}, ""),
        ({}, {"metadata": {"user_id": 7}}, ""),
        ({}, {"metadata": [1]}, ""),
    ],
)
def test_the_session_is_that_of_headers_then_of_the_body(
    headers: dict[str, str], fields: dict[str, object], session: str
) -> None:
    kind = bodies.MESSAGES if "metadata" in fields else bodies.CHAT
    assert read(body(**fields), headers, kind).session_id == session


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
    ("kind", "fields", "expected"),
    [
        (bodies.CHAT, {"max_tokens": 7}, 7),
        (bodies.CHAT, {"max_tokens": 7, "max_completion_tokens": 5}, 5),
        (bodies.RESPONSES, {"max_tokens": 7, "max_output_tokens": 9}, 9),
        (bodies.CHAT, {"max_tokens": 7, "n": 3}, 21),
        (bodies.CHAT, {"max_tokens": 1 << 40}, None),
    ],
)
def test_a_limit_on_the_answer_is_read(
    kind: bodies.BodyFormat, fields: dict[str, object], expected: int | None
) -> None:
    assert read(body(**fields), {}, kind).output_tokens_max == expected


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
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "\xff"}',
        b"\x00\x01\x02",
        b'{"model": 1}',
        b'{"model": ["m"]}',
        b'{"model": "' + b"m" * 2000 + b'"}',
    ],
)
def test_a_hostile_body_is_refused_with_a_sentence(hostile: bytes) -> None:
    with pytest.raises(GatewayRefusal) as caught:
        read(hostile, {})
    assert caught.value.reason == "INVALID_BODY"
    assert 10 < len(caught.value.message) < 400


def test_a_refusal_names_the_field() -> None:
    with pytest.raises(GatewayRefusal) as caught:
        read(b'{"model": 5}', {})
    assert caught.value.param == "model"


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from(["16", "16.0", " 16 ", "1_000", "true", "No", "off", "x" * 3000, 1 << 80]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
HELPFUL = (
    "stream", "stream_options", "user", "prompt_cache_key", "priority", "service_tier", "n",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "cache_salt", "background",
    "metadata", "prompt", "previous_response_id", "lora_path", "vllm_xargs", "kv_transfer_params",
    "include_usage", "seed", "temperature", "bootstrap_port",
)  # fmt: skip


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(HELPFUL), ODD), st.text(max_size=20))
@pytest.mark.parametrize("kind", bodies.FORMATS, ids=[kind.name for kind in bodies.FORMATS])
def test_a_field_that_helps_routing_refuses_nobody(
    kind: bodies.BodyFormat, fields: dict[str, object], rank: str
) -> None:
    facts = read(body(**fields), {"x-priority": rank, "x-slo-ttft-ms": rank}, kind)
    assert facts.model == "m"
    assert abs(facts.priority or 0) <= INT32_MAX
    assert len(facts.session_id + facts.tenant + facts.cache_salt) <= 3 * TEXT_MAX
    assert facts.is_stream is (in_pydantic(bool, fields.get("stream")) or False)
    background = in_pydantic(bool, fields.get("background")) or False
    assert facts.is_background is (background and kind.is_continued)


NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.floats().map(json.dumps),
    st.from_regex(r'"[ +-]?[0-9_]{0,5}(\.[0-9]{0,2})? ?"', fullmatch=True),
    st.sampled_from(["true", "True", "ON", "f", "yes", "0", "01", "null", "\\u0031"]).map(
        lambda word: f'"{word}"'
    ),
    st.sampled_from(["true", "false", "null", "[]", "{}", "[1]", '""', "1e400", "-0.0", "1.6e1"]),
)


def in_pydantic(kind: type[Any], value: object) -> Any:
    """A value as pydantic's lax rules read it; None: they refuse it, or it is null."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


@settings(max_examples=1000)
@given(NUMBERS)
def test_numbers_and_flags_are_read_as_the_engines_pydantic_reads_them(written: str) -> None:
    value, raw = json.loads(written), written.encode()
    assert flag(raw) is in_pydantic(bool, value)
    expected = in_pydantic(int, value)
    if expected is None or len(str(expected)) < 40:
        assert whole(raw) == expected


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (b"16", 16), (b"16.0", 16), (b'"16"', 16), (b'"16.0"', 16), (b"1.6e1", 16), (b"true", 1),
        (b"null", None), (b"16.5", None), (b"NaN", None), (b"1e400", None), (b'"high"', None),
    ],
)  # fmt: skip
def test_forms_of_one_number(written: bytes, read_as: int | None) -> None:
    with_form = b'{"max_tokens": %b, "priority": %b, "temperature": 1}' % (written, written)
    facts = read(with_form, {})
    assert (facts.output_tokens_max, facts.priority) == (read_as, read_as)


@pytest.mark.parametrize("text", ["high", "1e3", "", "9" * 5000])
def test_a_priority_header_that_is_no_number_counts_as_none(text: str) -> None:
    assert read(body(), {"x-priority": text}).priority is None
    assert read(body(priority=4), {"x-priority": text}).priority == 4


def test_numbers_that_pythons_parser_takes_leave_texts_as_they_are() -> None:
    facts = read(b'{"model": "NaN-1", "seed": NaN, "x": [-Infinity], "user": "Infinity"}', {})
    assert (facts.model, facts.tenant, facts.is_readable) == ("NaN-1", "Infinity", False)


def test_a_long_salt_is_a_salt_of_its_own() -> None:
    salts = {read(body(cache_salt=salt), {}).cache_salt for salt in ("s" * 1500, "s" * 1501)}
    assert len(salts) == 2
    assert all(len(salt) <= TEXT_MAX for salt in salts)


def test_of_a_key_that_is_there_twice_the_last_counts_as_in_the_engines() -> None:
    assert read(b'{"model": "a", "model": "b"}', {}).model == "b"


@pytest.mark.parametrize("text", [b"{}", b" { } ", b'\n{"a": 1}', b'{"a":{"b":[1,"}"]}}'])
def test_absent_fields_are_inserted_and_the_rest_stays(text: bytes) -> None:
    new = changed(text, {"stream_options": {"include_usage": True}}, absent=True)
    assert json.loads(new) == {**json.loads(text), "stream_options": {"include_usage": True}}
    assert new.endswith(text.lstrip()[1:])


def test_present_fields_are_replaced_or_taken_out_and_values_keep_their_bytes() -> None:
    text = b'{"a": 1.50e3, "priority": 5, "s": "\\u00e9", "b": [ 1, 2 ]}'
    new = changed(text, {"priority": msgspec.UNSET, "c": None}, absent=False)
    assert new == b'{"c":null,"a": 1.50e3,  "s": "\\u00e9", "b": [ 1, 2 ]}'


def test_without_fields_the_body_is_the_same_object() -> None:
    text = body()
    assert changed(text, {}, absent=True) is text
