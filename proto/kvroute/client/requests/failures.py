"""Judges failures: from an exception to what is reported, tried again and answered. Pure.

    exception -> judge -> Kind -> FAILURES: what is reported, tried again, blamed, answered

The gateway, RoutedRequest and Attempts all judge by it; docs/reference-statuses.md shows the table
FAILURES.

Laws:
- every exception has one kind, and judge() never raises;
- a worker is blamed only for what it did, or failed to do, itself: never for the caller's own host,
  for a connection that was open before, for the client or for a model that moved;
- once a byte of the answer was passed on, nothing is tried again: the answer is cut.
"""

import asyncio
import errno
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvroute.client.errors import KvRouteError, UnusableAnswer
from kvroute.v1 import FailureReason

_OUR_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)
_UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError)
"""Subclasses of ValueError about bytes from elsewhere: inside a request, from the engine."""
_NO_CONNECTION = frozenset(("ClientConnectorError", "ConnectError"))
"""aiohttp's and httpx's exceptions for a connection that could not be made; the openai package
raises that of httpx, too."""
_NO_NAME = "ClientConnectorDNSError"
_HOST = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_ROUTE = frozenset((
    errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.ENETDOWN, errno.ENETUNREACH, errno.EAFNOSUPPORT,
    errno.EACCES, errno.EPERM,
))  # fmt: skip
_NAMES_AWAY = frozenset((
    socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_MEMORY, socket.EAI_SYSTEM,
))  # fmt: skip
"""Codes of a name server that can't be reached. A name that it doesn't know is the
worker's fault."""
_CAUSES_MAX = 8
"""Causes of an exception that are examined."""


class Kind(StrEnum):
    """Kinds of failures, the worst first: a group of exceptions has the kind of its
    worst member."""

    BROKE = "broke"
    UNUSABLE = "unusable"
    FAILED = "failed"
    REFUSED = "refused"
    SILENT = "silent"
    HOST = "host"
    ROUTE = "route"
    LONG_HEAD = "long_head"
    NO_MODEL = "no_model"
    REJECTED = "rejected"
    CALLER = "caller"
    GONE = "gone"
    STALE = "stale"
    CANCELLED = "cancelled"


class Again(StrEnum):
    """Where a request is tried again, as long as no byte of an answer was passed on."""

    NO = "no"
    FRESH = "same worker, fresh connection"
    ELSEWHERE = "another worker"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from a kind of failure."""

    about: str
    """How a failure of this kind is recognized."""
    reported: FailureReason.ValueType
    """The FailureReason that is reported to the router, which blames the worker for WORKER and
    TIMEOUT alone."""
    again: Again
    reason: str
    """The reason in the gateway's answer, if nothing is left to try; empty: the worker's own
    answer, or none."""
    refused: bool = False
    """Whether the connection was refused, so that nothing of the request arrived: a single such
    failure counts against the worker."""

    @property
    def blames(self) -> bool:
        """Whether a failure of this kind counts against the worker."""
        return self.reported in (_WORKER, _TIMEOUT)


_WORKER = FailureReason.FAILURE_REASON_WORKER
_TIMEOUT = FailureReason.FAILURE_REASON_TIMEOUT
_CLIENT = FailureReason.FAILURE_REASON_CLIENT
_CANCELLED = FailureReason.FAILURE_REASON_CANCELLED
FAILURES: Mapping[Kind, Judgement] = {
    Kind.REFUSED: Judgement(
        "the worker's address takes no connection",
        *(_WORKER, Again.ELSEWHERE, "WORKER_FAILED"),
        refused=True,
    ),
    Kind.BROKE: Judgement(
        "a fresh connection, or an answer that had begun, breaks; a worker's name has no address;"
        " any exception without a row of its own",
        *(_WORKER, Again.ELSEWHERE, "WORKER_FAILED"),
    ),
    Kind.UNUSABLE: Judgement(
        "the answer is no HTTP, or no answer to the request: status 1xx without end, 101, 3xx or"
        " none, a head without end, a hand-over of a prefill worker in another form than"
        " JSON objects",
        *(_WORKER, Again.ELSEWHERE, "WORKER_FAILED"),
    ),
    Kind.FAILED: Judgement(
        "status 408, 429 or 5xx; its body counts as far as it comes within 1 s",
        *(_WORKER, Again.ELSEWHERE, ""),
    ),
    Kind.SILENT: Judgement(
        "no byte for `gateway.silence_s`, no connection within 5 s, no"
        " acknowledgement of TCP for 30 s (ETIMEDOUT)",
        *(_TIMEOUT, Again.ELSEWHERE, "WORKER_SILENT"),
    ),
    Kind.GONE: Judgement(
        "no byte so far, and the router says that the worker's relay is silent, or that the engine"
        " does not answer its relay, while another worker of the model may be picked",
        *(_CANCELLED, Again.ELSEWHERE, "WORKER_SILENT"),
    ),
    Kind.STALE: Judgement(
        "a connection that was used before closes, and nothing was answered on it: the engine"
        " closed it for its age",
        *(_CANCELLED, Again.FRESH, ""),
    ),
    Kind.HOST: Judgement(
        "the caller's own host has no file descriptors or memory left (EMFILE, ENFILE, ENOBUFS,"
        " ENOMEM)",
        *(_CLIENT, Again.NO, "HOST_FAILED"),
    ),
    Kind.ROUTE: Judgement(
        "the caller's own host can't reach that address: no local port (EADDRNOTAVAIL), no"
        " network (ENETUNREACH, ENETDOWN, EAFNOSUPPORT), a firewall (EACCES, EPERM), no name"
        " server (EAI_AGAIN, EAI_FAIL)",
        *(_CLIENT, Again.ELSEWHERE, "HOST_FAILED"),
    ),
    Kind.LONG_HEAD: Judgement(
        "an answer of status 2xx or 4xx whose head is over 16 KiB, and not over four times that",
        *(_CLIENT, Again.NO, "ANSWER_HEAD_TOO_LARGE"),
    ),
    Kind.NO_MODEL: Judgement(
        "status 404 whose body names the request's model: the worker does not have it any more,"
        " and another one that lists it may",
        *(_CLIENT, Again.ELSEWHERE, ""),
    ),
    Kind.REJECTED: Judgement(
        "another status 4xx: the worker blames the request", *(_CLIENT, Again.NO, "")
    ),
    Kind.CALLER: Judgement(
        "a mistake of the caller's own code, an error of kvroute's",
        *(_CLIENT, Again.NO, "GATEWAY_FAULT"),
    ),
    Kind.CANCELLED: Judgement(
        "the client left, the task was cancelled, the program ends", *(_CANCELLED, Again.NO, "")
    ),
}
_ORDER = list(Kind)


def judgement(error: BaseException, *, unanswered_reuse: bool = False) -> Judgement:
    """What follows from a failure: the entry of FAILURES for the kind that judge() finds."""
    return FAILURES[judge(error, unanswered_reuse=unanswered_reuse)]


def judge(error: BaseException, *, unanswered_reuse: bool = False) -> Kind:
    """The kind of a failure, by an exception's type, its causes, errno and HTTP status.

    An exception with a Kind in its attribute `failure` has that kind. unanswered_reuse: the
    exception came from a connection that was used before, and on which nothing was answered. Never
    raises.
    """
    if isinstance(error, BaseExceptionGroup):
        kinds = {judge(member, unanswered_reuse=unanswered_reuse) for member in error.exceptions}
        return min(kinds, key=_ORDER.index)
    said = getattr(error, "failure", None)
    if isinstance(said, Kind):
        return said
    match error:
        case asyncio.CancelledError() | GeneratorExit() | KeyboardInterrupt() | SystemExit():
            return Kind.CANCELLED
        case KvRouteError():  # before TimeoutError: a slow router is no slow worker
            return Kind.CALLER
        case TimeoutError():
            return Kind.SILENT
        case UnusableAnswer():
            return Kind.UNUSABLE
        case _:
            pass
    status = _http_status(error)
    if status is not None:
        return of_status(status)
    if isinstance(error, _UNREADABLE):
        return Kind.UNUSABLE
    if isinstance(error, _OUR_MISTAKES):
        return Kind.CALLER
    kind = _of_connection(error)
    return Kind.STALE if kind is Kind.BROKE and unanswered_reuse else kind


def of_status(status: int) -> Kind:
    """The kind of a failure, by the status of its HTTP answer."""
    if status in {408, 429} or 500 <= status < 600:
        return Kind.FAILED
    return Kind.REJECTED if 400 <= status < 500 else Kind.UNUSABLE


def _of_connection(error: BaseException) -> Kind:
    """The kind of a failed connection, by the exception and its causes."""
    kind = Kind.BROKE
    for cause in _causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        if isinstance(cause, socket.gaierror):
            return Kind.ROUTE if number in _NAMES_AWAY else Kind.BROKE
        if isinstance(cause, MemoryError) or number in _HOST:
            return Kind.HOST
        if number in _ROUTE:
            return Kind.ROUTE
        if number == errno.ETIMEDOUT:
            return Kind.SILENT
        names = {each.__name__ for each in type(cause).__mro__}
        if _NO_NAME in names:
            kind = Kind.ROUTE
        elif kind is Kind.BROKE and (
            isinstance(cause, ConnectionRefusedError) or not _NO_CONNECTION.isdisjoint(names)
        ):
            kind = Kind.REFUSED
    return kind


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _http_status(error: BaseException) -> int | None:
    """The HTTP status in an error of aiohttp (status), openai (status_code), httpx (response)."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status"), (error, "status_code"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None
