"""One HTTP request's life, from its body to its last report. Pure: no sockets, no clock, no router.

    exchange = Exchange("/v1/chat/completions", body, headers)
    exchange.question()              what to ask a router
    exchange.upstream(...)           the request to the worker of its pick
    exchange.answered(status, ...)   the answer's head: pass it on, or try another worker
    exchange.answer.feed(chunk)      the answer's bytes, less what the client did not request
    exchange.ended() / broke()       the numbers of the last report, and the client's last bytes

The gateway performs these steps over its own sockets, the endpoint picker by messages to Envoy.

Laws:
- another worker is tried only while no byte of an answer was passed on, and never for an answer
  that blames the client;
- an exchange has one outcome: the first that is recorded;
- a request's priority, at the router and at the engine, is at most what the client's key allows,
  and the engine gets it only from the router's pick.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, NamedTuple

from msgspec import UNSET

from events.engines.table import engine_of
from kvroute.client.messages.options import random_id
from kvroute.client.messages.usage import Usage
from kvroute.client.requests.failures import Kind, of_status
from kvroute.v1 import FailureReason
from router.gateway.engine_plane import is_of_plane
from router.gateway.openai_body import BOM, TENANT_HEADERS, Facts, first_header
from router.gateway.refusals import error_event
from router.gateway.top_level import changed
from router.gateway.usage import AnswerReader
from router.net.keys.identity import Identity
from router.request.bodies import PATHS
from router.request.request import CLIENT_ID_END

BYTES_A_TOKEN = 4
"""Bytes of a body that count as one token, to estimate the length of a prompt without tokens."""
ESTIMATE_MAX = 8192
"""Largest estimated length of a prompt, in tokens: an image's bytes, say, are mostly no tokens."""
REQUEST_ID_MAX = 256
"""Most characters of a client's X-Request-Id; a longer one counts as missing."""
UPSTREAM_ANSWER_MAX = 1 << 16
"""Most bytes kept of a worker's failed answer, which the client gets if no other worker is left."""
HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade",
))  # fmt: skip
"""Headers that are about one connection, and are not passed on (RFC 9110, 7.6.1)."""
_NOT_FORWARDED = HOP_BY_HOP | {
    "host", "content-length", "content-encoding", "accept-encoding", "expect", "x-request-id",
}  # fmt: skip
"""Request headers that the gateway writes itself, or that belong to the client's own connection;
headers of the engine plane are in engine_plane.py."""
_NOT_RETURNED = HOP_BY_HOP | {"date", "server", "x-request-id", "content-length"}
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Control characters, all but the tab."""
_BY_LOAD = frozenset((
    "EMPTY_PROMPT", "MESSAGE_TOO_LARGE", "MALFORMED_BODY", "UNSUPPORTED_CONTENT", "NO_TOKENIZER",
    "RENDERER_UNAVAILABLE", "RENDER_QUEUE_FULL",
))  # fmt: skip
"""A router's reasons to refuse a body after which the request goes by load alone: the engine judges
a body that routers can't read."""


class Blame(Enum):
    """The party whose failure ended a request, as it is reported to the router."""

    WORKER = FailureReason.FAILURE_REASON_WORKER
    TIMEOUT = FailureReason.FAILURE_REASON_TIMEOUT
    CLIENT = FailureReason.FAILURE_REASON_CLIENT
    CANCELLED = FailureReason.FAILURE_REASON_CANCELLED


class Upstream(NamedTuple):
    """An HTTP request to a worker."""

    url: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an exchange ended, for the last report to the router."""

    blame: Blame | None
    """The party at fault; None: the answer is whole."""
    usage: Usage
    output_tokens: int
    finish_reason: str = ""
    """The engine's word for why the answer ended, such as stop; empty: the answer has none."""


class Exchange:
    """One client's request, from its body to its end, with every worker that it is sent to."""

    def __init__(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        query: str = "",
        request_id: str = "",
        low_first: bool = False,
        changes_bodies: bool = True,
        identity: Identity | None = None,
        salts_tenants: bool = False,
        model_headers: tuple[str, ...] = (),
    ) -> None:
        """path: one of PATHS. headers: the client's, names in any case. query: what follows `?`,
        as the client wrote it. request_id: X-Request-Id for the worker, and the beginning of the
        request's id at the router; empty: none. low_first: a lower `priority` in the body goes
        first, as in vLLM. changes_bodies: False where the caller can change neither the body nor
        the answer. identity: of the client's key; None: clients need no key. salts_tenants: the
        cache salt depends on the tenant, so that tenants share no cached blocks. model_headers:
        headers of which the first that is set names the model in the body's place. Raises
        GatewayRefusal for a body that can't be read."""
        self.path = path
        self.query = query
        self.kind = PATHS[path]
        self.body = body.removeprefix(BOM)
        self.identity = identity
        self._forwarded = forwarded(headers.items())
        self.facts = Facts(self.body, self._forwarded, self.kind, low_first=low_first)
        self.model = first_header(self._forwarded, model_headers) or self.facts.model
        """Name of the model by which routers know it; empty: the request names none."""
        self.tenant = self.facts.tenant
        if identity is not None and identity.tenant:
            self.tenant = identity.tenant
            for name in TENANT_HEADERS:
                self._forwarded.pop(name, None)
            self._forwarded[TENANT_HEADERS[0]] = self.tenant
        self._salt = self._of_owner() if salts_tenants else None
        """Cache salt in the place of the client's; None: the client's stays."""
        self.request_id = request_id
        self._changes_bodies = changes_bodies
        self.outcome: Outcome | None = None
        self.answer = AnswerReader(self.kind, is_stream=False)
        """Reader of the answer of the worker that was tried last."""

    # The router

    def question(
        self,
        *,
        by_load: bool = False,
        tokens_max: int = ESTIMATE_MAX,
        output_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Options for the Route call to a router (kvroute.client.RouteOptions).

        by_load: the prompt is replaced by its estimated length, at most tokens_max tokens; its
        tenant is charged a token for each BYTES_A_TOKEN bytes of the body. output_tokens: expected
        length of the answer, None: not known; the client's bound counts where it is less.
        """
        facts = self.facts
        options: dict[str, Any] = {}
        if self.has_body and not by_load:
            options[self.kind.option] = self.body
            options["cache_salt"] = facts.cache_salt if self._salt is None else self._salt
        else:
            tokens = max(1, len(self.body) // BYTES_A_TOKEN)
            options["estimated_tokens"] = max(1, min(tokens, tokens_max))
            options["charged_tokens"] = tokens
        options["model"] = self.model  # empty, too: what is left out is looked for in the body
        expected = [n for n in (facts.output_tokens_max, output_tokens) if n is not None]
        own_id = self.request_id and self.request_id + CLIENT_ID_END + random_id()
        given = {
            "session_id": facts.session_id or None,
            "ttft_slo_ms": facts.ttft_slo_ms,
            "tpot_slo_ms": facts.tpot_slo_ms,
            "tenant": self.tenant or None,
            "priority": self._priority(),
            "expected_output_tokens": min(expected, default=None),
            "request_id": own_id or None,
        }
        return options | {name: value for name, value in given.items() if value is not None}

    @property
    def has_body(self) -> bool:
        """Whether a router can make tokens of the body. It can't if the request continues an
        earlier response, since only the engine of that response has its messages."""
        facts = self.facts
        return bool(self.kind.option) and facts.is_readable and not facts.previous_response_id

    @property
    def may_have_tokens(self) -> bool:
        """Whether the prompt's tokens may be added to the body that a worker gets."""
        return self.kind.takes_tokens and self.has_body and not self.facts.names_tokens

    def pairs_on(self, engine: str) -> bool:
        """Whether a prefill worker and a decode worker can share the request. engine: their
        engine's name.

        A request that continues an earlier response, or whose response is computed in the
        background, after its answer, is served by one worker.
        """
        if not self.kind.may_pair or self.facts.previous_response_id or self.facts.is_background:
            return False
        return self.kind.name not in engine_of(engine).unpaired_bodies

    def prefill_fields(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields to set in a prefill worker's request, UNSET for one to remove: the pick's
        (PrefillWorker.prefill_body, None for one to remove), and those of the path's format."""
        named = {name: UNSET if value is None else value for name, value in fields.items()}
        return {**named, **self.kind.prefill_fields}

    # The worker

    def upstream(
        self,
        address: str,
        headers: Mapping[str, str],
        *,
        engine_priority: int | None = None,
        fields: Mapping[str, Any] | None = None,
        tokens: Mapping[str, Any] | None = None,
    ) -> Upstream:
        """The HTTP request to a worker. address: base of its URL. headers: the pick's.
        engine_priority: for the engine; None: none. fields, tokens: to set at the body's top level:
        a pair's fields; the prompt's tokens, if may_have_tokens. Raises GatewayRefusal.
        """
        facts, more = self.facts, dict(fields or {})
        absent = not more
        more |= tokens or {}
        if self.takes_usage_out and "stream_options" not in more:
            more["stream_options"] = {**(facts.stream_options or {}), "include_usage": True}
            absent &= not facts.names_stream_options
        if facts.names_priority:
            more["priority"] = UNSET if engine_priority is None else engine_priority
            absent = False
        elif engine_priority and self.kind.takes_priority:
            more["priority"] = engine_priority
        if self._salt is not None:
            more["cache_salt"] = self._salt
            absent &= not facts.names_salt
        sent = self._forwarded | {"Accept-Encoding": "identity"}
        if self.request_id:
            sent["X-Request-Id"] = self.request_id
        body = changed(self.body, more, known=facts.spans, absent=absent)
        url = address.rstrip("/") + self.path
        if self.query:
            url += "?" + self.query
        return Upstream(url, sent | dict(headers), body)

    @property
    def takes_usage_out(self) -> bool:
        """Whether the gateway requests a stream's usage for itself, and removes it from the
        answer.
        """
        facts = self.facts
        return (
            self._changes_bodies
            and facts.is_stream
            and not facts.wants_usage
            and facts.stream_options is not None
            and self.kind.usage_is_option
        )

    def answered(self, status: int, content_type: str, encoding: str = "") -> Kind | None:
        """Reads the head of a worker's answer; returns the kind of failure that its status means,
        None for status 2xx. encoding: its Content-Encoding; compressed bytes, which the gateway
        never requests, are passed on unread.
        """
        is_stream = content_type.lower().startswith("text/event-stream") and (
            encoding.lower() in ("", "identity")
        )
        self.answer = AnswerReader(
            self.kind, is_stream=is_stream, takes_usage_out=self.takes_usage_out
        )
        return None if 200 <= status < 300 else of_status(status)

    # The end

    def ended(self, blame: Blame | None = None) -> Outcome:
        """Records the end of the answer; returns the exchange's outcome, which a later call does
        not change. blame: the party at fault; None: the answer came whole; an error at the end of
        its stream is then judged by the error's status.
        """
        if self.outcome is None:
            answer = self.answer
            if blame is None and (status := answer.error_status()) is not None:
                blame = Blame.WORKER if status >= 500 else Blame.CLIENT
            usage = answer.usage() if blame is None else Usage()
            if not self.facts.has_one_prompt:
                usage = usage._replace(prompt_tokens=None)
            output = usage.output_tokens
            self.outcome = Outcome(
                blame,
                usage,
                answer.chunks if output is None else output,
                answer.finish_reason() if blame is None else "",
            )
        return self.outcome

    def broke(self, blame: Blame, reason: str, message: str) -> bytes:
        """Records that the worker failed after bytes were passed on; returns the last bytes for the
        client: for a stream an event with the error; empty for another answer, which has no place
        for an error.
        """
        self.ended(blame)
        answer = self.answer
        if not answer.is_stream:
            return b""
        lead = b"\n\n" if answer.inside_event else b""
        number = answer.next_number()
        return lead + error_event(reason, message, self.kind.errors, number=number)

    @property
    def owner(self) -> tuple[str, str]:
        """Owner of the request's answer: the name of the client's key, empty if the key has a
        tenant, and the tenant. Without keys the name is empty, and the tenant that of the headers,
        which a proxy that checks clients sets.
        """
        identity = self.identity
        if identity is None:
            tenants = (self._forwarded.get(name) for name in TENANT_HEADERS)
            return "", next(filter(None, tenants), "")
        return "" if identity.tenant else identity.name, self.tenant

    def check_rights(self) -> None:
        """Raises Refusal for fields that the client's key may not set."""
        if self.identity is not None:
            self.identity.check_body(self.facts.model, self.facts.adapters, self.facts.of_plane)

    def _priority(self) -> int | None:
        """The client's priority, at most the highest that its key allows; None: it sets none."""
        priority = self.facts.priority
        if priority is None or self.identity is None:
            return priority
        return min(priority, self.identity.priority_max)

    def _of_owner(self) -> str | None:
        """Cache salt made of the request's owner and the client's salt: a SHA-256, so that no
        client can write another owner's salt. None: the owner is not known."""
        if not any(self.owner):
            return None
        salted = sha256(b"kvroute tenant")
        for part in (*self.owner, self.facts.cache_salt):
            salted.update(sha256(part.encode(errors="surrogatepass")).digest())
        return salted.hexdigest()


def goes_by_load(reason: str | None, code: str) -> bool:
    """Whether a request is routed by load alone after a router refused its body. reason: of the
    refusal; None: it has none. code: name of the gRPC status; RESOURCE_EXHAUSTED without a reason
    is gRPC's own, for a message over its limit.
    """
    return reason in _BY_LOAD or (reason is None and code == "RESOURCE_EXHAUSTED")


def forwarded(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A client's headers that are passed on to a worker, by names in lower case; values of a
    repeated name are joined.
    """
    pairs = list(headers)
    of_connection = _of_connection(pairs)
    kept: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        if not (lower in _NOT_FORWARDED or lower in of_connection or is_of_plane(lower)):
            text = _text(value)
            kept[lower] = f"{kept[lower]}, {text}" if lower in kept else text
    return kept


def returned(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """A worker's headers that are passed back to the client."""
    pairs = list(headers)
    dropped = _NOT_RETURNED | _of_connection(pairs)
    return [(name, _text(value)) for name, value in pairs if name.lower() not in dropped]


def client_id(header: str) -> str:
    """A client's X-Request-Id; empty: missing, too long, or not printable."""
    return header if len(header) <= REQUEST_ID_MAX and header.isprintable() else ""


def _of_connection(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Names, in lower case, of headers that `Connection` declares to be of the connection alone."""
    return {
        name.strip().lower()
        for key, value in headers
        if key.lower() == "connection"
        for name in value.split(",")
    }


def _text(value: str) -> str:
    """A header's value in a form that can be sent: bytes that are no UTF-8, which were read as lone
    surrogates, become Latin-1, and control characters spaces (RFC 9110, 5.5)."""
    if value.isprintable():
        return value
    value = _CONTROLS.sub(" ", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode(errors="surrogateescape").decode("latin1")
    return value
