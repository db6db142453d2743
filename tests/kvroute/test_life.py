"""One request's life: what the router hears, and what the caller never does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvroute.client import (
    DeadlineExceeded,
    InvalidRequest,
    KvRouteClient,
    NoWorker,
    RetryPolicy,
    RoutedRequest,
    RouterUnreachable,
    UnusableAnswer,
)
from kvroute.client.requests.failures import judgement
from kvroute.v1 import FailureReason, Progress, ProgressResult, ProgressState
from tests.kvroute.scripted_router import GUARD_S, Clock, Server, pick_of, status
from tests.stage.garbage import freed_at_once

PREFILL_DONE = ProgressState.PROGRESS_STATE_PREFILL_DONE
RUNNING = ProgressState.PROGRESS_STATE_RUNNING
FINISHED = ProgressState.PROGRESS_STATE_FINISHED
FAILED = ProgressState.PROGRESS_STATE_FAILED
WORKER = FailureReason.FAILURE_REASON_WORKER
TIMEOUT = FailureReason.FAILURE_REASON_TIMEOUT
CLIENT = FailureReason.FAILURE_REASON_CLIENT
CANCELLED = FailureReason.FAILURE_REASON_CANCELLED
AWAY = status(grpc.StatusCode.UNAVAILABLE)
NEVER = RetryPolicy(attempts=1)


def make_client(server: Server, **settings: Any) -> KvRouteClient:
    """A client whose time stands still, unless the test brings a clock."""
    clock = settings.pop("clock", None) or Clock(at_once=False)
    return KvRouteClient(server.address, clock=clock, sleep=clock.sleep, **settings)


async def test_a_request_that_goes_well_is_routed_reported_and_finished(server: Server) -> None:
    async with make_client(server) as client:
        async with client.request(token_ids=[1, 2], model="m") as request:
            assert request.pick.worker_id == "w0"
            await request.prefill_done()
            request.output_tokens = 12
            request.cached_tokens = 0
        assert client.reports_lost == 0
    assert server.router.asked[0].model == "m"
    assert await server.next_report() == Progress(reservation_id="r-w0", state=PREFILL_DONE)
    assert await server.next_report() == Progress(
        reservation_id="r-w0", state=FINISHED, output_tokens=12, cached_tokens=0
    )
    assert server.router.told.empty()
    assert request.report_error is None


async def test_the_end_is_told_when_the_block_is_left(server: Server) -> None:
    async with make_client(server) as client:
        async with client.request(token_ids=[1]):
            pass
        assert server.router.told.get_nowait().state == FINISHED


async def test_cached_tokens_that_nobody_told_are_absent(server: Server) -> None:
    async with make_client(server) as client, client.request(token_ids=[1]):
        pass
    assert not (await server.next_report()).HasField("cached_tokens")


async def test_prefill_is_done_once(server: Server) -> None:
    async with make_client(server) as client, client.request(token_ids=[1]) as request:
        await request.prefill_done()
        await request.prefill_done()
        await request.finished()
        await request.prefill_done()
    states = [(await server.next_report()).state for _ in range(2)]
    assert states == [PREFILL_DONE, FINISHED]
    assert server.router.told.empty()


async def test_an_answer_that_is_not_seen_is_reported_with_each_renewal(server: Server) -> None:
    async with make_client(server) as client, client.request(token_ids=[1]) as request:
        await request.unobserved()
        told = await server.next_report()
        assert (told.state, told.unobserved) == (RUNNING, True)
        await request.prefill_done()
        assert (await server.next_report()).unobserved
        await request.finished()
        await request.unobserved()  # it is over: nothing is said any more
    assert (await server.next_report()).state == FINISHED
    assert server.router.told.empty()


async def test_an_explicit_end_counts_and_leaving_adds_nothing(server: Server) -> None:
    async with make_client(server) as client:
        async with client.request(token_ids=[1]) as request:
            request.finish_reason = "length"
            await request.finished(output_tokens=3, cached_tokens=16)
            request.output_tokens = 99

        async def fail_late() -> None:
            async with client.request(token_ids=[1]) as request:
                await request.finished(output_tokens=4)
                raise KeyError("after the end")

        with pytest.raises(KeyError):
            await fail_late()
    first, second = await server.next_report(), await server.next_report()
    assert (first.state, first.output_tokens, first.cached_tokens) == (FINISHED, 3, 16)
    assert first.finish_reason == "length"
    assert (second.state, second.output_tokens) == (FINISHED, 4)
    assert server.router.told.empty()


async def test_an_explicit_failure_has_the_reason_given(server: Server) -> None:
    async with make_client(server) as client, client.request(token_ids=[1]) as request:
        request.output_tokens = 2
        await request.failed(TIMEOUT)
    told = await server.next_report()
    assert (told.state, told.failure_reason, told.output_tokens) == (FAILED, TIMEOUT, 2)
    assert server.router.told.empty()


class _AnswerError(Exception):
    """What an HTTP library raises for a status that isn't 2xx."""

    def __init__(self, http_status: int, name: str) -> None:
        super().__init__(f"HTTP {http_status}")
        holder: Any = self
        if name == "response.status_code":
            holder = self.response = type("Response", (), {})()
        setattr(holder, name.rpartition(".")[2], http_status)


class _EngineError(Exception):
    """What an engine's own library raises."""


REASONS: list[tuple[BaseException, FailureReason.ValueType]] = [
    (ConnectionResetError(), WORKER),
    (OSError(), WORKER),
    (_EngineError(), WORKER),
    (RuntimeError(), WORKER),
    (_AnswerError(500, "status"), WORKER),
    (_AnswerError(503, "status_code"), WORKER),
    (_AnswerError(429, "status"), WORKER),
    (_AnswerError(400, "status"), CLIENT),
    (_AnswerError(404, "status_code"), CLIENT),
    (_AnswerError(422, "response.status_code"), CLIENT),
    (TimeoutError(), TIMEOUT),
    (KeyError("choices"), CLIENT),
    (ValueError(), CLIENT),
    (json.JSONDecodeError("Expecting value", "<html>", 0), WORKER),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), WORKER),
    (UnusableAnswer("no choices"), WORKER),
    (AssertionError(), CLIENT),
    (DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, "router"), CLIENT),
    (NoWorker(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "router"), CLIENT),
    (asyncio.CancelledError(), CANCELLED),
    (KeyboardInterrupt(), CANCELLED),
    (GeneratorExit(), CANCELLED),
    (ExceptionGroup("two", [KeyError(), TimeoutError()]), TIMEOUT),
    (ExceptionGroup("two", [ValueError(), ExceptionGroup("one", [OSError()])]), WORKER),
    (BaseExceptionGroup("one", [asyncio.CancelledError()]), CANCELLED),
]


@pytest.mark.parametrize(("error", "reason"), REASONS, ids=lambda value: repr(value))
def test_an_exception_tells_whose_fault_it_was(
    error: BaseException, reason: FailureReason.ValueType
) -> None:
    assert judgement(error).reported == reason


@pytest.mark.parametrize(
    ("error", "reason"), [one for one in REASONS if isinstance(one[0], Exception)][:12]
)
async def test_a_body_that_raises_is_a_failure_and_its_exception_goes_on(
    server: Server, error: Exception, reason: FailureReason.ValueType
) -> None:
    async with make_client(server) as client:
        with pytest.raises(type(error)) as caught:
            async with client.request(token_ids=[1]):
                raise error
    assert caught.value is error
    told = await server.next_report()
    assert (told.state, told.failure_reason) == (FAILED, reason)


async def test_a_time_limit_inside_the_block_is_a_timeout(server: Server) -> None:
    async with make_client(server) as client:

        async def wait() -> None:
            async with client.request(token_ids=[1]), asyncio.timeout(0):
                await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await wait()
    assert (await server.next_report()).failure_reason == TIMEOUT


async def test_a_cancelled_body_is_told_as_cancelled_without_holding_anybody_up(
    server: Server,
) -> None:
    server.router.reports.clear()
    inside = asyncio.Event()
    client = make_client(server)

    async def serve() -> None:
        async with client.request(token_ids=[1]):
            inside.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await inside.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):  # though the router answers no report
        await serving
    told = await server.next_report()
    assert (told.state, told.failure_reason) == (FAILED, CANCELLED)
    server.router.reports.set()
    await client.close()
    assert client.reports_lost == 0


async def test_a_stream_that_its_reader_closes_is_cancelled(server: Server) -> None:
    async with make_client(server) as client:

        async def tokens() -> AsyncIterator[int]:
            async with client.request(token_ids=[1]) as request:
                for request.output_tokens in range(1, 100):
                    yield request.output_tokens

        stream = tokens()
        assert await anext(stream) == 1
        assert await anext(stream) == 2
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator has it
    told = await server.next_report()
    assert (told.failure_reason, told.output_tokens) == (CANCELLED, 2)


async def test_a_request_that_gets_no_worker_raises_and_reports_nothing(server: Server) -> None:
    server.router.refusals.append(status(grpc.StatusCode.UNAVAILABLE, "NO_WORKER"))
    async with make_client(server, retry=NEVER) as client:
        with pytest.raises(NoWorker):
            async with client.request(token_ids=[1]):
                pytest.fail("there is no worker")
    assert server.router.told.empty()


async def test_a_routed_request_is_entered_once(server: Server) -> None:
    async with make_client(server) as client:
        request = client.request(token_ids=[1])
        with pytest.raises(RuntimeError, match="not routed yet"):
            _ = request.pick
        assert "not routed" in repr(request)
        async with request:
            assert "on w0, open" in repr(request)
        with pytest.raises(RuntimeError, match="entered once"):
            await request.__aenter__()
    assert len(server.router.asked) == 1


# Leases


async def test_the_lease_is_renewed_every_third_of_it_with_the_count_so_far(
    server: Server,
) -> None:
    clock = Clock(at_once=False)
    server.router.answer = pick_of(lease_s=30.0)
    client = make_client(server, clock=clock)
    async with client, client.request(token_ids=[1]) as request:
        for count in (5, 9):
            request.output_tokens = count
            await clock.advance(9.5)
            assert server.router.told.empty()
            await clock.advance(0.5)
            told = await server.next_report()
            assert (told.state, told.output_tokens) == (RUNNING, count)
            await _settled(clock)
    assert clock.slept_s == [10.0, 10.0, 10.0]
    assert (await server.next_report()).state == FINISHED


async def test_no_lease_needs_no_renewal(server: Server) -> None:
    clock = Clock(at_once=False)
    server.router.answer = pick_of(lease_s=0.0)
    async with make_client(server, clock=clock) as client, client.request(token_ids=[1]):
        pass
    assert clock.slept_s == []


async def test_a_prefill_that_was_not_heard_is_told_with_the_next_renewal(server: Server) -> None:
    clock = Clock(at_once=False)
    server.router.report_refusals.append(AWAY)
    client = make_client(server, clock=clock)
    async with client, client.request(token_ids=[1]) as request:
        await request.prefill_done()
        assert isinstance(request.report_error, RouterUnreachable)
        assert client.reports_lost == 1
        for _ in range(2):
            await clock.advance(10.0)
            await _settled(clock)
    states = [(await server.next_report()).state for _ in range(4)]
    assert states == [PREFILL_DONE, PREFILL_DONE, RUNNING, FINISHED]


async def test_a_lost_renewal_is_counted_and_the_next_one_is_made(server: Server) -> None:
    clock = Clock(at_once=False)
    server.router.report_refusals.append(AWAY)
    async with make_client(server, clock=clock, retry=NEVER) as client:
        async with client.request(token_ids=[1]):
            for _ in range(2):
                await clock.advance(10.0)
                await _settled(clock)
        assert client.reports_lost == 1
    states = [(await server.next_report()).state for _ in range(3)]
    assert states == [RUNNING, RUNNING, FINISHED]


async def test_a_reservation_that_the_router_forgot_is_not_renewed_again(server: Server) -> None:
    clock = Clock(at_once=False)
    server.router.report_results.append(ProgressResult.PROGRESS_RESULT_UNKNOWN)
    client = make_client(server, clock=clock)
    async with client, client.request(token_ids=[1]) as request:
        await clock.advance(10.0)
        keeper = request._keeper
        assert keeper is not None
        await asyncio.wait_for(keeper, GUARD_S)
        assert request.lease_lost
    states = [(await server.next_report()).state for _ in range(2)]
    assert states == [RUNNING, FINISHED]


async def test_a_report_that_the_router_calls_invalid_is_kept_and_counted(server: Server) -> None:
    server.router.report_results.append(ProgressResult.PROGRESS_RESULT_INVALID)
    async with make_client(server) as client:
        async with client.request(token_ids=[1]) as request:
            pass
        assert client.reports_lost == 1
    assert isinstance(request.report_error, InvalidRequest)
    assert request.report_error.message == "as scripted"


async def _settled(clock: Clock) -> None:
    """Waits until the renewal at hand is through: then its task sleeps again."""
    async with asyncio.timeout(GUARD_S):
        await clock.asleep.wait()


# The router away


async def test_a_router_away_never_breaks_a_request(server: Server) -> None:
    async with make_client(server, retry=NEVER) as client:
        async with client.request(token_ids=[1]) as request:
            await server.stop()
            await request.prefill_done()
            answer = "what the person asked for"
        assert client.reports_lost == 2
    assert answer
    assert isinstance(request.report_error, RouterUnreachable)


async def test_a_router_away_never_hides_what_broke_the_request(server: Server) -> None:
    async with make_client(server, retry=NEVER) as client:

        async def break_off() -> None:
            async with client.request(token_ids=[1]):
                await server.stop()
                raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await break_off()
        assert client.reports_lost == 1


async def test_a_last_report_is_retried(server: Server) -> None:
    server.router.answer = pick_of(lease_s=0.0)
    server.router.report_refusals.extend([AWAY, AWAY])
    clock = Clock()
    async with make_client(server, clock=clock) as client:
        async with client.request(token_ids=[1]):
            pass
        assert client.reports_lost == 0
    assert len(clock.slept_s) == 2
    told = [await server.next_report() for _ in range(3)]
    assert told[0] == told[1] == told[2]


async def test_leaving_waits_for_a_slow_router_only_so_long_and_closing_waits_for_all(
    server: Server,
) -> None:
    server.router.reports.clear()
    client = make_client(server, report_timeout_s=0.01)
    async with client.request(token_ids=[1]):
        pass
    assert "1 pending" in repr(client)
    assert (await server.next_report()).state == FINISHED
    server.router.reports.set()
    await client.close()
    assert "0 pending, 0 lost" in repr(client)


async def test_pending_reports_are_bounded_and_those_past_the_bound_are_counted(
    server: Server,
) -> None:
    server.router.reports.clear()
    client = make_client(server, report_timeout_s=0.01, pending_reports_max=2)
    for _ in range(3):
        async with client.request(token_ids=[1]):
            pass
    assert client.reports_lost == 1
    server.router.reports.set()
    await client.close()
    assert client.reports_lost == 1
    assert server.router.told.qsize() == 2


async def test_a_request_that_outlives_its_client_ends_quietly(server: Server) -> None:
    client = make_client(server)
    async with client.request(token_ids=[1]):
        await client.close()
    assert client.reports_lost == 1
    assert server.router.told.empty()


async def test_a_caller_needn_t_wait_for_the_report_of_its_end(server: Server) -> None:
    async with make_client(server) as client:
        async with client.request(token_ids=[1]) as request:
            request.prompt_tokens = 7
            await request.finished(output_tokens=3, wait=False)
            assert request.ended
            assert server.router.told.empty()
        assert server.router.told.empty(), "the end of the block doesn't wait, either"
    told = await server.next_report()
    assert (told.state, told.output_tokens, told.prompt_tokens) == (FINISHED, 3, 7)
    assert server.router.told.empty()


async def test_a_pairs_failure_is_reported_of_the_worker_that_the_caller_names(
    server: Server,
) -> None:
    async with make_client(server) as client:

        async def fail() -> None:
            async with client.request(token_ids=[1]) as request:
                request.failed_worker_id = "d0"
                raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await fail()
    assert (await server.next_report()).failed_worker_id == "d0"


async def test_a_request_that_is_over_is_freed_with_its_body(server: Server) -> None:
    async with make_client(server) as client, freed_at_once(RoutedRequest):
        for _ in range(3):
            async with client.request(token_ids=[1, 2], model="m") as request:
                await request.prefill_done()
        del request


async def test_a_request_whose_reports_are_lost_is_freed_with_its_body(server: Server) -> None:
    async with make_client(server, retry=NEVER) as client, freed_at_once(RoutedRequest):
        for _ in range(3):
            server.router.report_refusals.extend([AWAY, AWAY])
            async with client.request(token_ids=[1, 2], model="m") as request:
                await request.prefill_done()
        del request
    assert client.reports_lost == 6
