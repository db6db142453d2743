"""One request in steps of ext_proc, as gateways tell of it."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.gateway.exchange import Blame, Exchange, Outcome
from router.gateway.picker.held_body import SLICE_BYTES
from router.gateway.picker.request_stream import Blind, Reading, RequestStream
from router.gateway.refusals import answer_of
from router.gateway.server.pace import wait_s
from router.request.error_forms import OPENAI
from tests.stage.picker import (
    header_map,
    picked,
    request_body,
    request_headers,
    response_body,
    response_headers,
)

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","stream":true,"messages":[]}'
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
END = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\ndata: [DONE]\n\n'


class Recorder(RequestStream):
    """Remembers what it does."""

    def __init__(self, body_bytes_max: int) -> None:
        super().__init__(self._sent, self._close, body_bytes_max=body_bytes_max)
        self.sent: list[pb.ProcessingResponse] = []
        self.questions: list[Blind | None] = []
        self.served_by: list[str] = []
        self.first_tokens = self.tokens = 0
        self.ends: list[tuple[Outcome | None, bool]] = []
        self.closed = self.begun = self.waits = self.let_go_of = self.parts_left_out = 0
        self.exchanges: list[Exchange] = []
        self.has_room = True

    def _sent(self, message: bytes) -> None:
        self.sent.append(pb.ProcessingResponse.FromString(message))

    def _close(self) -> None:
        self.closed += 1

    def began(self) -> None:
        self.begun += 1

    def may_hold(self, size: int) -> bool:
        return self.has_room

    def ask(self, body: Reading | Blind) -> None:
        self.questions.append(body if isinstance(body, Blind) else None)
        if isinstance(body, Reading):
            self.exchanges.append(body.make())
            self.read(self.exchanges[-1])

    def left_out(self) -> None:
        self.parts_left_out += 1

    def when_room(self) -> None:
        self.waits += 1

    def let_go(self) -> None:
        self.let_go_of += 1

    def served(self, endpoint: str) -> None:
        self.served_by.append(endpoint)

    def first_token(self) -> None:
        self.first_tokens += 1

    def progress(self, output_tokens: int) -> None:
        self.tokens = output_tokens

    def ended(self, outcome: Outcome | None, *, observed: bool) -> None:
        self.ends.append((outcome, observed))

    def take(self) -> list[pb.ProcessingResponse]:
        taken, self.sent = self.sent, []
        return taken

    @property
    def blame(self) -> Blame | None:
        ((outcome, observed),) = self.ends
        assert outcome is not None
        assert observed
        return outcome.blame


def a_stream(body_bytes_max: int = 1 << 20) -> tuple[RequestStream, Recorder]:
    recorder = Recorder(body_bytes_max)
    return recorder, recorder


def tell(stream: RequestStream, *messages: pb.ProcessingRequest) -> None:
    for message in messages:
        stream.message(message.SerializeToString())


def kinds(sent: list[pb.ProcessingResponse]) -> list[str | None]:
    return [message.WhichOneof("response") for message in sent]


def modes(request: int, answer: int, path: str = CHAT) -> pb.ProcessingRequest:
    message = request_headers(path)
    message.protocol_config.request_body_mode = request  # type: ignore[assignment]
    message.protocol_config.response_body_mode = answer  # type: ignore[assignment]
    return message


def test_full_duplex_holds_all_back_until_the_body_is_whole() -> None:
    stream, seen = a_stream()
    tell(stream, request_headers(CHAT), request_body(BODY[:10], last=False))
    assert (seen.sent, seen.questions) == ([], [])
    tell(stream, request_body(BODY[10:]))
    (blind,) = seen.questions
    (exchange,) = seen.exchanges
    assert exchange.body == BODY
    assert blind is None
    assert seen.sent == []
    stream.picked("10.0.0.1:8000,10.0.0.2:8000", {"X-data-parallel-rank": "1"})
    headers, *body = seen.take()
    assert picked(headers) == "10.0.0.1:8000,10.0.0.2:8000"
    assert headers.request_headers.response.clear_route_cache
    options = headers.request_headers.response.header_mutation.set_headers
    assert [each.header.key for each in options][1:] == ["x-data-parallel-rank"]
    overwrite = pb.HeaderValueOption.APPEND_ACTION_OVERWRITE_OR_ADD
    assert {each.append_action for each in options} == {overwrite}
    parts = [each.request_body.response.body_mutation.streamed_response for each in body]
    assert [(each.body, each.end_of_stream) for each in parts] == [
        (BODY[:10], False),
        (BODY[10:], True),
    ]


def test_a_part_after_the_bodys_end_is_left_out() -> None:
    """As Envoy sends the last part of some long bodies twice: before the pick, and after it."""
    stream, seen = a_stream()
    tell(stream, request_headers(CHAT), request_body(BODY), request_body(BODY))
    (exchange,) = seen.exchanges
    assert exchange.body == BODY
    stream.picked("10.0.0.1:8000", {})
    assert kinds(seen.take()) == ["request_headers", "request_body"]
    tell(stream, request_body(BODY))
    assert seen.take() == []
    assert seen.parts_left_out == 2


@pytest.mark.parametrize("mode", [pb.BODY_SEND_MODE_BUFFERED, pb.BODY_SEND_MODE_STREAMED])
def test_no_part_is_taken_while_the_pick_is_waited_for(mode: int) -> None:
    stream, seen = a_stream()
    tell(stream, modes(mode, pb.BODY_SEND_MODE_STREAMED))
    if mode == pb.BODY_SEND_MODE_BUFFERED:
        tell(stream, request_body(BODY, last=False))
    assert len(seen.questions) == 1
    with pytest.raises(ValueError, match="before the answer"):
        tell(stream, request_body(BODY, last=False))


def test_no_part_is_taken_after_the_trailers_of_a_body() -> None:
    stream, _ = a_stream()
    trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
    tell(stream, request_headers(CHAT), request_body(BODY, last=False), trailers)
    with pytest.raises(ValueError, match="before the answer"):
        tell(stream, request_body(BODY, last=False))


def test_trailers_end_the_body_too() -> None:
    stream, seen = a_stream()
    trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
    tell(stream, request_headers(CHAT), request_body(BODY, last=False))
    assert seen.questions == []
    tell(stream, trailers)
    stream.picked("10.0.0.1:8000", {})
    assert kinds(seen.take()) == ["request_headers", "request_body", "request_trailers"]


def test_a_whole_answer() -> None:
    stream, seen = _answering()
    tell(stream, response_headers(served="10.0.0.1:8000"))
    tell(stream, response_body(EVENT), response_body(EVENT + END), response_body(b"", last=True))
    assert kinds(seen.sent) == ["response_headers", *["response_body"] * 3]
    parts = [each.response_body.response.body_mutation.streamed_response for each in seen.sent[1:]]
    assert b"".join(each.body for each in parts) == EVENT + EVENT + END
    assert [each.end_of_stream for each in parts] == [False, False, True]
    assert (seen.served_by, seen.first_tokens) == (["10.0.0.1:8000"], 1)
    assert seen.tokens >= 2
    assert seen.blame is None
    ((outcome, _),) = seen.ends
    assert outcome is not None
    assert outcome.usage.prompt_tokens == 9
    stream.half_closed()
    assert (len(seen.ends), seen.closed) == (1, 1)


def _answering() -> tuple[RequestStream, Recorder]:
    stream, seen = a_stream()
    tell(stream, request_headers(CHAT), request_body(BODY))
    stream.picked("10.0.0.1:8000", {})
    seen.take()
    return stream, seen


def test_trailers_end_an_answer_too() -> None:
    stream, seen = _answering()
    tell(stream, response_headers(), response_body(EVENT))
    tell(stream, pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert kinds(seen.sent)[-1] == "response_trailers"
    assert seen.blame is None


@pytest.mark.parametrize(
    ("status", "blame"),
    [(200, None), (400, Blame.CLIENT), (429, Blame.WORKER), (503, Blame.WORKER)],
)
def test_the_status_says_whose_fault_it_is(status: int, blame: Blame | None) -> None:
    stream, seen = _answering()
    tell(stream, response_headers(status, "application/json"), response_body(b"{}", last=True))
    assert seen.blame is blame
    assert seen.first_tokens == (0 if blame else 1)


@pytest.mark.parametrize("way", ["half_closed", "reset"])
def test_a_stream_that_ends_early_was_cancelled(way: str) -> None:
    for steps in range(4):
        stream, seen = a_stream()
        told = (request_headers(CHAT), request_body(BODY), response_headers(), response_body(EVENT))
        for number, message in enumerate(told[: steps + 1]):
            tell(stream, message)
            if number == 1:
                stream.picked("10.0.0.1:8000", {})
        getattr(stream, way)()
        assert len(seen.ends) == 1
        if steps:
            assert seen.blame is Blame.CANCELLED
        stream.picked("10.0.0.2:8000", {})  # an answer that came too late
        assert len(seen.ends) == 1


def test_buffered_answers_one_message_with_one() -> None:
    stream, seen = a_stream()
    tell(stream, modes(pb.BODY_SEND_MODE_BUFFERED, pb.BODY_SEND_MODE_STREAMED))
    assert kinds(seen.take()) == ["request_headers"]
    tell(stream, request_body(BODY))
    stream.picked("10.0.0.1:8000", {})
    (answer,) = seen.take()
    assert picked(answer, with_body=True) == "10.0.0.1:8000"
    assert not answer.request_body.response.HasField("body_mutation")
    tell(stream, response_headers(), response_body(EVENT), response_body(END, last=True))
    assert kinds(seen.sent) == ["response_headers", "response_body", "response_body"]
    assert not any(each.response_body.response.HasField("body_mutation") for each in seen.sent)
    assert seen.blame is None


@pytest.mark.parametrize("mode", [pb.BODY_SEND_MODE_STREAMED, pb.BODY_SEND_MODE_NONE_UNSPECIFIED])
def test_a_body_that_comes_after_the_pick_or_never_goes_by_load(mode: int) -> None:
    stream, seen = a_stream()
    tell(stream, modes(mode, pb.BODY_SEND_MODE_STREAMED))
    (blind,) = seen.questions
    assert (seen.exchanges, blind) == ([], Blind.NO_BODY)
    stream.picked("10.0.0.1:8000", {})
    assert kinds(seen.take()) == ["request_headers"]
    if mode == pb.BODY_SEND_MODE_STREAMED:
        tell(stream, request_body(BODY))
        assert kinds(seen.take()) == ["request_body"]
    tell(stream, response_headers(last=True))
    assert seen.ends == [(None, True)]


def test_a_gateway_that_shows_no_answers() -> None:
    """NGINX Gateway Fabric: no modes, the header's value as text, the whole body at once, then it
    closes its side and waits for the end."""
    stream, seen = a_stream()
    headers = pb.HttpHeaders()
    for name, value in ((":method", "POST"), (":path", CHAT)):
        headers.headers.headers.add(key=name, value=value)
    tell(stream, pb.ProcessingRequest(request_headers=headers), request_body(BODY))
    stream.picked("10.0.0.1:8000", {})
    stream.half_closed()
    ((outcome, observed),) = seen.ends
    assert outcome is not None
    assert not observed
    assert seen.closed == 1


def test_envoy_whose_answers_go_around_the_picker() -> None:
    stream, seen = a_stream()
    duplex = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
    tell(stream, modes(duplex, pb.BODY_SEND_MODE_NONE_UNSPECIFIED), request_body(BODY))
    stream.picked("10.0.0.1:8000", {})
    stream.half_closed()
    ((_, observed),) = seen.ends
    assert not observed


def test_a_worker_that_refuses_is_seen_even_so() -> None:
    stream, seen = a_stream()
    duplex = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
    tell(stream, modes(duplex, pb.BODY_SEND_MODE_NONE_UNSPECIFIED), request_body(BODY))
    stream.picked("10.0.0.1:8000", {})
    tell(stream, response_headers(503))
    assert seen.blame is Blame.WORKER


def test_envoys_own_answer_before_a_pick() -> None:
    stream, seen = a_stream()
    tell(stream, request_headers(CHAT), request_body(BODY[:5], last=False))
    tell(stream, response_headers(413, "text/plain"), response_body(b"too large", last=True))
    assert kinds(seen.sent) == ["response_headers", "response_body"]
    assert (seen.ends, seen.questions) == ([(None, True)], [])


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_that_no_router_knows_goes_by_load(method: str) -> None:
    stream, seen = a_stream()
    headers = {":method": method, ":path": "/v1/audio/transcriptions?x=1"}
    first = request_headers(CHAT)
    first.request_headers.headers.CopyFrom(header_map(headers))
    tell(stream, first, request_body(b"--multipart"))
    (blind,) = seen.questions
    assert (stream.path, blind) == ("/v1/audio/transcriptions", Blind.UNKNOWN_PATH)
    stream.unpicked()
    (headers_answer, body) = seen.take()
    mutation = headers_answer.request_headers.response.header_mutation
    assert mutation.remove_headers == ["x-gateway-destination-endpoint"]
    assert body.request_body.response.body_mutation.streamed_response.body == b"--multipart"


def test_a_body_over_the_bound_goes_by_load_and_through() -> None:
    stream, seen = a_stream(body_bytes_max=10)
    tell(stream, request_headers(CHAT), request_body(b"12345678", last=False))
    assert stream.body_wait_s == wait_s(8)
    tell(stream, request_body(b"90123", last=False))
    (blind,) = seen.questions
    assert blind is Blind.BODY_TOO_LARGE
    stream.picked("10.0.0.1:8000", {})
    assert seen.let_go_of == 1
    assert kinds(seen.take()) == ["request_headers", "request_body", "request_body"]
    tell(stream, request_body(b"45", last=True))
    (part,) = seen.take()
    assert part.request_body.response.body_mutation.streamed_response.end_of_stream


def test_a_bound_over_all_streams_counts_too() -> None:
    stream, seen = a_stream()
    seen.has_room = False
    tell(stream, request_headers(CHAT), request_body(BODY))
    assert seen.questions[0] is Blind.BODY_TOO_LARGE


def test_a_refusal_answers_the_client() -> None:
    stream, seen = a_stream()
    tell(stream, request_headers(CHAT), request_body(BODY))
    answer = answer_of("ALL_WORKERS_FULL", "all are full", OPENAI, retry_after_s=2.0)
    stream.refused(answer, "ALL_WORKERS_FULL")
    (sent,) = seen.take()
    immediate = sent.immediate_response
    assert (immediate.status.code, immediate.details) == (429, "kvroute_ALL_WORKERS_FULL")
    headers: Mapping[str, bytes] = {
        each.header.key: each.header.raw_value for each in immediate.headers.set_headers
    }
    assert headers["retry-after"] == b"2"
    assert headers["content-type"] == b"application/json"
    assert seen.closed == 1
    assert stream.is_over


def test_an_answers_headers_come_once() -> None:
    stream, _ = _answering()
    tell(stream, response_headers())
    with pytest.raises(ValueError, match="twice"):
        tell(stream, response_headers())


@pytest.mark.parametrize(
    "messages",
    [
        (request_body(BODY),),
        (request_headers(CHAT), request_headers(CHAT)),
        (pb.ProcessingRequest(),),
    ],
)
def test_messages_out_of_order_are_said(messages: tuple[pb.ProcessingRequest, ...]) -> None:
    stream, _ = a_stream()
    with pytest.raises(ValueError, match=r"request|message"):
        tell(stream, *messages)


def bodies(sent: list[pb.ProcessingResponse]) -> bytes:
    return b"".join(
        each.request_body.response.body_mutation.streamed_response.body for each in sent
    )


def _flowing(**more: Any) -> tuple[RequestStream, Recorder, bytes]:
    """A stream of which the first slice of a long body was passed on."""
    stream, seen = a_stream(body_bytes_max=1 << 23)
    body = b'{"model":"m","messages":[' + b" " * 3 * SLICE_BYTES + b"]}"
    first = request_headers(CHAT)
    if more.get("says_no_modes"):
        first.ClearField("protocol_config")
    tell(stream, first, request_body(body[:-1], last=False), request_body(body[-1:], last=True))
    stream.picked("10.0.0.1:8000", {})
    assert (seen.waits, seen.let_go_of) == (1, 0)
    return stream, seen, body


def test_a_long_body_is_passed_on_in_slices_and_trailers_come_after_it() -> None:
    stream, seen, body = _flowing()
    assert picked(seen.sent[0])
    assert len(bodies(seen.sent)) == SLICE_BYTES
    tell(stream, pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    tell(stream, response_headers())  # an answer waits for no body
    assert seen.sent[-1].WhichOneof("response") == "response_headers"
    for count in (2, 3):
        stream.flow()
        assert len(bodies(seen.sent)) == count * SLICE_BYTES
        assert (seen.waits, seen.let_go_of) == (count, 0)
    stream.flow()
    assert (seen.waits, seen.let_go_of) == (3, 1)
    assert bodies(seen.sent) == body
    assert kinds(seen.sent)[-1] == "request_trailers"
    sent = len(seen.sent)
    stream.flow()
    assert len(seen.sent) == sent


@pytest.mark.parametrize("says_no_modes", [False, True])
def test_a_gateway_that_sends_no_more_gets_the_whole_body(*, says_no_modes: bool) -> None:
    stream, seen, body = _flowing(says_no_modes=says_no_modes)
    stream.half_closed()
    assert seen.closed == 0
    while not seen.closed:
        stream.flow()
    assert bodies(seen.sent) == body


def test_an_answer_that_ends_first_does_not_cut_its_requests_body() -> None:
    stream, seen, body = _flowing()
    tell(stream, response_headers(), response_body(END, last=True))
    assert seen.blame is None
    for _ in range(3):
        stream.flow()
    assert bodies(seen.sent) == body
    stream.half_closed()
    assert seen.closed == 1


def test_a_stream_that_breaks_passes_nothing_more_on() -> None:
    stream, seen, _ = _flowing()
    stream.reset()
    assert seen.blame is Blame.CANCELLED
    stream.drop()
    sent = len(seen.sent)
    stream.flow()
    assert len(seen.sent) == sent


def observing(message: pb.ProcessingRequest) -> pb.ProcessingRequest:
    """The message as a gateway in observability mode sends it."""
    message.observability_mode = True
    message.protocol_config.request_body_mode = pb.BODY_SEND_MODE_STREAMED
    message.protocol_config.response_body_mode = pb.BODY_SEND_MODE_STREAMED
    return message


@pytest.mark.parametrize("first_part", [0, 10, len(BODY)])
def test_a_gateway_that_reads_no_answers_gets_none_and_has_its_request_decided(
    first_part: int,
) -> None:
    stream, seen = a_stream()
    parts = [observing(request_body(BODY[first_part:]))]
    if first_part:
        parts.insert(0, observing(request_body(BODY[:first_part], last=False)))
    tell(stream, observing(request_headers(CHAT)), *parts)
    (blind,) = seen.questions
    assert (stream.observed, blind) == (True, None)
    assert seen.exchanges[0].body == BODY
    # What the router of today makes of it comes meanwhile, and after.
    answer = (response_headers(), response_body(EVENT), response_body(b"", last=True))
    tell(stream, *map(observing, answer))
    stream.decided()
    tell(stream, *map(observing, answer))
    stream.half_closed()
    assert (seen.sent, seen.ends, seen.served_by, seen.first_tokens) == ([], [], [], 0)
    assert seen.closed
    assert seen.let_go_of


def test_a_gateway_that_reads_no_answers_may_close_its_side_before_the_decision() -> None:
    stream, seen = a_stream()
    tell(stream, observing(request_headers(CHAT)), observing(request_body(BODY)))
    stream.half_closed()
    assert (seen.ends, seen.closed) == ([], 0)
    stream.decided()
    assert (seen.sent, seen.closed) == ([], 1)


def test_a_refusal_is_sent_to_no_gateway_that_reads_no_answers() -> None:
    stream, seen = a_stream()
    tell(stream, observing(request_headers(CHAT)), observing(request_body(BODY)))
    stream.refused(answer_of("NO_WORKER", "none", OPENAI), "NO_WORKER")
    assert (seen.sent, seen.closed, stream.is_over) == ([], 1, True)


def test_an_answer_before_the_request_was_whole_ends_an_observed_one() -> None:
    stream, seen = a_stream()
    tell(stream, observing(request_headers(CHAT)), observing(response_headers(413)))
    assert (seen.sent, seen.questions, seen.closed) == ([], [], 1)
    assert seen.ends == [(None, True)]


def test_a_body_over_the_bound_is_not_decided_where_it_is_observed() -> None:
    stream, seen = a_stream(body_bytes_max=len(BODY) - 1)
    tell(stream, observing(request_headers(CHAT)), observing(request_body(BODY)))
    assert seen.questions == [Blind.BODY_TOO_LARGE]
    assert seen.sent == []
