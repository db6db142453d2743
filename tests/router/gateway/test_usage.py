"""Answers that pass: bytes, first token, usage."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.client.messages.usage import Usage
from router.gateway.usage import EVENT_BYTES_MAX, KEPT_BYTES, AnswerReader
from router.request.bodies import CHAT, FORMATS, MESSAGES, RESPONSES, BodyFormat

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 3,
    "total_tokens": 23,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def event(**about: object) -> bytes:
    return b"data: " + json.dumps({"id": "c", **about}, separators=(",", ":")).encode() + b"\n\n"


def content(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


LAST = event(choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"
STREAM = [content("Hel"), content('lo "usage": {"prompt_tokens": 1}'), content("")]


def passed(reader: AnswerReader, chunks: Iterable[bytes]) -> bytes:
    return b"".join([*(reader.feed(chunk) for chunk in chunks), reader.rest()])


def test_a_stream_passes_as_it_comes_and_its_usage_is_read() -> None:
    reader = AnswerReader(CHAT, is_stream=True)
    chunks = [*STREAM, LAST, DONE]
    assert [reader.feed(chunk) for chunk in chunks] == chunks
    assert reader.usage() == Usage(20, 3, 16)
    assert reader.chunks == 5


@pytest.mark.parametrize("is_stream", [True, False])
def test_why_an_answer_ended_is_read_from_its_end_and_not_from_its_text(is_stream: bool) -> None:
    text = 'she said "finish_reason": "length", "stop_reason": "refusal"'
    chat, messages = (AnswerReader(kind, is_stream=is_stream) for kind in (CHAT, MESSAGES))
    if is_stream:
        last = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        passed(chat, [content(text), last, LAST, DONE])
        passed(messages, [content(text), event(type="message_delta", delta={"stop_reason": "end"})])
    else:
        choice = {"message": {"content": text}, "finish_reason": "stop", "stop_reason": None}
        passed(chat, [json.dumps({"choices": [choice], "usage": USAGE}).encode()])
        passed(messages, [json.dumps({"content": [text], "stop_reason": "end"}, indent=1).encode()])
    assert (chat.finish_reason(), messages.finish_reason()) == ("stop", "end")


def test_an_answer_that_does_not_say_why_it_ended_has_no_reason() -> None:
    for kind in FORMATS:
        reader = AnswerReader(kind, is_stream=True)
        passed(reader, [*STREAM, event(choices=[{"finish_reason": None}], stop_reason=None), DONE])
        assert reader.finish_reason() == ""


ECHOED = {"type": "response.failed", "reason": "max_output_tokens", "event": "failed"}
"""Of a request, as engines repeat it in their answers."""


def ended(kind: str, **about: object) -> bytes:
    """The last event of a stream of /v1/responses, with fields of any length after its end."""
    more = {"metadata": ECHOED, "instructions": "\nevent: response.failed" + "x" * 3 * KEPT_BYTES}
    return b"event: %b\n" % kind.encode() + event(type=kind, response=about | more)


@pytest.mark.parametrize("piece", [1, 13, 1 << 20])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("items", "details", "reason"),
    [
        ([], None, "completed"),
        (["function_call"], None, "function_call"),
        (["custom_tool_call"], None, "custom_tool_call"),
        (["function_call"], {"reason": "max_output_tokens"}, "max_output_tokens"),
        ([], {"reason": "content_filter"}, "content_filter"),
    ],
)
def test_why_a_response_ended_is_read_wherever_it_stands(
    is_stream: bool, piece: int, items: list[str], details: dict[str, str] | None, reason: str
) -> None:
    text = '"reason":"content_filter", "type": "function_call", "reason": "max_output_tokens"'
    output = [{"type": item, "status": "completed", "text": text} for item in ["message", *items]]
    status = "incomplete" if details else "completed"
    about = {"incomplete_details": details, "output": output, "status": status, "text": text}
    if is_stream:
        answer = event(type="response.created") + ended(f"response.{status}", **about)
    else:
        answer = json.dumps(about | {"metadata": ECHOED}).encode()
    reader = AnswerReader(RESPONSES, is_stream=is_stream)
    passed(reader, [answer[at : at + piece] for at in range(0, len(answer), piece)])
    assert (reader.finish_reason(), reader.error_status()) == (reason, None)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_whole_response_without_its_end_is_no_stop(status: str) -> None:
    items = [{"type": "message", "status": "completed"}]
    reader = AnswerReader(RESPONSES, is_stream=False)
    passed(reader, [json.dumps({"output": items, "status": status}).encode()])
    assert reader.finish_reason() == status


def test_a_stream_that_ends_after_an_item_says_no_reason() -> None:
    item = {"type": "message", "status": "completed"}
    done = event(type="response.output_item.done", item=item)
    reader = AnswerReader(RESPONSES, is_stream=True)
    passed(reader, [b"event: response.output_item.done\n" + done])
    assert reader.finish_reason() == ""


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("first_token", [True, False])
def test_a_response_that_failed_is_its_workers_fault_from_the_first_token_on(
    piece: int, first_token: bool
) -> None:
    delta = b"event: response.output_text.delta\n" + event(delta="hi")
    answer = delta * first_token + ended("response.failed", status="failed")
    reader = AnswerReader(RESPONSES, is_stream=True)
    passed(reader, [answer[at : at + piece] for at in range(0, len(answer), piece)])
    assert reader.error_status() == (500 if first_token else 400)


def test_the_usage_that_the_client_did_not_request_is_taken_out() -> None:
    reader = AnswerReader(CHAT, is_stream=True, takes_usage_out=True)
    assert passed(reader, [*STREAM, LAST, DONE]) == b"".join([*STREAM, DONE])
    assert reader.usage() == Usage(20, 3, 16)


def test_a_usage_beside_content_stays() -> None:
    beside = event(choices=[{"index": 0, "delta": {}}], usage=USAGE)
    null = event(choices=[], usage=None)
    reader = AnswerReader(CHAT, is_stream=True, takes_usage_out=True)
    assert passed(reader, [beside, null, DONE]) == beside + null + DONE


@given(st.lists(st.integers(1, 400), max_size=12), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_however_a_stream_is_cut_the_same_bytes_pass(cuts: list[int], mark: bytes) -> None:
    whole = b"".join([b": ping\n\n", *STREAM, LAST, DONE]).replace(b"\n\n", mark)
    wanted = b"".join([b": ping\n\n", *STREAM, DONE]).replace(b"\n\n", mark)
    places = sorted({min(sum(cuts[: i + 1]), len(whole)) for i in range(len(cuts))})
    parts = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    taking = AnswerReader(CHAT, is_stream=True, takes_usage_out=True)
    assert passed(taking, parts) == wanted
    assert taking.usage() == Usage(20, 3, 16)
    leaving = AnswerReader(CHAT, is_stream=True)
    assert passed(leaving, parts) == whole
    assert leaving.usage() == Usage(20, 3, 16)
    assert taking.first_token
    assert leaving.first_token


def test_a_comment_is_no_first_token() -> None:
    reader = AnswerReader(CHAT, is_stream=True)
    reader.feed(b": keep-alive data: no\n\n")
    assert not reader.first_token
    reader.feed(b"da")
    assert not reader.first_token
    reader.feed(b"ta: {}\n\n")
    assert reader.first_token


@pytest.mark.parametrize(
    ("kind", "early", "late"),
    [
        (MESSAGES, b"event: message_start\ndata: {}\n\n", b"event: content_block_start\n"),
        (RESPONSES, b"event: response.created\n\n", b"event: response.output_text.delta\n"),
    ],
)
def test_events_before_the_prompts_end_are_no_first_token(
    kind: BodyFormat, early: bytes, late: bytes
) -> None:
    reader = AnswerReader(kind, is_stream=True)
    reader.feed(early)
    assert not reader.first_token
    reader.feed(late[:9])
    reader.feed(late[9:])
    assert reader.first_token


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_responses_usage_is_read_wherever_it_stands(
    is_stream: bool, piece: int, indent: int | None
) -> None:
    usage = {"input_tokens": 20, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 3}
    said = 'she said "usage":{"input_tokens": 1}'
    tools = [{"name": "f", "parameters": {"properties": {"usage": {"type": "string"}}}}]
    for order in ("first", "last"):
        response: dict[str, object] = {"id": "resp_a", "output": [said], "status": "completed"}
        about = {"usage": usage}, {"tools": tools, "instructions": "x" * 3 * KEPT_BYTES}
        for fields in about if order == "first" else reversed(about):
            response |= fields
        answer = json.dumps(response, indent=indent).encode()
        if is_stream:
            begun = json.dumps({"response": {"id": "resp_a", "usage": None}}).encode()
            answer = b"data: %b\n\ndata: %b\n\n" % (begun, answer.replace(b"\n", b""))
        reader = AnswerReader(RESPONSES, is_stream=is_stream)
        pieces = [answer[at : at + piece] for at in range(0, len(answer), piece)]
        assert passed(reader, pieces) == answer
        assert reader.usage() == Usage(20, 3, 16)


def test_the_first_byte_of_a_whole_answer_is_its_first_token() -> None:
    reader = AnswerReader(CHAT, is_stream=False)
    assert reader.feed(b"") == b""
    assert not reader.first_token
    reader.feed(b"{")
    assert reader.first_token


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"choices": [], "usage": USAGE}, Usage(20, 3, 16)),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 1}}, Usage(5, 1, None)),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}, Usage(5, None, None)),
        (
            {
                "usage": {
                    "input_tokens": 5,
                    "output_tokens": 2,
                    "input_tokens_details": {"cached_tokens": 4},
                }
            },
            Usage(5, 2, 4),
        ),
        ({"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}}, Usage(None, None, 4)),
        ({"usage": {"input_tokens": 5, "cache_read_input_tokens": 0}}, Usage(5, None, 0)),
        # vLLM: tokens of blocks that the prompt stored are counted apart, too.
        (
            {
                "usage": {
                    "input_tokens": 3,
                    "cache_read_input_tokens": 0,
                    "cache_creation_input_tokens": 64,
                }
            },
            Usage(67, None, 0),
        ),
        (
            {
                "usage": {
                    "input_tokens": 3,
                    "cache_read_input_tokens": 32,
                    "cache_creation_input_tokens": 32,
                }
            },
            Usage(67, None, 32),
        ),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": "3"}}, Usage()),
        ({"usage": [1]}, Usage()),
        ({"usage": USAGE, "text": 'says "usage": {"prompt_tokens": 9} in it'}, Usage(20, 3, 16)),
        ({"usage": USAGE, "kind": "usage"}, Usage(20, 3, 16)),
        ({}, Usage()),
    ],
)
def test_whole_answers_say_their_usage_in_each_form(
    answer: dict[str, object], usage: Usage
) -> None:
    reader = AnswerReader(CHAT, is_stream=False)
    text = json.dumps({"id": "x", "text": "t" * 9000, **answer}).encode()
    assert passed(reader, [text[:5000], text[5000:]]) == text
    assert reader.usage() == usage


def test_an_anthropic_stream_says_its_input_at_the_beginning() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 0}}}
    delta = {"type": "message_delta", "usage": {"output_tokens": 9}}
    reader = AnswerReader(MESSAGES, is_stream=True)
    reader.feed(b"event: message_start\ndata: " + json.dumps(start).encode() + b"\n\n")
    for _ in range(100):
        reader.feed(b"event: content_block_delta\ndata: " + b"x" * 100 + b"\n\n")
    reader.feed(b"event: message_delta\ndata: " + json.dumps(delta).encode() + b"\n\n")
    assert reader.usage() == Usage(7, 9, None)


def test_cached_tokens_at_the_end_of_an_anthropic_stream_are_read_as_vllm_has_them() -> None:
    start = {"message": {"usage": {"input_tokens": 70, "output_tokens": 0}}}
    end = {"usage": {"input_tokens": 6, "output_tokens": 9, "cache_read_input_tokens": 64}}
    reader = AnswerReader(MESSAGES, is_stream=True)
    reader.feed(b"event: message_start\ndata: " + json.dumps(start).encode() + b"\n\n")
    reader.feed(b"event: content_block_start\ndata: {}\n\n")
    reader.feed(b"event: message_delta\ndata: " + json.dumps(end).encode() + b"\n\n")
    assert reader.usage() == Usage(70, 9, 64)


def test_little_is_kept_of_a_long_answer() -> None:
    reader = AnswerReader(CHAT, is_stream=True, takes_usage_out=True)
    for _ in range(5000):
        reader.feed(content("a few words"))
    assert len(reader._tail) <= KEPT_BYTES
    reader.feed(b"x" * (1 << 20))
    assert len(reader._tail) <= KEPT_BYTES


def test_an_event_over_the_bound_passes_in_parts() -> None:
    reader = AnswerReader(CHAT, is_stream=True, takes_usage_out=True)
    long = content("x" * (EVENT_BYTES_MAX + 5000))
    parts = [long[i : i + 50_000] for i in range(0, len(long), 50_000)]
    got = b""
    for part in parts:
        got += reader.feed(part)
        assert len(reader._held) <= EVENT_BYTES_MAX
    got += reader.feed(content("after")) + reader.feed(LAST) + reader.feed(DONE) + reader.rest()
    assert got == long + content("after") + DONE
    assert reader.usage() == Usage(20, 3, 16)


def test_where_a_stream_was_cut_is_known() -> None:
    reader = AnswerReader(CHAT, is_stream=True)
    assert not reader.inside_event
    reader.feed(b"data: {")
    assert reader.inside_event
    reader.feed(b"}\n\n")
    assert not reader.inside_event


ODD = st.one_of(
    st.sampled_from((
        b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\", b'"', b"\n\n", b"\r\n\r\n", b"\0",
        b'{"a":' * 2000, b"[" * 5000, b"1e999", b"9" * 5000, b"NaN",
        b'"usage":', b'{"error":{"code":', b"data:",
    )),
    st.binary(max_size=8),
)  # fmt: skip
FORMS = (
    b'data: {"choices":[],"usage":{"a":"%b"}}\n\n',
    b'data: {"choices":[],"usage":{"%b":1}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":%b}}\n\n',
    b'data: {"choices":[],"usage":%b}\n\n',
    b'data: {"error":{"code":"%b"}}\n\n',
    b'data: {"error":{"code":%b}}\n\n',
    b'data: {"type":"a","sequence_number":%b,"id":"resp_%b"}\n\n',
    b"%b",
)
"""Of events, with bytes that are odd in the place of a value."""


@given(
    st.lists(st.tuples(st.sampled_from(FORMS), ODD), min_size=1, max_size=6),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.booleans(),
)
def test_no_bytes_of_an_answer_raise(
    parts: list[tuple[bytes, bytes]], kind: BodyFormat, is_stream: bool, takes_out: bool
) -> None:
    reader = AnswerReader(kind, is_stream=is_stream, takes_usage_out=takes_out)
    chunks = [form.replace(b"%b", odd) for form, odd in parts]
    assert len(passed(reader, chunks)) <= sum(map(len, chunks))
    reader.usage()
    reader.error_status()
    reader.next_number()
    reader.response_id()


@pytest.mark.parametrize("takes_usage_out", [False, True])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [*range(1, 9), 1000])
def test_every_event_counts_once_however_it_is_cut(
    size: int, line: bytes, *, takes_usage_out: bool
) -> None:
    reader = AnswerReader(CHAT, is_stream=True, takes_usage_out=takes_usage_out)
    stream = (b'data: {"choices":[{"index":0}]}' + line + line) * 10
    passed = b""
    for at in range(0, len(stream), size):
        passed += reader.feed(stream[at : at + size])
        assert reader.chunks == passed.count(line + line)
        assert reader.inside_event is (passed[-2 * len(line) :] != line + line and bool(passed))
    assert (reader.chunks, passed) == (10, stream)
