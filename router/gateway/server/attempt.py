"""Sends one request to the picked worker or pair, and performs what its Exchange decides.

Laws:
- when a client leaves, the worker's connection is closed, and the reservation ends as CANCELLED;
- bytes are read from a worker only as fast as the client takes them;
- an answer whose worker fails after its first byte is cut, never ended as if it were whole;
- if a prefill worker's answer has no hand-over (what the decode worker needs to fetch the KV
  blocks) within a second of its head, or the decode worker refuses the hand-over, the decode worker
  computes the prompt.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from kvroute.client import Pick, PrefillWorker, RoutedRequest, UnusableAnswer, read_usage
from kvroute.client.requests.failures import Kind, judgement
from router.gateway.exchange import Blame, Exchange, Outcome, returned
from router.gateway.server import hand_over
from router.gateway.server.long_bodies import made
from router.gateway.server.upstreams import Seat, Sent, WorkerAnswered, WorkerGone
from router.observe.tracing.gateway_trace import GatewayTrace

if TYPE_CHECKING:
    from router.gateway.server.forwarding import Forwarder

PREFILL_TIMEOUT_S = 300.0
"""Longest wait in seconds for the whole answer of a pair's prefill worker, which comes once the
whole prompt is computed."""
WORKER_ERRORS = (
    aiohttp.ClientError, OSError, TimeoutError, WorkerAnswered, WorkerGone, UnusableAnswer,
)  # fmt: skip
"""Exceptions that a worker's failure raises."""


class ClientLeft(Exception):
    """The client's connection broke while bytes were written to it."""


class _Answer(web.StreamResponse):
    """An answer to the client whose head is sent with its first bytes, in one packet; aiohttp by
    itself sends the head of a stream in a packet of its own."""

    _send_headers_immediately = False


class WorkerAttempt:
    """The attempt to serve one request on one picked worker or pair."""

    def __init__(
        self,
        forwarder: "Forwarder",
        request: web.Request,
        exchange: Exchange,
        routed: RoutedRequest,
        trace: GatewayTrace | None = None,
        *,
        movable: bool = False,
    ) -> None:
        """movable: whether another worker may take the request before its first byte."""
        self._movable = movable
        self._trace = trace
        self._forwarder = forwarder
        self._request = request
        self._exchange = exchange
        self._routed = routed
        self._pick = routed.pick
        self._prefill_cached: int | None = None
        self._handed_over = False
        """Whether the decode worker's request has what a prefill worker handed over."""

    async def run(self) -> web.StreamResponse:
        """Passes the worker's answer to the client, and returns it; raises the errors that
        Forwarder.serve names.
        """
        try:
            return await self._run()
        except WorkerAnswered as error:
            if error.failure is Kind.NO_MODEL:  # a relay of this router's lists the models again
                self._forwarder.accesses.on_model_missing(self._pick.worker_id)
            raise
        except (aiohttp.ClientError, UnusableAnswer, WorkerGone) as error:
            _forget_frames(error)
            raise

    async def _run(self) -> web.StreamResponse:
        prefill = self._pick.prefill_worker
        if prefill is None:
            return await self._send({}, self._forwarder.token_fields(self._pick))
        self._forwarder.counters.sent.labels(prefill.engine, "pair").inc()
        if prefill.prefill_kv_transfer_params is not None:
            return await self._in_two_steps(prefill)
        return await self._at_once(prefill)

    async def _send(
        self, fields: dict[str, Any], tokens: dict[str, Any] | None = None
    ) -> web.StreamResponse:
        pick = self._pick
        with self._forwarding() as of_trace:
            sent = await self._sent(pick, {**pick.headers, **of_trace}, fields, tokens)
            async with sent as answer:
                return await self._pass_on(sent, answer)

    async def _sent(
        self,
        worker: Pick | PrefillWorker,
        headers: Mapping[str, str],
        fields: Mapping[str, Any],
        tokens: Mapping[str, Any] | None = None,
    ) -> Sent:
        """The request to the picked worker, or its prefill worker, sent when it is entered."""
        exchange = self._exchange
        make = partial(
            exchange.upstream,
            worker.address,
            headers,
            engine_priority=self._pick.engine_priority,
            fields=fields,
            tokens=tokens,
        )
        upstream = await made(len(exchange.body), make)
        model, movable = exchange.facts.model, self._movable
        seat = Seat(worker.worker_id, worker.dp_rank or 0, model, movable)
        return self._forwarder.post(upstream, seat)

    @contextmanager
    def _forwarding(self) -> Iterator[dict[str, str]]:
        """Context for the time in which the worker has the request; yields headers by which the
        worker's spans join the trace, none without a trace."""
        if self._trace is None:
            yield {}
            return
        with self._trace.forwarding(self._pick.worker_id, self._pick.address) as headers:
            yield headers

    # Pairs

    async def _in_two_steps(self, prefill: PrefillWorker) -> web.StreamResponse:
        """Serves by a pair of vLLM: the prefill worker answers first, and its answer says where the
        decode worker gets the KV cache."""
        fields: dict[str, Any] = {}
        async with self._prefilled(prefill) as answer:
            try:
                said = await hand_over.read(answer.content)
                fields = prefill.decode_body(said)
                usage = read_usage(said.get("usage"), details_enabled=False)
                self._prefill_cached = self._routed.cached_tokens = usage.cached_tokens
            except hand_over.NO_HAND_OVER as error:
                self._forwarder.unusable_hand_over(prefill.worker_id, error)
        self._forwarder.spawn(self._routed.prefill_done(answering=False))
        self._handed_over = bool(fields)
        try:
            return await self._send(fields)
        except WorkerAnswered as error:
            if not self._handed_over or not _may_blame_hand_over(error):
                raise
            self._forwarder.unusable_hand_over(prefill.worker_id, error)
        self._handed_over = False
        return await self._send({})

    async def _at_once(self, prefill: PrefillWorker) -> web.StreamResponse:
        """Serves by a pair of SGLang: both workers get the request at once, and the client gets the
        decode worker's answer."""
        computing = asyncio.create_task(self._drained(prefill))
        serving = asyncio.create_task(self._send(prefill.decode_body()))
        try:
            await asyncio.wait({computing, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not self._exchange.answer.passed:
                computing.result()  # raises the prefill worker's failure
            return await serving
        except WORKER_ERRORS:
            if serving.done():
                self._routed.failed_worker_id = self._pick.worker_id
            raise
        finally:
            for task in (computing, serving):
                task.cancel()
            await asyncio.gather(computing, serving, return_exceptions=True)

    async def _drained(self, prefill: PrefillWorker) -> None:
        async with self._prefilled(prefill) as answer:
            async for _ in answer.content.iter_any():
                pass

    @asynccontextmanager
    async def _prefilled(self, prefill: PrefillWorker) -> AsyncIterator[aiohttp.ClientResponse]:
        """Context with the answer, of status 200, of a pair's prefill worker; raises WorkerAnswered
        for another status."""
        fields = self._exchange.prefill_fields(prefill.prefill_body)
        sent = await self._sent(prefill, prefill.headers, fields)
        async with asyncio.timeout(PREFILL_TIMEOUT_S), sent as answer:
            if answer.status != 200:  # a client's mistake ends the attempts, too
                raise await WorkerAnswered.read(answer, self._exchange.facts.model)
            yield answer

    # The answer

    async def _pass_on(self, sent: Sent, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        exchange = self._exchange
        head = answer.headers
        failure = exchange.answered(
            answer.status, head.get("Content-Type", ""), head.get("Content-Encoding", "")
        )
        passes = failure is None or (
            failure is Kind.REJECTED and answer.status != 404 and not self._handed_over
        )
        if not passes:
            raise await WorkerAnswered.read(answer, exchange.facts.model)
        response = self._response(answer)
        try:
            await self._bytes(sent, answer.content, response)
        except ClientLeft:
            await self._report(exchange.ended(Blame.CANCELLED))
            raise
        except WORKER_ERRORS as error:
            if not exchange.answer.passed:
                raise
            await self._cut(response, error)
            _forget_frames(error)
            return response
        outcome = exchange.ended(None if failure is None else Blame.CLIENT)
        if outcome.blame is None:
            self._forwarder.finished(exchange, self._pick.worker_id)
        await self._report(outcome)
        with _to_client():
            await response.write_eof()
        return response

    async def _bytes(
        self, sent: Sent, content: aiohttp.StreamReader, response: web.StreamResponse
    ) -> None:
        exchange = self._exchange
        if not exchange.answer.is_stream:
            await self._chunks(sent, content, response, only_first=False)
        elif await self._chunks(sent, content, response, only_first=True):
            # A chunk wakes up every coroutine that awaits it. In a task of its own these are three
            # and not fifteen, which saves some microseconds of each chunk.
            await asyncio.create_task(self._chunks(sent, content, response, only_first=False))
        rest = exchange.answer.rest()
        if not response.prepared:
            await self._begin(response)
        if rest:
            with _to_client():
                await response.write(rest)

    async def _chunks(
        self,
        sent: Sent,
        content: aiohttp.StreamReader,
        response: web.StreamResponse,
        *,
        only_first: bool,
    ) -> bool:
        """Passes the answer's bytes on, to its end, or with only_first to its first token; returns
        whether more may come."""
        reader, routed = self._exchange.answer, self._routed
        read, feed, write = content.readany, reader.feed, response.write
        seen = reader.first_token
        while chunk := await read():
            if passed := feed(chunk):
                sent.writing = True
                if not response.prepared:
                    await self._begin(response)
                try:
                    await write(passed)
                except ConnectionError as error:
                    raise ClientLeft from error
                sent.writing = False
            routed.output_tokens = reader.chunks
            if not seen and reader.first_token:
                seen = True
                if response.status == 200 and reader.is_stream:  # else the end says it as well
                    self._forwarder.spawn(routed.prefill_done())
                if only_first:
                    return True
        return False

    def _response(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        reason = answer.reason or ""
        is_text = reason.isascii() and reason.isprintable()
        response = _Answer(status=answer.status, reason=reason if reason and is_text else None)
        for name, value in returned(answer.headers.items()):
            response.headers.add(name, value)
        length = answer.headers.get("Content-Length", "")
        if length.isdigit() and not self._exchange.takes_usage_out:
            response.content_length = int(length)
        response.headers["X-Request-Id"] = self._exchange.request_id
        if self._forwarder.settings.answer_headers:
            response.headers.update(_about(self._pick))
        return response

    async def _begin(self, response: web.StreamResponse) -> None:
        if self._trace is not None:
            self._trace.first_byte()
        with _to_client():
            await response.prepare(self._request)

    async def _report(self, outcome: Outcome) -> None:
        asking, cached = self._forwarder.asking, self._prefill_cached
        await asking.report(self._exchange, outcome, self._routed, cached)

    async def _cut(self, response: web.StreamResponse, error: Exception) -> None:
        """Ends an answer whose worker failed after its first byte: an error event, if a stream has
        one, then the connection closes, so that the client can't take the answer for whole."""
        judged = judgement(error)
        blame = Blame(judged.reported)
        silent = blame is Blame.TIMEOUT
        message = "the worker sent nothing for too long" if silent else "the worker's answer broke"
        name = judged.reason or "WORKER_FAILED"
        exchange = self._exchange
        last = exchange.broke(blame, name, f"{message}: {error}")
        await self._report(exchange.ended())
        try:
            if last:
                await response.write(last)
        except ConnectionError:
            return
        transport = self._request.transport
        if transport is not None:
            transport.close()  # after what was written


def _may_blame_hand_over(error: WorkerAnswered) -> bool:
    """Whether a decode worker's refusal (4xx or 500) may be due to the hand-over, since the prefill
    worker took the same body."""
    return error.failure is Kind.REJECTED or error.status == 500


def _forget_frames(error: BaseException) -> None:
    """Deletes the tracebacks of an error and its causes. aiohttp's reader keeps the error, whose
    frames refer to the reader and to the request's body: a cycle that would be freed hours later.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


@contextmanager
def _to_client() -> Iterator[None]:
    """Context for writes to the client: turns an error of its connection into ClientLeft."""
    try:
        yield
    except ConnectionError as error:
        raise ClientLeft from error


def _about(pick: Pick) -> dict[str, str]:
    about = {
        "X-Kvroute-Worker": pick.worker_id,
        "X-Kvroute-Overlap-Tokens": str(pick.overlap_tokens.usable),
        "X-Kvroute-Reservation": pick.reservation_id,
    }
    if pick.prefill_worker is not None:
        about["X-Kvroute-Prefill-Worker"] = pick.prefill_worker.worker_id
    return about
