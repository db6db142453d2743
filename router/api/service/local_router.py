"""A KvRouteClient's calls for a gateway or picker in the router's process, without a socket.

    request(), attempts() -> ReceivedRequest -> Texts -> desk -> Pick
    reports of a request  -> Progress        -> the desk's Reports

Laws:
- a request is measured, and its size counts as in flight, like a message of Route;
- a caller that leaves, or whose time is over, leaves nothing reserved;
- a refusal is the KvRouteError that a client gets over gRPC, and is tried again by the same policy.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from kvroute.client import (
    KvRouteError,
    Pick,
    RequestCalls,
    RetryBudget,
    RetryBudgetPolicy,
    RetryPolicy,
    RouteOptions,
    error_from_status,
    pack_tokens,
)
from kvroute.client.messages.bodies import HttpBody
from kvroute.client.messages.options import OnQueued, random_id, settle_body
from kvroute.client.requests.reports import Reports as RequestReports
from kvroute.v1 import (
    ListWorkersResponse,
    Progress,
    ProgressOutcome,
    RouteRequest,
    RouteResponse,
    WorkerStatus,
)
from router.api.desk.methods import ROUTE
from router.api.desk.reports import Reports
from router.api.desk.statuses import write_status
from router.api.desk.tenant import Reporter
from router.api.service.calls import Guard
from router.api.service.texts import Texts
from router.request.refusal import Reason, Refusal
from router.request.wire.received import TOKEN_BYTES, ReceivedRequest, request_of

TIMEOUT_S = 5.0
"""Time limit of a request that has none of its own, seconds, as in KvRouteClient."""
PENDING_MAX = 65_536
"""Last reports of requests that are under way, at most. A report is applied in its task's first
turn, so there are few."""
_FORMS = {
    field.name: field.number for field in RouteRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields
} | {"token_ids": TOKEN_BYTES}
"""Options that are prompts -> number of the RouteRequest field that carries each."""


def _converter(field: FieldDescriptor) -> Callable[[Any], object]:
    if field.message_type is None:
        return list
    if field.message_type.GetOptions().map_entry:
        return dict
    return lambda messages: [message.SerializeToString() for message in messages]


_CONVERTED = {
    field.name: _converter(field) for field in RouteRequest.DESCRIPTOR.fields if field.is_repeated
}
"""Options that a ReceivedRequest has in another form -> the function that converts each."""


class LocalRequest(NamedTuple):
    """A request from the router's own process: its content, and its HTTP body if that is the
    prompt.
    """

    content: ReceivedRequest
    body: HttpBody | None


def local_request(**options: Unpack[RouteOptions]) -> LocalRequest:
    """Makes the request for these options, at most one of which is a prompt. Raises TypeError,
    OverflowError and ValueError for values that don't fit their fields, and InvalidRequest for a
    body that can't be read.
    """
    body = settle_body(options)
    fields: dict[str, Any] = {
        name: _CONVERTED[name](value) if name in _CONVERTED else value
        for name, value in options.items()
        if value is not None
    }
    fields["request_id"] = fields.get("request_id") or random_id()
    form, data = 0, b""
    for name in fields.keys() & _FORMS.keys():
        form, prompt = _FORMS[name], fields.pop(name)
        if name == "token_ids":
            data = pack_tokens(prompt)
        elif name == "block_hashes":
            data = np.asarray(prompt, np.uint64).tobytes()
        elif name == "estimated_tokens":
            fields["prompt_tokens"] = prompt
        else:
            data = prompt.encode() if isinstance(prompt, str) else prompt
    return LocalRequest(request_of(form, data, fields), body)


class LocalRouter(RequestCalls[LocalRequest]):
    """Replaces a KvRouteClient where the router is in the same process."""

    def __init__(
        self,
        texts: Texts,
        reports: Reports,
        guard: Guard,
        list_workers: Callable[..., Awaitable[bytes]],
        *,
        rng: random.Random,
        retry: RetryPolicy | None = None,
    ) -> None:
        """guard: measures requests. list_workers: see WorkerFeed.list."""
        super().__init__(
            local_request,
            self._route,
            RequestReports(self._report, timeout_s=TIMEOUT_S, wait_s=1.0, pending_max=PENDING_MAX),
            budget=RetryBudget(RetryBudgetPolicy()),
            counts=Counter(),
        )
        self._texts = texts
        self._of_requests = reports
        self._guard = guard
        self._list_workers = list_workers
        self._retry = retry or RetryPolicy()
        self._rng = rng

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits until the last reports of all requests are applied."""
        await self._reports.flush()

    async def list_workers(
        self, model: str | None = None, *, away: bool = False
    ) -> list[WorkerStatus]:
        """Every worker that the router knows, by id and rank; model None: of all models. away: only
        workers that stopped answering.
        """
        content = await self._list_workers(model or "", only_away=away)
        return list(ListWorkersResponse.FromString(content).workers)

    async def _route(
        self,
        request: LocalRequest,
        timeout_s: float | None,
        is_final: Callable[[KvRouteError], bool] | None = None,
        on_queued: OnQueued | None = None,
    ) -> Pick:
        """Picks a worker within timeout_s seconds (None: TIMEOUT_S) for all attempts; raises
        KvRouteError. is_final: errors that get no further attempt. on_queued is not called."""
        left_s = TIMEOUT_S if timeout_s is None else timeout_s
        deadline_s = self._clock() + left_s
        content, attempt = request.content, 0
        while True:
            attempt += 1
            try:
                answer = await self._attempt(content, left_s)
                return Pick(content.request_id, RouteResponse.FromString(answer))
            except Refusal as refusal:
                error = error_from_status(write_status(refusal))
            left_s = deadline_s - self._clock()
            delay_s = self._retry.delay_s(error, attempt, left_s, self._rng)
            if delay_s is None or (is_final is not None and is_final(error)):
                break
            await self._sleep(delay_s)
            left_s = deadline_s - self._clock()
            if left_s <= 0:  # the sleep lasted longer than delay_s
                break
        try:
            raise error
        finally:
            del error  # a cycle: its traceback refers to this frame

    async def _attempt(self, content: ReceivedRequest, left_s: float) -> bytes:
        """The RouteResponse, as bytes, of one attempt within left_s seconds; raises Refusal."""
        with self._guard.message(ROUTE, content):
            try:
                async with asyncio.timeout(left_s):
                    answer, _, _ = await self._texts.answered(content, left_s)
            except TimeoutError:
                raise Refusal(
                    Reason.DEADLINE_EXCEEDED, f"the request had no answer in {left_s:g} s"
                ) from None
            return answer

    async def _report(
        self, progress: Progress, *, timeout_s: float, attempts: int | None
    ) -> ProgressOutcome:
        """Applies a reported step in this process at once, so that it never fails; timeout_s and
        attempts are not used."""
        return self._of_requests.step(progress, Reporter())
