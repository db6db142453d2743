"""How a call reaches a router: a line for each attempt, retries, one deadline over all attempts.

    call ──> line ──> attempt ──> answer
              ^          │
              └─ pause ──┴─ error that is worth another attempt (RetryPolicy)

Law: a call ends within its timeout_s, with an answer or a KvRouteError.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from kvroute.client.connections.channel import Target
from kvroute.client.connections.line import ConnectionOptions, Line
from kvroute.client.connections.lines import Lines
from kvroute.client.connections.retry import RetryPolicy
from kvroute.client.connections.silence import from_router
from kvroute.client.errors import (
    ClientClosed,
    DeadlineExceeded,
    KvRouteError,
    RouterUnreachable,
    error_from_call,
    unreachable,
    unreadable,
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Method = Callable[[Line], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]
"""Function from a line to the RPC that is to be called on it."""
LineAttempt = Callable[[Line, float], Awaitable[_Response]]
"""A line and the seconds left -> the answer of one attempt; raises KvRouteError or AioRpcError."""


class Transport:
    """The lines of one client, and the attempts that its calls make over them."""

    def __init__(
        self,
        targets: Sequence[Target],
        options: ConnectionOptions,
        counts: Counter[str],
        can_replace_silent: Callable[[], bool],
    ) -> None:
        """counts: the counter `picks_moved`, and the counters of Lines.
        can_replace_silent: whether the fallback can pick in the place of a silent router."""
        self.targets = targets
        self.options = options
        self.retry = options.retry
        self.once = RetryPolicy(attempts=1)
        self.clock = options.clock
        self.closed = False
        self.lines: Lines | None = None
        """None until the first call: gRPC binds a channel to the running loop."""
        self._counts = counts
        self._can_replace_silent = can_replace_silent

    async def close(self) -> None:
        """Ends all connections; open calls and every later call raise ClientClosed."""
        self.closed = True
        if self.lines is not None:
            await self.lines.close()

    def open(self) -> Lines:
        """The lines, made at the first use. Raises ClientClosed after close()."""
        if self.closed:
            raise ClientClosed
        if self.lines is None:
            self.lines = Lines(self.targets, self.options, self._counts, self._went_silent)
        return self.lines

    def deadline_s(self, timeout_s: float | None) -> float:
        """Time of the client's clock, in seconds, by which a call with this timeout_s has
        to end."""
        return self.clock() + self._left_s(timeout_s)

    def is_silent(self, reservation_id: str) -> bool:
        """Whether the router that made a reservation is silent now."""
        line = None if self.lines is None else self.lines.owner(reservation_id)
        return line is not None and line.watch.silent

    async def command(
        self, method: Method[_Request, _Response], message: _Request, timeout_s: float | None
    ) -> _Response:
        """The answer of an RPC, by one attempt; raises KvRouteError."""
        return await self.unary(method, message, timeout_s, self.once)

    async def unary(
        self,
        method: Method[_Request, _Response],
        message: _Request,
        timeout_s: float | None,
        policy: RetryPolicy | None = None,
    ) -> _Response:
        """The answer of an RPC; raises KvRouteError. policy: decides about further attempts
        (absent: the client's)."""
        return await self.call(self.attempt(method, message), timeout_s, policy or self.retry)

    def attempt(
        self, method: Method[_Request, _Response], message: _Request
    ) -> LineAttempt[_Response]:
        """Makes the function that calls an RPC with `message` once, on a given line."""

        async def attempt(line: Line, left_s: float) -> _Response:
            metadata = self.options.metadata()
            response = await method(line)(message, timeout=left_s, metadata=metadata)
            if response is None:
                raise unreadable(type(message).__name__.removesuffix("Request"))
            return response

        return attempt

    async def call(
        self,
        attempt: LineAttempt[_Response],
        timeout_s: float | None,
        policy: RetryPolicy,
        reservation_id: str = "",
        is_final: Callable[[KvRouteError], bool] | None = None,
        line_wait_s: float = math.inf,
    ) -> _Response:
        """One answer, within timeout_s and as many attempts as the policy allows.

        Each attempt has the time that is left as its deadline. After RouterUnreachable another
        connected router gets the next attempt at once. A call about a reservation goes to the
        router that made it; while that router can't be reached, to another, which forwards the call
        or answers that the reservation is unknown.

        is_final: errors that end the call whatever the policy says, unless another router is
        connected. line_wait_s: longest wait for a line, then RouterUnreachable.
        """
        left_s = self._left_s(timeout_s)
        deadline_s = self.clock() + left_s
        count = 0
        while True:
            count += 1
            line = None
            answer: _Response | KvRouteError
            try:
                line = self.free_line(reservation_id)
                if line is None:
                    line = await self.line(left_s, line_wait_s)
                    left_s = max(0.0, deadline_s - self.clock())
            except (KvRouteError, asyncio.CancelledError) as failure:
                answer = self.error_of(failure)
            else:
                answer = await self._tried(line, attempt, left_s)
            if not isinstance(answer, KvRouteError):
                return answer
            elsewhere = False
            if line is not None and isinstance(answer, RouterUnreachable):
                elsewhere = self.open().failed(line)
                if elsewhere:
                    reservation_id = ""  # the owner's line is passed over
            left_s = deadline_s - self.clock()
            delay_s = policy.delay_s(answer, count, left_s, self.options.rng)
            if delay_s is None or (is_final is not None and not elsewhere and is_final(answer)):
                break
            await self.options.sleep(0.0 if elsewhere else delay_s)
            if self.closed:
                raise ClientClosed
            left_s = deadline_s - self.clock()
            if left_s <= 0:  # the sleep lasted longer than delay_s
                break
        try:
            raise answer
        finally:
            del answer  # a cycle: its traceback refers to this frame

    async def everywhere(
        self, attempt: LineAttempt[_Response], timeout_s: float | None
    ) -> list[_Response | KvRouteError]:
        """The answers of all routers, called at the same time, by one attempt each; an error in the
        place of an answer that did not come. A silent router is not called unless all are silent.
        Raises DeadlineExceeded if no router can be reached in time, and ClientClosed."""
        left_s = self._left_s(timeout_s)
        deadline_s = self.clock() + left_s
        await self.line(left_s)
        lines = self.open().all()
        are_silent = all(line.watch.silent for line in lines)

        async def one(line: Line) -> _Response | KvRouteError:
            if line.watch.silent and not are_silent:
                return line.silence()
            return await self._tried(line, attempt, max(0.0, deadline_s - self.clock()))

        return await asyncio.gather(*(one(line) for line in lines))

    def free_line(self, reservation_id: str = "") -> Line | None:
        """The line for a call; None: the call has to wait for a line, with line()."""
        lines = self.open()
        return (lines.owner(reservation_id) if reservation_id else None) or lines.take()

    async def line(self, left_s: float, wait_s: float = math.inf) -> Line:
        """The line for a call, after a wait. Raises DeadlineExceeded after left_s, and
        RouterUnreachable after wait_s, whichever is less."""
        try:
            async with asyncio.timeout(min(left_s, wait_s)):
                return await self.open().wait()
        except TimeoutError:
            if wait_s < left_s:
                raise unreachable(f"no router could be reached in {wait_s:g} s") from None
            message = f"no router could be reached in {left_s:g} s"
            raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, None, message) from None

    def error_of(self, failure: BaseException, line: Line | None = None) -> KvRouteError:
        """The error that a failure of a call stands for; raises CancelledError again if the
        caller's own task was cancelled. gRPC raises CancelledError also for a call that was given
        up and for a channel that was closed."""
        if isinstance(failure, grpc.aio.AioRpcError):
            error = error_from_call(failure)
            error.__cause__ = failure.with_traceback(None)  # its frames have the error
            return error
        if isinstance(failure, KvRouteError):
            return failure.with_traceback(None)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            try:
                raise failure
            finally:
                del failure  # a cycle: its traceback refers to this frame
        if self.closed:
            return ClientClosed()
        if line is not None and line.watch.silent:
            return line.silence()
        return unreachable("the connection was closed")

    async def _tried(
        self, line: Line, attempt: LineAttempt[_Response], left_s: float
    ) -> _Response | KvRouteError:
        """The answer of one attempt, counted by the line and its watch, or the error in its
        place."""
        line.calls += 1
        line.watch.call_began()
        answered = False
        try:
            response = await attempt(line, left_s)
            answered = True
            return response
        except (grpc.aio.AioRpcError, KvRouteError, asyncio.CancelledError) as failure:
            error = self.error_of(failure, line)
            answered = from_router(error)
            return error
        finally:
            line.calls -= 1
            line.watch.call_ended(answered=answered)

    def _left_s(self, timeout_s: float | None) -> float:
        return self.options.timeout_s if timeout_s is None else duration("timeout_s", timeout_s)

    def _went_silent(self, line: Line) -> None:
        """Moves the open picks of a silent router, if another router or the fallback can take
        them."""
        if self.lines is None or self.closed:
            return
        if self.lines.another(line) or self._can_replace_silent():
            self._counts["picks_moved"] += line.give_up_picks()


def duration(name: str, seconds: float) -> float:
    """`seconds` if it is positive and finite; raises ValueError with the name otherwise."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {seconds}; a positive number of seconds is wanted")
    return seconds
