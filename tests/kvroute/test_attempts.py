"""One request on several workers: when it is tried again, what the router hears, what is raised."""

import asyncio
import socket
from typing import Any

import grpc
import pytest

from kvroute.client import (
    InvalidRequest,
    KvRouteClient,
    NoWorker,
    Overloaded,
    RetryBudgetPolicy,
    RoutedRequest,
    UnknownModel,
)
from kvroute.client.requests.attempts import REFUSED_MAX
from kvroute.client.requests.failures import judgement
from kvroute.v1 import FailureReason, PrefillWorker, Progress, ProgressState
from tests.kvroute.scripted_router import GUARD_S, Clock, Server, pick_of, status

PREFILL_DONE = ProgressState.PROGRESS_STATE_PREFILL_DONE
FINISHED = ProgressState.PROGRESS_STATE_FINISHED
FAILED = ProgressState.PROGRESS_STATE_FAILED
WORKER = FailureReason.FAILURE_REASON_WORKER
TIMEOUT = FailureReason.FAILURE_REASON_TIMEOUT
CLIENT = FailureReason.FAILURE_REASON_CLIENT
CANCELLED = FailureReason.FAILURE_REASON_CANCELLED
TOKENS = [1, 2, 3]


class _HttpError(Exception):
    def __init__(self, http_status: int) -> None:
        super().__init__(f"HTTP {http_status}")
        self.status = http_status


class ClientConnectorError(OSError):
    """Named as aiohttp's."""


@pytest.fixture
def server(server: Server) -> Server:
    server.router.workers = ["w0", "w1", "w2", "w3"]
    return server


def make_client(server: Server, **settings: Any) -> tuple[KvRouteClient, Clock]:
    clock = Clock(at_once=False)
    return KvRouteClient(server.address, clock=clock, sleep=clock.sleep, **settings), clock


class Engines:
    """What each worker does with a request."""

    def __init__(self, **errors: BaseException) -> None:
        self.errors = errors
        self.served: list[str] = []

    async def serve(self, request: RoutedRequest) -> str:
        worker_id = request.pick.worker_id
        self.served.append(worker_id)
        if (error := self.errors.get(worker_id)) is not None:
            raise error
        await request.prefill_done()
        request.output_tokens = 7
        return worker_id


async def ask(client: KvRouteClient, engines: Engines, **options: Any) -> str:
    options.setdefault("token_ids", TOKENS)
    async with asyncio.timeout(GUARD_S):
        async for attempt in client.attempts(**options):
            async with attempt as request:
                return await engines.serve(request)
    raise AssertionError("attempts ended without an answer or an error")


async def told(server: Server, count: int) -> list[Progress]:
    """The reports; those of several requests may overtake one another."""
    reports = [await server.next_report() for _ in range(count)]
    return sorted(reports, key=lambda one: (one.reservation_id, one.state))


async def test_a_request_that_goes_well_is_one_attempt(server: Server) -> None:
    client, _ = make_client(server)
    engines = Engines()
    async with client:
        assert await ask(client, engines) == "w0"
        assert (client.counts["attempts"], client.counts["retries"]) == (1, 0)
    done, finished = await told(server, 2)
    assert (done.state, finished.state, finished.output_tokens) == (PREFILL_DONE, FINISHED, 7)


@pytest.mark.parametrize(
    ("error", "reason", "refused"),
    [
        (ConnectionRefusedError(), WORKER, True),
        (ClientConnectorError(), WORKER, True),
        (ConnectionResetError(), WORKER, False),
        (_HttpError(500), WORKER, False),
        (_HttpError(503), WORKER, False),
        (TimeoutError(), TIMEOUT, False),
    ],
)
@pytest.mark.parametrize("batching", [True, False])
async def test_a_failure_before_the_first_token_is_tried_on_another_worker(
    server: Server,
    batching: bool,
    error: BaseException,
    reason: FailureReason.ValueType,
    refused: bool,
) -> None:
    client, _ = make_client(server, batching=batching)
    engines = Engines(w0=error)
    async with client:
        assert await ask(client, engines, excluded_worker_ids=["z"]) == "w1"
        assert (client.counts["attempts"], client.counts["retries"]) == (2, 1)
    first, second = server.router.asked
    assert first.request_id != second.request_id
    assert list(first.excluded_worker_ids) == ["z"]
    assert list(second.excluded_worker_ids) == ["z", "w0"]
    assert first.token_bytes == second.token_bytes
    failed, *_, finished = await told(server, 3)
    assert (failed.reservation_id, failed.state) == ("r-w0-1", FAILED)
    assert (failed.failure_reason, failed.refused) == (reason, refused)
    assert (finished.reservation_id, finished.state) == ("r-w1-2", FINISHED)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (_HttpError(400), CLIENT),
        (_HttpError(404), CLIENT),
        (KeyError("choices"), CLIENT),
        (NoWorker(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "of another router"), CLIENT),
        (asyncio.CancelledError(), CANCELLED),
        (KeyboardInterrupt(), CANCELLED),
    ],
)
async def test_what_would_fail_anywhere_is_raised_at_once(
    server: Server, error: BaseException, reason: FailureReason.ValueType
) -> None:
    client, _ = make_client(server)
    engines = Engines(w0=error)
    async with client:
        with pytest.raises(type(error)) as caught:
            await ask(client, engines)
    assert caught.value is error
    assert engines.served == ["w0"]
    (failed,) = await told(server, 1)
    assert (failed.state, failed.failure_reason) == (FAILED, reason)


async def test_a_failure_after_the_first_token_is_raised(server: Server) -> None:
    client, _ = make_client(server)

    async def stream() -> None:
        async for attempt in client.attempts(token_ids=TOKENS):
            async with attempt as request:
                await request.prefill_done()
                raise ConnectionResetError("half way")

    async with client:
        with pytest.raises(ConnectionResetError, match="half way"):
            await stream()
        assert client.counts["attempts"] == 1
    _, failed = await told(server, 2)
    assert (failed.state, failed.failure_reason) == (FAILED, WORKER)


async def test_a_request_that_the_body_ended_is_not_tried_again(server: Server) -> None:
    client, _ = make_client(server)

    async def end() -> None:
        async for attempt in client.attempts(token_ids=TOKENS):
            async with attempt as request:
                await request.failed(TIMEOUT)
                raise ConnectionResetError

    async with client:
        with pytest.raises(ConnectionResetError):
            await end()
    (failed,) = await told(server, 1)
    assert failed.failure_reason == TIMEOUT
    assert len(server.router.asked) == 1


async def test_attempts_are_bounded_and_the_last_failure_tells_of_the_earlier_ones(
    server: Server,
) -> None:
    client, _ = make_client(server)
    cause = OSError("its own cause")
    last = _HttpError(502)
    last.__cause__ = cause
    engines = Engines(w0=_HttpError(500), w1=TimeoutError("slow"), w2=last)
    async with client:
        with pytest.raises(_HttpError) as caught:
            await ask(client, engines)
        assert client.counts["retries_over_attempts"] == 1
    assert caught.value is last
    assert last.__cause__ is cause
    assert last.__notes__ == [
        "kvroute: attempt 1, on w0, failed: _HttpError: HTTP 500",
        "kvroute: attempt 2, on w1, failed: TimeoutError: slow",
    ]
    assert engines.served == ["w0", "w1", "w2"]


async def test_refused_connections_are_no_attempts_up_to_their_bound(server: Server) -> None:
    count = REFUSED_MAX + 3
    server.router.workers = [f"w{i}" for i in range(count + 1)]
    client, _ = make_client(server)
    refused = {f"w{i}": ConnectionRefusedError() for i in range(REFUSED_MAX)}
    slow = {f"w{i}": TimeoutError() for i in range(REFUSED_MAX, count - 1)}
    async with client:
        assert await ask(client, Engines(**refused, **slow)) == f"w{count - 1}"
        refused = {f"w{i}": ConnectionRefusedError() for i in range(count)}
        with pytest.raises(ConnectionRefusedError):
            await ask(client, Engines(**refused))
        assert client.counts["retries_over_attempts"] == 1
    assert len(server.router.asked) == 2 * count


async def test_with_one_attempt_a_refused_connection_is_raised(server: Server) -> None:
    client, _ = make_client(server)
    engines = Engines(w0=ConnectionRefusedError())
    async with client:
        with pytest.raises(ConnectionRefusedError):
            await ask(client, engines, attempts_max=1)
    assert engines.served == ["w0"]


async def test_notes_are_bounded(server: Server) -> None:
    client, _ = make_client(server)
    engines = Engines(w0=RuntimeError("x" * 10_000), w1=RuntimeError("last"))
    async with client:
        with pytest.raises(RuntimeError) as caught:
            await ask(client, engines, attempts_max=2)
    (note,) = caught.value.__notes__
    assert len(note) <= 300


async def test_with_no_worker_left_the_last_failure_is_raised_without_a_wait(
    server: Server,
) -> None:
    server.router.workers = ["w0", "w1"]
    client, clock = make_client(server)
    engines = Engines(w0=_HttpError(500), w1=_HttpError(501))
    async with client:
        with pytest.raises(_HttpError, match="501") as caught:
            await ask(client, engines)
        assert client.counts["retries_without_worker"] == 1
    assert [note.split(",")[0].split(":")[1] for note in caught.value.__notes__] == [
        " attempt 1",
        " no other worker than w1",
    ]
    assert caught.value.__cause__ is None
    assert not [slept for slept in clock.slept_s if slept < 5], "only lease renewals sleep"


async def test_a_refusal_of_a_later_attempt_leaves_the_failure_as_it_was(server: Server) -> None:
    client, _ = make_client(server)
    full = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RESERVATIONS")
    server.router.refusals.extend([status(grpc.StatusCode.OK), full])
    async with client:
        with pytest.raises(_HttpError, match="500") as caught:
            await ask(client, Engines(w0=_HttpError(500)))
    assert "TOO_MANY_RESERVATIONS" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"), UnknownModel),
        (status(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"), Overloaded),
    ],
)
async def test_a_refusal_of_the_first_attempt_is_raised(
    server: Server, refusal: Any, kind: type[Exception]
) -> None:
    server.router.refusals.append(refusal)
    client, _ = make_client(server)
    async with client:
        with pytest.raises(kind):
            await ask(client, Engines())
    assert server.router.told.empty()


async def test_the_budget_is_shared_by_all_calls_and_over_it_the_failure_is_raised(
    server: Server,
) -> None:
    budget = RetryBudgetPolicy(share=0.2, least_per_s=0.0)
    client, _ = make_client(server, retry_budget=budget)
    async with client:
        for _ in range(9):
            assert await ask(client, Engines()) == "w0"
        assert await ask(client, Engines(w0=TimeoutError())) == "w1"  # 1 of 10
        assert await ask(client, Engines(w0=TimeoutError())) == "w1"  # 2 of 11
        with pytest.raises(TimeoutError):
            await ask(client, Engines(w0=TimeoutError()))
        assert (client.counts["retries"], client.counts["retries_over_budget"]) == (2, 1)


async def test_both_halves_of_a_pair_are_left_out(server: Server) -> None:
    server.router.workers = None
    server.router.answer = pick_of("d0", prefill_worker=PrefillWorker(worker_id="p0"))
    client, _ = make_client(server)
    async with client:
        with pytest.raises(_HttpError):
            await ask(client, Engines(d0=_HttpError(500)), attempts_max=2)
    assert list(server.router.asked[1].excluded_worker_ids) == ["d0", "p0"]


async def test_iterators_are_read_once_and_a_request_id_gets_the_attempt_s_number(
    server: Server,
) -> None:
    client, _ = make_client(server)
    async with client:
        engines = Engines(w0=TimeoutError())
        options: dict[str, Any] = {"token_ids": iter(TOKENS), "allowed_worker_ids": iter("w")}
        await ask(client, engines, request_id="mine", **options)
    first, second = server.router.asked
    assert (first.request_id, second.request_id) == ("mine", "mine-2")
    assert first.token_bytes == second.token_bytes != b""
    assert first.allowed_worker_ids == second.allowed_worker_ids == ["w"]


async def test_an_attempt_without_its_block_is_an_error_and_reserves_nothing(
    server: Server,
) -> None:
    client, _ = make_client(server)
    async with client:
        with pytest.raises(RuntimeError, match="async with attempt"):
            async for _ in client.attempts(token_ids=TOKENS):
                pass
    assert server.router.asked == []


async def test_an_attempt_that_is_entered_by_hand_and_left_open_is_ended(server: Server) -> None:
    client, _ = make_client(server)

    async def misuse() -> None:
        async for attempt in client.attempts(token_ids=TOKENS):
            await attempt.__aenter__()

    async with client:
        with pytest.raises(RuntimeError, match="async with attempt"):
            await misuse()
    (failed,) = await told(server, 1)
    assert (failed.state, failed.failure_reason) == (FAILED, CLIENT)


async def test_an_attempt_is_entered_once(server: Server) -> None:
    client, _ = make_client(server)
    async with client:
        async for attempt in client.attempts(token_ids=TOKENS):
            async with attempt:
                pass
            with pytest.raises(RuntimeError, match="entered once"):
                await attempt.__aenter__()
    assert len(server.router.asked) == 1


async def test_leaving_the_loop_inside_the_block_finishes_the_request(server: Server) -> None:
    client, _ = make_client(server)
    async with client:
        async for attempt in client.attempts(token_ids=TOKENS):
            async with attempt:
                break
    (finished,) = await told(server, 1)
    assert finished.state == FINISHED


async def test_options_that_cannot_be_meant_are_refused_at_once(server: Server) -> None:
    client, _ = make_client(server)
    async with client:
        with pytest.raises(InvalidRequest):
            client.attempts(token_ids=[-1])
        with pytest.raises(ValueError, match="attempts_max"):
            client.attempts(token_ids=TOKENS, attempts_max=0)


async def test_a_router_that_is_slow_to_hear_of_a_failure_delays_no_other_attempt(
    server: Server,
) -> None:
    client, _ = make_client(server, report_timeout_s=GUARD_S)
    server.router.reports.clear()
    engines = Engines(w0=TimeoutError())
    async with client:
        async with asyncio.timeout(GUARD_S):
            async for attempt in client.attempts(token_ids=TOKENS):
                async with attempt as request:
                    engines.served.append(request.pick.worker_id)
                    if attempt.number == 1:
                        raise TimeoutError
                    server.router.reports.set()
    assert engines.served == ["w0", "w1"]


def _chained(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ConnectionRefusedError(), True),
        (_chained(RuntimeError(), ConnectionRefusedError()), True),
        (_chained(ClientConnectorError(), OSError(111, "refused")), True),
        (_chained(RuntimeError(), type("ConnectError", (Exception,), {})()), True),
        (ConnectionResetError(), False),
        (TimeoutError(), False),
        (_HttpError(503), False),
    ],
)
def test_a_refused_connection_is_known_by_its_causes(error: BaseException, refused: bool) -> None:
    assert judgement(error).refused is refused


def test_a_name_without_address_is_no_worker_s_refusal() -> None:
    assert not judgement(_chained(ClientConnectorError(), socket.gaierror())).refused


def test_causes_in_a_circle_end() -> None:
    one, two = RuntimeError(), RuntimeError()
    one.__cause__, two.__cause__ = two, one
    assert not judgement(one).refused


async def test_a_pair_whose_prefill_is_done_may_still_be_tried_elsewhere(server: Server) -> None:
    client, _ = make_client(server)
    served: list[str] = []
    async with client:
        async for attempt in client.attempts(token_ids=TOKENS):
            async with attempt as request:
                served.append(request.pick.worker_id)
                await request.prefill_done(answering=False)
                if len(served) == 1:
                    raise ConnectionResetError
    assert served == ["w0", "w1"]
