"""Reasons as HTTP answers."""

import json

import pytest

from router.gateway.refusals import STATUS, answer_of, error_event
from router.request.error_forms import ANTHROPIC, OPENAI, OPENAI_RESPONSES, ErrorForm
from router.request.refusal import Reason


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_a_router_has_a_status(reason: Reason) -> None:
    assert reason in STATUS


@pytest.mark.parametrize("reason", STATUS)
@pytest.mark.parametrize("form", [OPENAI, OPENAI_RESPONSES, ANTHROPIC])
def test_every_answer_has_the_form_that_the_clients_libraries_read(
    reason: str, form: ErrorForm
) -> None:
    answer = answer_of(reason, "a sentence", form)
    body = json.loads(answer.body)
    assert body["error"]["message"] == "a sentence"
    assert answer.headers["X-Kvroute-Reason"] == reason
    if form is not ANTHROPIC:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    else:
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}


@pytest.mark.parametrize(
    ("retry_after_s", "text"), [(None, None), (0.0, "1"), (0.2, "1"), (2.5, "3"), (1e9, "3600")]
)
def test_retry_after_is_in_whole_seconds(retry_after_s: float | None, text: str | None) -> None:
    answer = answer_of("QUEUE_FULL", "full", OPENAI, retry_after_s=retry_after_s)
    assert answer.status == 429
    assert answer.headers.get("Retry-After") == text


def test_a_fleet_that_is_away_may_be_back_in_a_second() -> None:
    assert answer_of("NO_WORKER", "none", OPENAI).headers["Retry-After"] == "1"


def test_an_unknown_reason_is_a_fault_of_a_router() -> None:
    assert answer_of("NEWER_THAN_US", "?", OPENAI).status == 500


def test_clients_know_the_codes_of_an_unknown_model_and_a_long_prompt() -> None:
    body = json.loads(answer_of("UNKNOWN_MODEL", "no m", OPENAI).body)
    assert body["error"]["code"] == "model_not_found"
    body = json.loads(answer_of("PROMPT_TOO_LONG", "long", OPENAI).body)
    assert body["error"]["code"] == "context_length_exceeded"


def test_a_message_with_a_lone_surrogate_is_still_an_answer() -> None:
    assert json.loads(answer_of("INVALID_BODY", "x\ud800y", OPENAI).body)


def test_an_error_in_a_stream_is_an_event() -> None:
    assert error_event("WORKER_FAILED", "gone", OPENAI).startswith(b'data: {"error":')
    assert error_event("WORKER_FAILED", "gone", ANTHROPIC).startswith(
        b'event: error\ndata: {"type":"error"'
    )
    event = error_event("WORKER_FAILED", "gone", OPENAI_RESPONSES, number=7)
    name, _, data = event.partition(b"\n")
    assert name == b"event: error"
    fields = json.loads(data.removeprefix(b"data: "))
    assert fields.pop("error") == {
        "message": "gone", "type": "server_error", "param": None, "code": "WORKER_FAILED"
    }  # fmt: skip
    assert fields == {
        "type": "error", "code": "WORKER_FAILED", "message": "gone", "param": None,
        "sequence_number": 7,
    }  # fmt: skip
