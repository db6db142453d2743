"""Statuses become errors that a caller can tell apart."""

import copy
import pickle

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.status_pb2 import Status

from kvroute import client
from kvroute.client import (
    AlreadyExists,
    ClientClosed,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    KvRouteError,
    NotFound,
    NoTokens,
    NoWorker,
    Overloaded,
    PermissionDenied,
    RouterUnreachable,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownSession,
    UnknownWorker,
    WorkerExists,
    error_from_status,
)
from kvroute.client.errors import error_from_call
from tests.kvroute.scripted_router import status

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (Code.INVALID_ARGUMENT, "EMPTY_PROMPT", InvalidRequest),
        (Code.INVALID_ARGUMENT, None, InvalidRequest),
        (Code.INVALID_ARGUMENT, "MALFORMED_BODY", InvalidRequest),
        (Code.FAILED_PRECONDITION, "NO_TOKENIZER", NoTokens),
        (Code.UNIMPLEMENTED, "UNSUPPORTED_CONTENT", NoTokens),
        (Code.UNAVAILABLE, "RENDERER_UNAVAILABLE", Unavailable),
        (Code.RESOURCE_EXHAUSTED, "RENDER_QUEUE_FULL", Overloaded),
        (Code.NOT_FOUND, "UNKNOWN_MODEL", UnknownModel),
        (Code.NOT_FOUND, "UNKNOWN_SESSION", UnknownSession),
        (Code.NOT_FOUND, "UNKNOWN_WORKER", UnknownWorker),
        (Code.NOT_FOUND, None, NotFound),
        (Code.ALREADY_EXISTS, "REQUEST_ID_REUSED", DuplicateRequest),
        (Code.ALREADY_EXISTS, "WORKER_EXISTS", WorkerExists),
        (Code.ALREADY_EXISTS, "A_LATER_ONE", AlreadyExists),
        (Code.UNAVAILABLE, "NO_WORKER", NoWorker),
        (Code.UNAVAILABLE, "NO_ELIGIBLE_WORKER", NoWorker),
        (Code.UNAVAILABLE, "DRAINING", Unavailable),
        (Code.UNAVAILABLE, None, RouterUnreachable),
        (Code.RESOURCE_EXHAUSTED, "ALL_WORKERS_FULL", Overloaded),
        (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceeded),
        (Code.PERMISSION_DENIED, "POLICY_NOT_ALLOWED", PermissionDenied),
        (Code.UNAUTHENTICATED, None, Unauthenticated),
        (Code.INTERNAL, "INTERNAL", KvRouteError),
    ],
)
def test_a_status_becomes_the_class_that_its_reason_or_else_its_code_names(
    code: grpc.StatusCode, reason: str | None, kind: type[KvRouteError]
) -> None:
    error = error_from_status(status(code, reason, message="so it is", retry_after_s=0.25))
    assert type(error) is kind
    assert (error.code, error.reason, error.message) == (code, reason, "so it is")
    assert error.retry_after_s == 0.25
    assert str(error) == f"{reason or code.name}: so it is"


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert issubclass(InvalidRequest, ValueError)


def test_an_error_tells_what_the_router_told_besides() -> None:
    said = status(Code.NOT_FOUND, "UNKNOWN_MODEL", metadata={"model": "m"})
    assert error_from_status(said).metadata == {"model": "m"}
    assert error_from_status(said).retry_after_s is None


def test_a_reason_of_another_domain_is_not_the_routers_word() -> None:
    said = status(Code.UNAVAILABLE, "NO_WORKER", domain="proxy.example")
    error = error_from_status(said)
    assert error.reason is None
    assert isinstance(error, RouterUnreachable)


def test_details_that_cannot_be_read_leave_code_and_message() -> None:
    garbage = AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    code = Code.NOT_FOUND.value[0]
    error = error_from_status(Status(code=code, message="no", details=[garbage]))
    assert (type(error), error.reason, error.message) == (NotFound, None, "no")
    failure = grpc.aio.AioRpcError(
        Code.NOT_FOUND,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff")),
        details="no",
    )
    error = error_from_call(failure)
    assert (type(error), error.reason, error.message) == (NotFound, None, "no")


def test_a_code_from_the_future_is_unknown() -> None:
    assert error_from_status(Status(code=999, message="?")).code is Code.UNKNOWN


@pytest.mark.parametrize(
    "error",
    [
        error_from_status(status(Code.DEADLINE_EXCEEDED, "R", metadata={"a": "b"})),
        error_from_status(status(Code.RESOURCE_EXHAUSTED, "R", retry_after_s=2.0)),
        error_from_status(status(Code.INVALID_ARGUMENT, "R")),
        ClientClosed(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling_and_copying(error: KvRouteError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert vars(twin) == vars(error)
        assert str(twin) == str(error)


def test_every_error_is_exported() -> None:
    kinds = {kind.__name__ for kind in _descendants(KvRouteError)}
    assert kinds <= set(client.__all__)


def _descendants(kind: type[KvRouteError]) -> set[type[KvRouteError]]:
    found = set(kind.__subclasses__())
    return found.union(*(_descendants(one) for one in found))
