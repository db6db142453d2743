"""One request's life, as a story and law by law."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvroute.client.requests.failures import Kind
from router.gateway.exchange import Blame, Exchange, forwarded, goes_by_load, returned
from router.request.bodies import PATHS
from tests.stage.script import played

CHAT_PATH = "/v1/chat/completions"
SCENARIOS = Path(__file__).parent / "scenarios"
REWRITE = "KVROUTE_REWRITE"


class Player:
    """Plays a scenario: a line each for what client, router and worker do."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None

    def __call__(self, line: str) -> str:
        command, _, rest = line.partition(" ")
        if command == "client":
            path, _, body = rest.partition(" ")
            self.exchange = Exchange(path, body.encode(), {"x-session-id": "s"}, request_id="r")
            return _told(self.exchange.question())
        exchange = self.exchange
        assert exchange is not None
        match command:
            case "by-load":
                return _told(exchange.question(by_load=True))
            case "picked":
                upstream = exchange.upstream(rest, {"X-data-parallel-rank": "1"})
                headers = " ".join(f"{k}={v}" for k, v in upstream.headers.items())
                return f"{upstream.url}\n{headers}\n{upstream.body.decode()}"
            case "head":
                status, _, kind = rest.partition(" ")
                return exchange.answered(int(status), kind) or "passes"
            case "data":
                chunk = rest.encode().decode("unicode_escape").encode()
                shown_bytes = exchange.answer.feed(chunk).decode().replace("\n", "\\n")
                first = " (first token)" if exchange.answer.first_token else ""
                return f"passes {shown_bytes!r}{first}" if shown_bytes else f"passes nothing{first}"
            case "broken":
                last = exchange.broke(Blame.WORKER, "WORKER_FAILED", "the worker is gone")
                return f"{exchange.outcome}\n{last.decode()!r}"
            case "end":
                rest_bytes = exchange.answer.rest()
                return f"{exchange.ended()} {rest_bytes!r}"
        raise ValueError(line)


def _told(question: dict[str, Any]) -> str:
    client, _, own = question["request_id"].rpartition("~")
    assert len(own) == 32
    shown = question | {"request_id": f"{client}~..."}
    texts = {k: v.decode() if isinstance(v, bytes) else v for k, v in shown.items()}
    return "\n".join(f"{name}: {value}" for name, value in texts.items())


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_scenario_goes_as_written(path: Path) -> None:
    text = path.read_text()
    now = "".join(played(text, Player()))
    if os.environ.get(REWRITE):
        path.write_text(now)
    assert now == text, f"{path.name} differs; {REWRITE}=1 writes it again"


def exchange(path: str = CHAT_PATH, **fields: object) -> Exchange:
    return Exchange(path, json.dumps({"model": "m", **fields}).encode(), {})


@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_a_question_that_a_router_takes(path: str) -> None:
    one = exchange(path, prompt="x" * 400)
    question = one.question()
    bodies = [name for name in question if name.endswith("_body")]
    assert bodies == [option for option in (PATHS[path].option,) if option]
    if not bodies:
        assert question["estimated_tokens"] == len(one.body) // 4
        lowered = one.question(tokens_max=50)
        assert lowered["estimated_tokens"] == 50 < lowered["charged_tokens"] == len(one.body) // 4


def test_a_response_that_goes_on_from_another_has_no_tokens_and_no_pair() -> None:
    body = b'{"model": "m", "input": "hello", "previous_response_id": "resp_a"}'
    question = Exchange("/v1/responses", body, {}).question()
    assert "responses_body" not in question
    assert question["estimated_tokens"] == len(body) // 4
    alone = Exchange("/v1/responses", body.replace(b"resp_a", b""), {}).question()
    assert "estimated_tokens" not in alone


@pytest.mark.parametrize(
    ("fields", "usual", "expected"),
    [({}, None, None), ({}, 40, 40), ({"max_tokens": 32_000}, 40, 40), ({"max_tokens": 7}, 40, 7)],
)
def test_an_answer_is_expected_to_be_a_usual_one_unless_its_limit_is_less(
    fields: dict[str, object], usual: int | None, expected: int | None
) -> None:
    question = exchange(**fields).question(output_tokens=usual)
    assert question.get("expected_output_tokens") == expected


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, None),
        (201, None),
        (400, Kind.REJECTED),
        (404, Kind.REJECTED),
        (422, Kind.REJECTED),
        (302, Kind.UNUSABLE),
        (408, Kind.FAILED),
        (429, Kind.FAILED),
        (500, Kind.FAILED),
        (503, Kind.FAILED),
    ],
)
def test_an_answer_that_blames_the_client_goes_to_the_client(
    status: int, verdict: Kind | None
) -> None:
    assert exchange().answered(status, "application/json") is verdict


def test_a_body_goes_on_untouched_where_nothing_is_needed() -> None:
    one = exchange(messages=[])
    assert one.upstream("http://w/", {}).body is one.body
    assert one.upstream("http://w/", {}).url == f"http://w{CHAT_PATH}"


def test_the_priority_of_a_body_is_the_routers_and_the_engine_gets_its_own() -> None:
    one = exchange(priority=5)
    assert one.question()["priority"] == 5
    assert "priority" not in json.loads(one.upstream("http://w", {}).body)
    sent = json.loads(one.upstream("http://w", {}, engine_priority=-5).body)
    assert sent["priority"] == -5
    plain = exchange()
    assert json.loads(plain.upstream("http://w", {}, engine_priority=2).body)["priority"] == 2
    assert plain.upstream("http://w", {}, engine_priority=0).body is plain.body


def test_a_clients_other_stream_options_are_kept() -> None:
    one = exchange(stream=True, stream_options={"continuous_usage_stats": False})
    sent = json.loads(one.upstream("http://w", {}).body)
    assert sent["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_stream_options_that_say_no_usage_are_replaced(options: object) -> None:
    sent = json.loads(exchange(stream=True, stream_options=options).upstream("http://w", {}).body)
    assert sent["stream_options"] == {"include_usage": True}


def test_the_fields_of_a_pair_replace_the_clients() -> None:
    one = exchange(stream=True, max_tokens=50)
    fields = {"max_tokens": 1, "stream": False, "stream_options": None}
    sent = json.loads(one.upstream("http://w", {}, fields=fields).body)
    assert sent == {"model": "m", **fields}


def test_usage_of_several_prompts_is_not_that_of_the_prompt() -> None:
    one = exchange("/v1/completions", prompt=["a", "b"])
    one.answered(200, "application/json")
    one.answer.feed(b'{"usage": {"prompt_tokens": 2, "completion_tokens": 4}}')
    outcome = one.ended()
    assert outcome.usage.prompt_tokens is None
    assert outcome.output_tokens == 4


def test_the_first_outcome_counts() -> None:
    one = exchange()
    first = one.ended(Blame.CANCELLED)
    assert one.ended() is first
    assert one.broke(Blame.WORKER, "WORKER_FAILED", "x") == b""
    assert one.outcome is first


def test_headers_of_one_connection_stay_on_it() -> None:
    sent = forwarded(
        [
            ("Connection", "close, X-Private"),
            ("X-Private", "1"),
            ("Transfer-Encoding", "chunked"),
            ("Host", "a"),
            ("Content-Length", "3"),
            ("Authorization", "Bearer k"),
            ("X-Request-Id", "r"),
            ("X-Data-Parallel-Rank", "7"),
            ("traceparent", "00-1"),
            ("X-Many", "1"),
            ("x-many", "2"),
        ]
    )
    assert sent == {"authorization": "Bearer k", "traceparent": "00-1", "x-many": "1, 2"}
    back = returned([("Content-Type", "a/b"), ("Server", "u"), ("Connection", "close")])
    assert back == [("Content-Type", "a/b")]


@pytest.mark.parametrize(
    ("reason", "code", "by_load"),
    [
        ("EMPTY_PROMPT", "INVALID_ARGUMENT", True),
        ("NO_TOKENIZER", "FAILED_PRECONDITION", True),
        ("MESSAGE_TOO_LARGE", "RESOURCE_EXHAUSTED", True),
        (None, "UNIMPLEMENTED", False),
        (None, "RESOURCE_EXHAUSTED", True),
        (None, "UNAVAILABLE", False),
        ("MALFORMED_BODY", "INVALID_ARGUMENT", True),
        ("ALL_WORKERS_FULL", "RESOURCE_EXHAUSTED", False),
    ],
)
def test_which_refusals_of_a_body_leave_the_request_to_load(
    reason: str | None, code: str, by_load: bool
) -> None:
    assert goes_by_load(reason, code) is by_load
