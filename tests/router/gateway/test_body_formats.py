"""Every record of the table of body formats, and its copy under another name and path, through the
exchange, the gateway and the picker: nothing but the record says how a format is served.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from events.engines.table import ENGINES
from router.gateway.exchange import Blame, Exchange
from router.request.bodies import FORMATS, PATHS, BodyFormat
from tests.stage.gateway import Worker, a_gateway, answering
from tests.stage.picker import a_picker, picked, request_body, request_headers

SERVED = [kind for kind in FORMATS if kind.paths]
ANSWERS = (
    ("application/json", [b'{"id":"resp_1","usage":{"prompt_tokens":9,"output_tokens":4}}']),
    (
        "text/event-stream",
        [
            b'event: message_start\ndata: {"usage":{"input_tokens":9}}\n\n',
            b'event: response.created\ndata: {"id":"resp_1","sequence_number":3}\n\n',
            b'event: content_block_start\ndata: {"choices":[{"delta":{}}]}\n\n',
            b'event: response.output_text.delta\ndata: {"sequence_number":4}\n\n',
            b'data: {"choices":[],"usage":{"output_tokens":4}}\n\n',
        ],
    ),
)


def copied(kind: BodyFormat) -> str:
    """The path of a format's copy."""
    return f"/copy/of/{kind.name}"


@pytest.fixture(autouse=True)
def _copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in SERVED:
        path = copied(kind)
        monkeypatch.setitem(PATHS, path, replace(kind, name="copy", paths=(path,)))


def seen(path: str, body: dict[str, Any]) -> Iterator[object]:
    """All that an exchange shows."""

    def exchange() -> Exchange:
        return Exchange(path, json.dumps(body).encode(), {})

    first = exchange()
    yield first.question()
    yield vars(first.facts)
    yield first.may_have_tokens
    yield [first.pairs_on(engine) for engine in ("vllm", "another")]  # SGLang's record has names
    fields = first.prefill_fields({"max_tokens": 1, "stream": None})
    for more in (None, fields):
        upstream = first.upstream("http://w", {}, engine_priority=2, fields=more)
        yield upstream.url.removesuffix(path), upstream.headers, upstream.body
    for content_type, chunks in ANSWERS:
        for is_broken in (False, True):
            one = exchange()
            yield one.answered(200, content_type)
            answer = one.answer
            for chunk in chunks:
                yield answer.feed(chunk), answer.first_token, answer.chunks
            yield one.broke(Blame.WORKER, "WORKER_FAILED", "gone") if is_broken else answer.rest()
            yield one.ended(), answer.response_id()


@pytest.mark.parametrize("kind", SERVED, ids=[kind.name for kind in SERVED])
def test_a_record_under_another_path_is_served_alike(kind: BodyFormat) -> None:
    plain: dict[str, Any] = {"model": "m"}
    options = {"stream": True, "priority": 3, "previous_response_id": "resp_0", "background": True}
    sessions = {"prompt_cache_key": "s", "metadata": {"user_id": "_session_0a1b2c3d"}}
    limits = {"max_tokens": 7, "max_completion_tokens": 6, "max_output_tokens": 5}
    for more in ({}, {"stream": True}, options, sessions, limits, options | sessions | limits):
        assert list(seen(kind.paths[0], plain | more)) == list(seen(copied(kind), plain | more))


def test_engines_name_formats_that_there_are() -> None:
    named = {name for engine in ENGINES.values() for name in engine.unpaired_bodies}
    assert named == {"messages"}
    assert named <= {kind.name for kind in FORMATS}
    messages, chat = (
        Exchange(path, b"{}", {}) for path in ("/v1/messages", "/v1/chat/completions")
    )
    assert (messages.pairs_on("sglang"), messages.pairs_on("vllm")) == (False, True)
    assert chat.pairs_on("sglang")


async def test_the_gateway_forwards_every_path_and_answers_in_its_forms_errors() -> None:
    worker = Worker(answering(b"{}"))
    async with a_gateway(worker) as stage:
        for path, kind in PATHS.items():
            assert ((await stage.ask(path, {"model": "m"})).status, worker.requests[-1].path) == (
                200,
                path,
            )
            answer = await stage.ask(path, b"[]")
            failed = answer.json()
            message = failed["error"]["message"]
            assert failed == kind.errors.body(400, "INVALID_BODY", message, None)


async def test_the_picker_picks_for_every_path_and_answers_in_its_forms_errors() -> None:
    async with a_picker(Worker(answering(b"{}"))) as stage:
        for path, kind in PATHS.items():
            call = stage.call()
            await call.write(request_headers(path))
            await call.write(request_body(b'{"model":"m"}'))
            assert picked(await call.read())
            call.cancel()
            call = stage.call()
            await call.write(request_headers(path))
            await call.write(request_body(b'{"model":"unknown"}'))
            refused = json.loads((await call.read()).immediate_response.body)
            message = refused["error"]["message"]
            assert refused == kind.errors.body(404, "model_not_found", message, None)
        await stage.idle()
