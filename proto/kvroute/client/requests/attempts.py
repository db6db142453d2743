"""One request, tried on other workers until its first token has been passed on.

    async for attempt in client.attempts(token_ids=ids, model="m"):
        async with attempt as request:
            ...  # as in `async with client.request(...) as request`
            await request.prefill_done()

An `async for` can't see an exception of its body, so each attempt is a context of its own. Code
after the inner block runs after failed attempts, too: return inside the block, or after the loop.

A failed attempt ends its reservation with its reason. Another attempt follows, on another worker,
if all of these hold; otherwise the exception is raised unchanged:

- `request.prefill_done()` was not called, and the body has not ended the request itself;
- failures.py wants another worker for the exception (the body raises UnusableAnswer for an answer
  that makes no sense): errors of the caller's own code or host, cancellations and kvroute's own
  errors would be the same on another worker;
- there were fewer than `attempts_max` attempts, and the client's retry budget allows another. The
  first REFUSED_MAX refused connections don't count as attempts, unless `attempts_max` is 1: nothing
  of the request arrived, and when half of a fleet dies at once three workers in a row may be dead;
- the router has another worker. If it has none, the failure of the last attempt is raised.

The raised exception has a note for each earlier attempt.

Law: an attempt that is not entered has reserved nothing; each attempt excludes the workers of all
earlier attempts.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from typing_extensions import override

from kvroute.client.errors import KvRouteError
from kvroute.client.messages.pick import Pick
from kvroute.client.requests.budget import RetryBudget
from kvroute.client.requests.failures import Again, judgement
from kvroute.client.requests.life import RoutedRequest
from kvroute.v1 import FailureReason

NOTE_MAX = 300
"""Characters of a note about an earlier attempt's error, at most."""
REFUSED_MAX = 8
"""Attempts with a refused connection that don't count, for one request; further attempts count."""
log = logging.getLogger("kvroute.client")

RouteAgain = Callable[[int, tuple[str, ...]], Awaitable[Pick]]
"""Routes the request again: attempt number, from 1, and ids of workers to leave out -> pick."""


class Attempts:
    """The attempts of one request; made by `KvRouteClient.attempts`, iterated once."""

    def __init__(
        self,
        route: RouteAgain,
        make_request: Callable[[Callable[[], Awaitable[Pick]]], RoutedRequest],
        budget: RetryBudget,
        *,
        attempts_max: int,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        """counts: `attempts`; `retries`; failures without a further attempt, because the budget was
        used up (`retries_over_budget`), attempts_max was reached (`retries_over_attempts`) or no
        other worker was left (`retries_without_worker`)."""
        self._route = route
        self._make_request = make_request
        self._budget = budget
        self._attempts_max = attempts_max
        self._clock = clock
        self._counts = counts
        self._number = 0
        self._refused = 0
        """Attempts so far with a refused connection, which don't count towards attempts_max."""
        self._tried: list[str] = []
        self._failures: list[tuple[str, BaseException]] = []
        """(worker id, error) of attempts that another attempt followed. Empty once none follows:
        the errors' frames refer to this object, a cycle with the request's body."""
        self._goes_on = True
        self._current: Attempt | None = None

    @override
    def __repr__(self) -> str:
        state = "open" if self._goes_on else "over"
        return f"<Attempts {self._number} of {self._attempts_max}, {state}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> "Attempt":
        """The next attempt; StopAsyncIteration if the last attempt's end allows none."""
        if (last := self._current) is not None and not last.left:
            self._goes_on = False
            self._current = None
            await last.abandon()
            raise RuntimeError(
                "an attempt was not used as `async with attempt as request:`; its loop is over"
            )
        if not self._goes_on:
            raise StopAsyncIteration
        self._goes_on = False
        self._number += 1
        self._current = attempt = Attempt(self, self._number)
        return attempt

    def forget_current(self) -> None:
        """Drops the present attempt, which is over and refers to this object: a cycle, with the
        request's body in it, would wait for the garbage collector."""
        self._current = None

    def request(self) -> RoutedRequest:
        """The present attempt's request, not yet routed."""
        number, tried = self._number, tuple(self._tried)
        self._counts["attempts"] += 1
        if number == 1:
            self._budget.request(self._clock())
        return self._make_request(lambda: self._route(number, tried))

    def unrouted(self, error: KvRouteError) -> BaseException:
        """The error to raise for an attempt that got no worker."""
        if not self._failures:
            return error
        self._counts["retries_without_worker"] += 1
        worker_id, failure = self._failures.pop()
        self._noted(failure)
        self._failures.clear()
        failure.add_note(f"kvroute: no other worker than {worker_id}: {error}"[:NOTE_MAX])
        return failure

    def failed(self, request: RoutedRequest, error: BaseException) -> bool:
        """Records the failure of the present attempt; returns whether another attempt follows."""
        again = self._another(request, error)
        if again:
            self._goes_on = True
            self._counts["retries"] += 1
            self._failures.append((request.pick.worker_id, error))
            self._tried.extend(request.pick.worker_ids)
        else:
            self._noted(error)
            self._failures.clear()
        return again

    def finished(self) -> None:
        """Records that the present attempt succeeded."""
        self._failures.clear()

    def _another(self, request: RoutedRequest, error: BaseException) -> bool:
        judged = judgement(error)
        if request.answering or request.ended or judged.again is not Again.ELSEWHERE:
            return False
        if self._attempts_max > 1 and self._refused < REFUSED_MAX and judged.refused:
            self._refused += 1
        if self._number - self._refused >= self._attempts_max:
            self._counts["retries_over_attempts"] += 1
            return False
        if not self._budget.take(self._clock()):
            self._counts["retries_over_budget"] += 1
            return False
        return True

    def _noted(self, error: BaseException) -> None:
        for number, (worker_id, earlier) in enumerate(self._failures, 1):
            cause = f"{type(earlier).__name__}: {earlier}"
            error.add_note(f"kvroute: attempt {number}, on {worker_id}, failed: {cause}"[:NOTE_MAX])


class Attempt:
    """One attempt of a request, on one worker; entered once."""

    def __init__(self, attempts: Attempts, number: int) -> None:
        self.number = number
        """Number of the attempt, from 1."""
        self.left = False
        """Whether the attempt's `async with` block is over."""
        self._attempts = attempts
        self._request: RoutedRequest | None = None

    @override
    def __repr__(self) -> str:
        return f"<Attempt {self.number}, {self._request or 'not entered'}>"

    async def __aenter__(self) -> RoutedRequest:
        """Routes and reserves; raises the errors of route(), or, if an attempt failed before, that
        attempt's error instead."""
        if self._request is not None:
            raise RuntimeError("an attempt is entered once; the loop makes the next attempt")
        self._request = request = self._attempts.request()
        try:
            return await request.__aenter__()
        except KvRouteError as error:
            unrouted = error
        except BaseException:
            self._leave()
            raise
        self._leave()
        try:
            # Outside of `except`, which would add a context.
            raise self._attempts.unrouted(unrouted)
        finally:
            del unrouted  # a cycle: its traceback refers to this frame

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Ends the reservation. True: the exception ends here, since another attempt follows."""
        request = self._request
        assert request is not None
        self._leave()
        if error is None:
            self._attempts.finished()
            await request.finished()
            return False
        again = self._attempts.failed(request, error)
        judged = judgement(error)
        await request.failed(judged.reported, refused=judged.refused, wait=not again)
        return again

    def _leave(self) -> None:
        self.left = True
        self._attempts.forget_current()

    async def abandon(self) -> None:
        """Ends the reservation of an attempt that was entered without `async with` and
        never left."""
        if self._request is not None:
            await self._request.failed(FailureReason.FAILURE_REASON_CLIENT)
