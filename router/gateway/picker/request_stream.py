"""One HTTP request, whose steps Envoy sends as messages of an ext_proc stream. Pure.

    request headers -> body -> (trailers) -> pending -> picked | refused
                                                 -> answer's headers -> its body -> ended

What the picker sends, by the mode in which Envoy sends the request's body:

full duplex  nothing until the body is whole, then the answer to the headers with the endpoint, then
             the body as it came; the same if Envoy sends no `protocol_config`, as older proxies do
buffered     the headers pass, and the answer to the whole body has the endpoint
streamed,    the answer to the headers has the endpoint, picked by load: the body is not known yet
none

Envoy in observability mode streams each request to the picker and reads no answer: another router
serves the request, and the picker only has it decided (`observed`).

Laws:
- every message that waits for an answer gets one, in the order in which the messages came; none
  waits for one in observability mode;
- the bytes of a body are passed on as they came, a slice of them in a turn (held_body.py);
- no step here takes time by the body's length: the subclass does that work (Reading);
- `ask` and `ended` are called at most once each;
- a client's headers of the engine plane are removed, but for those that the pick sets.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

from kvroute.client.requests.failures import Kind
from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.gateway.engine_plane import of_plane
from router.gateway.exchange import Blame, Exchange, Outcome, client_id
from router.gateway.picker import messages
from router.gateway.picker.held_body import SMALL_BYTES, HeldBody
from router.gateway.picker.messages import Part
from router.gateway.picker.patience import Wait
from router.gateway.picker.repeats import REQUEST_ID
from router.gateway.refusals import Answer
from router.gateway.server.pace import BODY_S, wait_s
from router.request.bodies import PATHS

MODEL_HEADERS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
_NONE = pb.BODY_SEND_MODE_NONE_UNSPECIFIED
_BUFFERED = (pb.BODY_SEND_MODE_BUFFERED, pb.BODY_SEND_MODE_BUFFERED_PARTIAL)
_DUPLEX = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED


class Blind(Enum):
    """Why a request is routed by load, without its prompt."""

    UNKNOWN_PATH = "unknown_path"
    """A GET, or a path that no engine computes a prompt for."""
    NO_BODY = "no_body"
    """Envoy sends no body, or sends it after the pick."""
    BODY_TOO_LARGE = "body_too_large"
    INVALID_BODY = "invalid_body"


class Reading(NamedTuple):
    """A request's whole body that is not parsed yet."""

    size: int
    make: Callable[[], Exchange]
    """Parses the body, in a time by its length; may run in another thread. Raises GatewayRefusal.
    """


class _At(Enum):
    START = auto()
    BODY = auto()
    """The request's body comes."""
    PENDING = auto()
    PICKED = auto()
    OVER = auto()


_WAITS = {_At.START: Wait.HEADERS, _At.BODY: Wait.BODY, _At.OVER: Wait.END}


class RequestStream:
    """The state of one ext_proc stream and its request; a subclass has the sockets and the router
    around it.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        close: Callable[[], None],
        *,
        body_bytes_max: int,
        low_first: bool = False,
    ) -> None:
        """send: sends a message to Envoy. close: ends this side of the stream. body_bytes_max:
        bytes of a request's body beyond which it is routed by load. low_first: a lower `priority`
        in the body goes first.
        """
        self.send = send
        self.close = close
        self._body_bytes_max = body_bytes_max
        self._low_first = low_first
        self._at = _At.START
        self.path = self._query = ""
        """The request's target; empty before its headers."""
        self._is_post = False
        self.headers: dict[str, str] = {}
        """Headers of the request, by names in lower case."""
        self.subset: frozenset[str] | None = None
        """Endpoints among which Envoy wants the pick; None: any."""
        self.observed = False
        """Whether another router serves the request."""
        self._request_mode = self._answer_mode = int(_DUPLEX)
        self._says_modes = False
        self._body = HeldBody()
        self._flows = False
        """Whether the body is being passed on, after the pick."""
        self._has_trailers = False
        self._body_ended = False
        self._closes = False
        """Whether the stream ends with the pick."""
        self._exchange: Exchange | None = None
        self._answer_began = False
        self._status = 0
        self._blame: Blame | None = None
        self._seen_first = False

    # Methods that a subclass overrides: here they do nothing

    def began(self) -> None:
        """Called when the request's headers have come."""

    def may_hold(self, size: int) -> bool:
        """Whether a part of the body that takes `size` bytes may be held, within a bound over all
        streams."""
        return True

    def ask(self, body: Reading | Blind) -> None:
        """Called when the request needs an endpoint. The subclass later calls `picked`, `unpicked`
        or `refused`, and with a Reading `read` before. Blind: why the body is not to be read."""

    def left_out(self) -> None:
        """Called when a part of the body is left out, since it came after the body's end."""

    def when_room(self) -> None:
        """Has `flow` called once Envoy has room for more; until then Envoy is kept from sending."""

    def let_go(self) -> None:
        """Called when nothing of the request's body is held any more."""

    def served(self, endpoint: str) -> None:
        """Called with the endpoint that served the request, as Envoy reports it."""

    def first_token(self) -> None:
        """Called when the answer's first token has come."""

    def progress(self, output_tokens: int) -> None:
        """Called with the number of the answer's tokens so far."""

    def ended(self, outcome: Outcome | None, *, observed: bool) -> None:
        """Called when the request is over. outcome: None: its body was not read. observed: False:
        the answer is under way, and the picker will see nothing of it.
        """

    # What Envoy sends

    def message(self, raw: bytes) -> None:
        """Handles a message of Envoy; raises ValueError for one that can't be read, or is out of
        order.
        """
        if self.observed and self._at in (_At.PENDING, _At.OVER):
            return
        if self._answer_began:
            if self._answer_mode == _DUPLEX and (part := messages.answer_part(raw)) is not None:
                self._answer_part(part)
                return
        elif self._at is not _At.START and (part := messages.request_part(raw)) is not None:
            self._request_body(part)
            return
        message, long = messages.read(raw)
        if message.observability_mode:
            self.observed = True
        elif message.HasField("protocol_config"):
            self._says_modes = True
            self._request_mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        step = message.WhichOneof("request")
        if self.observed and step is not None and step.startswith("response"):
            self._end(Blame.CANCELLED)  # an answer before the request was whole
            self.close()
            return
        match step:
            case "request_headers":
                self._request_headers(message)
            case "request_body":
                self._request_body(messages.part_of(message.request_body, long))
            case "request_trailers":
                self._request_trailers()
            case "response_headers":
                self._response_headers(message)
            case "response_body":
                self._answer_part(messages.part_of(message.response_body, long))
            case "response_trailers":
                self.send(messages.RESPONSE_TRAILERS_PASS)
                self._end(self._blame)
            case None:
                raise ValueError("Envoy sent a message that is no headers, body or trailers")

    def half_closed(self) -> None:
        """Handles the end of Envoy's side: the client left, or Envoy shows no answer. Envoy that
        names no body modes closes its side before the pick, and waits for the pick; in
        observability mode it may close its side before the decision.
        """
        waits_for_pick = self._at is _At.PENDING and (self.observed or not self._says_modes)
        if waits_for_pick or (self._at is _At.PICKED and self._flows):
            self._closes = True
            return
        if self._at is _At.PICKED and self._unseen():
            self._end(None, observed=False)
        else:
            self._end(Blame.CANCELLED)
        self.close()

    def reset(self) -> None:
        """Handles a broken stream: the client left, a worker broke its answer, or Envoy is gone."""
        if self._at is _At.PICKED and self._unseen() and self._answer_mode == _NONE:
            self._end(None, observed=False)
        else:
            self._end(Blame.CANCELLED)

    # The pick

    def picked(self, endpoints: str, headers: Mapping[str, str]) -> None:
        """Sends the picked endpoints to Envoy: `ip:port`, several with commas between in the order
        in which to try them. headers: for the worker.
        """
        own = {name.lower() for name in headers}
        taken = [name for name in of_plane(self.headers) if name not in own]
        self._go_on(messages.picked(endpoints, headers, taken, with_body=self._in_body))

    def unpicked(self) -> None:
        """Sends Envoy an answer without an endpoint; Envoy then picks by itself."""
        self._go_on(messages.unpicked(of_plane(self.headers), with_body=self._in_body))

    def refused(self, answer: Answer, reason: str) -> None:
        """Has Envoy give the client this answer, before the pick or instead of it."""
        if self._at not in (_At.BODY, _At.PENDING):
            return
        if not self.observed:
            self.send(messages.refused(answer, reason))
        self.decided()

    def decided(self) -> None:
        """Ends the stream: nothing more of the request is needed."""
        self._at = _At.OVER
        self._let_go()
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether nothing is reserved for the request any more."""
        return self._at is _At.OVER

    @property
    def wait(self) -> Wait:
        """The step that the stream is waiting for now."""
        return _WAITS.get(self._at, Wait.NOTHING)

    @property
    def body_wait_s(self) -> float:
        """Seconds for which the body may be waited for in all, given the bytes that have come."""
        return wait_s(self._body.bytes) if self._request_mode == _DUPLEX else BODY_S

    @property
    def _in_body(self) -> bool:
        return self._request_mode in _BUFFERED and bool(self._body)

    def read(self, exchange: Exchange) -> None:
        """Takes the exchange that a Reading made of the request's body."""
        if self._at is _At.PENDING:
            self._exchange = exchange

    def _go_on(self, first: bytes) -> None:
        if self._at is not _At.PENDING:
            return
        self._at = _At.PICKED
        self.send(first)
        if self._request_mode != _DUPLEX:
            self._body.clear()
        self._flows = True
        self.flow()

    def flow(self) -> None:
        """Sends the next slice of the request's body back to Envoy, once the pick is sent."""
        if not self._flows:
            return
        for message in self._body.take():
            self.send(message)
        if self._body:
            self.when_room()
            return
        self._flows = False
        if self._has_trailers:
            self._has_trailers = False
            self.send(messages.REQUEST_TRAILERS_PASS)
        self._let_go()
        if self._closes:
            self.half_closed()

    def drop(self) -> None:
        """Drops what is left of the body, since the stream is over on both sides."""
        self._flows = False
        self._let_go()

    def _let_go(self) -> None:
        self._body.clear()
        self.let_go()

    # The request

    def _request_headers(self, message: pb.ProcessingRequest) -> None:
        if self._at is not _At.START:
            raise ValueError("a request's headers came twice")
        self._at = _At.BODY
        headers = messages.headers_of(message.request_headers)
        self.path, _, self._query = headers.get(":path", "").partition("?")
        self._is_post = headers.get(":method") == "POST"
        self.headers = {name: value for name, value in headers.items() if name[:1] != ":"}
        self.subset = messages.subset_of(message)
        self.began()
        if message.request_headers.end_of_stream or not self._body_comes_first():
            self._ask()
        elif self._request_mode in _BUFFERED:
            self.send(messages.REQUEST_HEADERS_PASS)

    def _body_comes_first(self) -> bool:
        return self._request_mode == _DUPLEX or self._request_mode in _BUFFERED

    def _request_body(self, part: Part) -> None:
        if self._at is _At.START:
            raise ValueError("a request's body came before its headers")
        if self._body_ended and self._request_mode == _DUPLEX:
            # Envoy since 1.35 may send the last part twice (envoyproxy/envoy#46237): passed on, it
            # would double the end of the body.
            self.left_out()
            return
        self._body_ended = part.is_last
        if self._at in (_At.PICKED, _At.OVER):
            self._pass_on(part)
            return
        if self._at is _At.PENDING:  # the body is whole, or waits for an answer
            raise ValueError("a part of a request's body came before the answer that it waits for")
        self._body.append(part)
        size = len(part.body)
        held = max(size, SMALL_BYTES)  # a part takes memory beside its bytes
        if self._body.bytes + size > self._body_bytes_max or not self.may_hold(held):
            self._ask(Blind.BODY_TOO_LARGE)
            return
        self._body.bytes += size
        if part.is_last or self._request_mode in _BUFFERED:
            self._ask()

    def _pass_on(self, part: Part) -> None:
        if self._request_mode != _DUPLEX:
            self.send(messages.REQUEST_BODY_PASS)
            return
        self._body.append(part)
        if not self._flows:
            self._flows = True
            self.flow()

    def _request_trailers(self) -> None:
        if self._at in (_At.PICKED, _At.OVER) and not self._flows:
            self.send(messages.REQUEST_TRAILERS_PASS)
            return
        self._has_trailers = True
        if self._at is _At.BODY:
            self._ask()

    def _ask(self, blind: Blind | None = None) -> None:
        """Calls `ask`. blind: why the body is not read; None: path, method and body decide that."""
        self._at = _At.PENDING
        if blind is None and not (self.path in PATHS and self._is_post):
            blind = Blind.UNKNOWN_PATH
        elif blind is None and not self._body:
            blind = Blind.NO_BODY
        if blind is not None:
            self.ask(blind)
            return
        about = {"query": self._query, "low_first": self._low_first}
        make = partial(_exchange, self.path, self.headers, self._body.pieces(), **about)
        self.ask(Reading(self._body.bytes, make))

    # The answer

    def _response_headers(self, message: pb.ProcessingRequest) -> None:
        if self._answer_began:
            raise ValueError("an answer's headers came twice")
        self._answer_began = True
        headers = messages.headers_of(message.response_headers)
        status = headers.get(":status", "")
        self._status = int(status) if status.isascii() and status.isdigit() else 0
        self.send(messages.RESPONSE_HEADERS_PASS)
        if self._at is not _At.PICKED:  # Envoy's own answer
            self._end(Blame.CANCELLED)
            return
        if served := messages.served_of(message):
            self.served(served)
        if self._exchange is not None:
            failure = self._exchange.answered(
                self._status, headers.get("content-type", ""), headers.get("content-encoding", "")
            )
            if failure is not None:
                self._blame = Blame.CLIENT if failure is Kind.REJECTED else Blame.WORKER
        is_last = message.response_headers.end_of_stream
        if is_last or (self._answer_mode == _NONE and self._blame is not None):
            self._end(self._blame)

    def _answer_part(self, part: Part) -> None:
        send = self.send
        if self._answer_mode == _DUPLEX:
            for message in messages.streamed(part, of_answer=True):
                send(message)
        else:
            send(messages.RESPONSE_BODY_PASS)
        exchange = self._exchange
        if exchange is not None and self._at is _At.PICKED:
            answer = exchange.answer
            answer.feed(bytes(part.body))
            self.progress(answer.chunks)
            if not self._seen_first and answer.first_token and self._blame is None:
                self._seen_first = True
                self.first_token()
        if part.is_last:
            self._end(self._blame)

    def _unseen(self) -> bool:
        """Whether Envoy shows nothing of the answer's body."""
        return self._answer_mode == _NONE or not (self._says_modes or self._answer_began)

    # The end

    def _end(self, blame: Blame | None, *, observed: bool = True) -> None:
        if self._at is _At.OVER:
            return
        self._at = _At.OVER
        if not self._flows:
            self._let_go()
        outcome = self._exchange.ended(blame) if self._exchange is not None else None
        self.ended(outcome, observed=observed)


def _exchange(
    path: str,
    headers: Mapping[str, str],
    pieces: Iterable[bytes | memoryview],
    **more: Any,
) -> Exchange:
    body, request_id = b"".join(pieces), client_id(headers.get(REQUEST_ID, ""))
    more |= {"request_id": request_id, "model_headers": MODEL_HEADERS}
    return Exchange(path, body, headers, changes_bodies=False, **more)
