"""The service kvroute.v1.Router: passes bytes to the desk and its answers back. Decides nothing."""

import asyncio
import random
from contextlib import closing
from functools import partial

import grpc.aio

from kvroute.v1 import router_pb2
from router.api.desk.desk import Desk
from router.api.desk.methods import ROUTE_STREAM
from router.api.desk.reports import Reports
from router.api.desk.stream_items import RouteItems, read_batch
from router.api.desk.tenant import caller_of, reporter_of
from router.api.service.calls import Context, Guard
from router.api.service.route_streams import LateResults, StreamLives
from router.api.service.texts import Texts
from router.net.keys.door import CURRENT
from router.observe.tracing.traceparent import HEADER, SpanContext
from router.request.refusal import Reason, Refusal


class RouterService:
    """Handlers of the service kvroute.v1.Router. They take and give bytes, which are measured
    before protobuf reads them.
    """

    def __init__(
        self,
        desk: Desk,
        reports: Reports,
        guard: Guard,
        stopping: asyncio.Event,
        *,
        texts: Texts,
        stream_age_s: float | None = None,
    ) -> None:
        """guard: wraps the handlers. stopping: set when the server drains, so that open streams
        end. texts: takes prompts without tokens. stream_age_s: age in seconds at which a stream
        ends at the latest; None: never.
        """
        self.guard = guard
        self._desk = desk
        self.texts = texts
        self._reports = reports
        self._lives = StreamLives(stopping)
        self._stream_age_s = stream_age_s

    async def Route(self, request: bytes, context: Context) -> bytes:
        caller = caller_of(CURRENT.get())
        if self._desk.tracing is not None:
            request += traceparent_field(context)
        answer, reservation, repeated = await self.texts.answered(request, context.left_s, caller)
        if not repeated:
            if context.left_s <= 0:
                self._desk.unsent(reservation)
                raise Refusal(
                    Reason.DEADLINE_EXCEEDED, "the call's deadline passed before its answer"
                )
            context.when_unsent(partial(self._desk.unsent, reservation))
        return answer

    async def RouteStream(self, request_iterator: object, context: Context) -> None:
        await context.send_initial_metadata(())  # the client sees that streams get through
        limit = self.guard.limits.of(ROUTE_STREAM)
        usage = CURRENT.get()
        items = self.texts.items(caller_of(usage))
        with self._lives.of(context, jittered(self._stream_age_s)):
            async with LateResults(items, context, read_s=self.guard.read_s) as late:
                while (content := await context.read()) is not grpc.aio.EOF:
                    limit.check(len(content))
                    if usage is not None:
                        usage.message(len(content))
                    with self.guard.in_flight.hold(len(content)):
                        await _answer(items, content, late)
                await late.rest()

    async def Report(self, request: bytes, context: Context) -> bytes:
        return await self._reports.report(request, reporter_of(CURRENT.get(), context.host))

    async def Explain(self, request: bytes, context: Context) -> bytes:
        return await self.texts.explain(request, caller_of(CURRENT.get()))


def traceparent_field(context: Context) -> bytes:
    """The bytes that add the traceparent of an RPC's metadata to a RouteRequest, if it is sampled;
    else none. It replaces that of the message: it is the parent of the RPC itself, while the
    message's own names the caller's work.
    """
    for name, value in context.invocation_metadata() or ():
        if name == HEADER and isinstance(value, str):
            read = SpanContext.read(value)
            if read is not None and read.sampled:
                return router_pb2.RouteRequest(traceparent=value).SerializeToString()
    return b""


def jittered(age_s: float | None) -> float | None:
    """A random age from half of age_s to the whole, so that streams opened together don't end
    together.
    """
    return None if age_s is None else random.uniform(age_s / 2, age_s)


async def _answer(items: RouteItems, batch: bytes, late: LateResults) -> None:
    """Answers the items of a batch by as many messages as they need. After each message other tasks
    have a turn: it is sent, and other calls go on, before the next items are decided."""
    with closing(items.decide(read_batch(batch))) as messages:
        for results in messages:
            if results is not None:
                await late.write(results)
            await asyncio.sleep(0)
