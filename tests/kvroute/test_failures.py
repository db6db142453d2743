"""The one judgement of failures: every exception has one kind, and only a worker's own failure
counts against it."""

import asyncio
import errno
import itertools
import socket
from typing import Any

import aiohttp
import grpc
import httpx
import pytest
from aiohttp.client_reqrep import ConnectionKey
from hypothesis import given
from hypothesis import strategies as st

from kvroute.client import NoWorker, UnusableAnswer
from kvroute.client.requests.failures import FAILURES, Again, Kind, judge, judgement, of_status
from kvroute.v1 import FailureReason

HOST = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ROUTE = (
    errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.ENETDOWN, errno.EAFNOSUPPORT, errno.EACCES,
    errno.EPERM,
)  # fmt: skip
NAMES = (socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM, socket.EAI_MEMORY)
KEY = ConnectionKey("w", 80, False, True, None, None, None)
UNANSWERED = (
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientOSError(errno.ECONNRESET, "reset"),
    aiohttp.ClientConnectionResetError("closing"),
    httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    BrokenPipeError(errno.EPIPE, "pipe"),
)


def bare(error: OSError) -> BaseException:
    return error


def of_aiohttp(error: OSError) -> BaseException:
    made = aiohttp.ClientConnectorError(KEY, error)
    made.__cause__ = error
    return made


def of_aiohttp_later(error: OSError) -> BaseException:
    return aiohttp.ClientOSError(*error.args)


def of_httpx(error: OSError) -> BaseException:
    made = httpx.ConnectError(str(error))
    made.__context__ = RuntimeError("httpcore.ConnectError")
    made.__context__.__cause__ = error
    return made


def of_a_library(error: OSError) -> BaseException:
    made = RuntimeError("an engine's own library")
    made.__cause__ = error
    return made


WRAPPERS = (bare, of_aiohttp, of_aiohttp_later, of_httpx, of_a_library)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((number, Kind.HOST) for number in HOST),
        *((number, Kind.ROUTE) for number in ROUTE),
        (errno.ETIMEDOUT, Kind.SILENT),
    ],
)
def test_an_errno_says_whose_failure_it_is(wrap: Any, number: int, kind: Kind) -> None:
    assert judge(wrap(OSError(number, "by the test"))) is kind


@pytest.mark.parametrize("wrap", [bare, of_aiohttp, of_httpx, of_a_library])
@pytest.mark.parametrize("number", [*NAMES, socket.EAI_NONAME])
def test_a_name_server_that_is_away_is_the_callers(wrap: Any, number: int) -> None:
    error = wrap(socket.gaierror(number, "by the test"))
    assert judge(error) is (Kind.BROKE if number == socket.EAI_NONAME else Kind.ROUTE)


def test_a_resolver_without_gaierror_is_the_callers() -> None:
    assert judge(aiohttp.ClientConnectorDNSError(KEY, OSError(None, "no answer"))) is Kind.ROUTE


@pytest.mark.parametrize("wrap", [bare, of_aiohttp, of_httpx, of_a_library])
def test_a_refused_connection_is_the_workers_wherever_it_is_known(wrap: Any) -> None:
    error = wrap(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
    assert judge(error) is Kind.REFUSED
    assert judge(error, unanswered_reuse=True) is Kind.REFUSED


@pytest.mark.parametrize("error", UNANSWERED, ids=lambda error: type(error).__name__)
def test_a_connection_that_closes_as_it_is_used_again_is_nobodys_failure(
    error: BaseException,
) -> None:
    assert judge(error) is Kind.BROKE
    assert judge(error, unanswered_reuse=True) is Kind.STALE
    assert FAILURES[Kind.STALE].again is Again.FRESH


@given(st.integers(-(10**6), 399) | st.integers(600, 10**6))
def test_a_status_of_no_failure_is_unusable(status: int) -> None:
    assert of_status(status) is Kind.UNUSABLE


@given(st.integers(400, 599))
def test_a_status_of_a_failure_blames_one_side(status: int) -> None:
    ours = status < 500 and status not in (408, 429)
    assert of_status(status) is (Kind.REJECTED if ours else Kind.FAILED)


LEAVES = st.sampled_from(
    [
        *(OSError(number, "x") for number in (*HOST, *ROUTE, errno.EPIPE, errno.EINVAL)),
        *UNANSWERED,
        MemoryError(),
        TimeoutError(),
        KeyError("choices"),
        ValueError(),
        UnusableAnswer("no choices"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        NoWorker(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "router"),
        asyncio.CancelledError(),
        GeneratorExit(),
        RecursionError(),
        type("Odd", (Exception,), {"status": "500", "failure": "host", "response": 7})(),
        type("Odder", (Exception,), {"status": -1, "status_code": None})(),
    ]
)
TREES: st.SearchStrategy[BaseException] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(
        lambda members: BaseExceptionGroup("several", members)
    ),
    max_leaves=6,
)


@given(TREES, st.booleans())
def test_every_exception_has_one_kind(error: BaseException, reused: bool) -> None:
    kind = judge(error, unanswered_reuse=reused)
    assert kind in FAILURES
    if isinstance(error, BaseExceptionGroup):
        of_members = {judge(member, unanswered_reuse=reused) for member in error.exceptions}
        assert kind in of_members
        blames = {FAILURES[each].blames for each in of_members}
        assert FAILURES[kind].blames == any(blames), "the worst member counts"


@given(st.sampled_from([*HOST, *ROUTE]), st.lists(st.sampled_from(WRAPPERS), max_size=3))
def test_the_callers_own_host_blames_no_worker_however_it_is_wrapped(
    number: int, wrappers: list[Any]
) -> None:
    error: BaseException = OSError(number, "by the test")
    for wrap in wrappers:
        outer = wrap(error if isinstance(error, OSError) else OSError(number, "by the test"))
        outer.__cause__ = outer.__cause__ or error if outer is not error else None
        error = outer
    assert not judgement(error).blames


def test_the_table_says_one_thing_of_each_kind() -> None:
    assert FAILURES.keys() == set(Kind)
    for kind, judged in FAILURES.items():
        assert judged.blames == (judged.reported in (
            FailureReason.FAILURE_REASON_WORKER, FailureReason.FAILURE_REASON_TIMEOUT
        ))  # fmt: skip
        assert not (judged.refused and not judged.blames)
        assert not judged.blames or judged.again is Again.ELSEWHERE, kind
    abouts = [judged.about for judged in FAILURES.values()]
    assert all(one != other for one, other in itertools.combinations(abouts, 2))
