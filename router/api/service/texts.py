"""Prompts without tokens, before the desk: their tokens are made, then the desk takes the requests
like any other.

    request with a text -> tokens or an estimate, put into it -> desk -> answer + prompt

Laws:
- the desk gets such a request once, after its tokens are there, with the time that is left to its
  caller;
- a caller that leaves ends what is under way for it: the making of tokens, the wait in the desk's
  queue, or the reservation;
- the tokens of at most OPEN_MAX prompts are made at once; the length of a further prompt is
  estimated;
- if the making of tokens fails, the caller gets a refusal, and nothing stays reserved;
- tokens that one engine alone gave refuse no request: if they are too many, the length is
  estimated, and the engine that gets the request decides whether it fits.
"""

import asyncio
from dataclasses import replace
from functools import partial
from math import inf

from router.api.desk import text_codec
from router.api.desk.answers import Answered, Later, Steps
from router.api.desk.desk import Desk, caller_left
from router.api.desk.request_codec import RouteMessage
from router.api.desk.stream_items import RouteItems
from router.api.desk.tenant import UNVERIFIED, Caller
from router.api.service.workers_to_ask import WorkersToAsk
from router.decide.core.core import RouterCore
from router.fleet.eligibility import OUTPUT_TOKENS_MAX
from router.net.listener.turns import turned
from router.request.prompt_error import PromptError
from router.request.refusal import Reason, Refusal
from router.request.tokens import REFUSED, MadeBy, PromptAsk, Prompts, PromptTokens, Source
from router.request.wire.received import ReceivedRequest, text_form

OPEN_MAX = 4096
"""Prompts whose tokens are made at once, at most."""
RETRY_S = 0.1
"""Seconds in RetryInfo for a caller that requires tokens while none can be made."""
_MOMENTARY = frozenset((Reason.RENDERER_UNAVAILABLE, Reason.RENDER_QUEUE_FULL))


class TextWaiting(Later):
    """A prompt whose tokens are being made, or whose request waits in the desk's queue."""

    __slots__ = ("task", "text", "with_desk")

    def __init__(self, text: ReceivedRequest) -> None:
        super().__init__()
        self.text = text
        self.with_desk = False
        """Whether the request has its tokens, and the desk counts its outcome."""
        self.task: asyncio.Task[None] | None = None
        """Makes the tokens and routes the request; None: the caller left."""

    def finish(self, outcome: Answered | Refusal) -> None:
        self.outcome = outcome.copy() if isinstance(outcome, Refusal) else outcome
        self.settle()


class Texts:
    """Step between a server's handlers and the desk, which makes the tokens of prompts that have
    none.
    """

    def __init__(self, desk: Desk, core: RouterCore, prompts: Prompts) -> None:
        self.prompts = prompts
        self._desk = desk
        self._core = core
        self._workers = WorkersToAsk(core, prompts)
        self.open = 0
        """Number of prompts whose tokens are being made."""

    def items(self, caller: Caller = UNVERIFIED) -> RouteItems:
        """Makes the items of one RouteStream call."""
        desk, item = self._desk, partial(self.item, caller=caller)
        return RouteItems(item, desk.cancel, self.leave, desk.outlook, desk.unsent)

    async def answered(
        self, request: RouteMessage, left_s: float, caller: Caller = UNVERIFIED
    ) -> Answered:
        """Answers a request, after a wait if need be; raises Refusal, which is counted. A caller
        that is cancelled leaves the queue.
        """
        answered = self.item(request, left_s, caller)
        return answered if isinstance(answered, tuple) else await self._awaited(answered)

    def item(
        self, request: RouteMessage | None, left_s: float = inf, caller: Caller = UNVERIFIED
    ) -> Answered | Later | Steps:
        """Answers a call or an item of a stream as the desk's `item` does; a text has to wait for
        its tokens. Raises Refusal, which is counted.
        """
        if request is None or not text_form(request):
            return self._desk.item(request, left_s, caller)
        try:
            if caller.usage is not None:
                caller.usage.request()
            text = text_codec.read_text(request, caller)
        except Refusal as refusal:
            self._desk.refused(refusal, request)
            raise
        waiting = TextWaiting(text)
        waiting.task = asyncio.get_running_loop().create_task(self._make(waiting, left_s, caller))
        return waiting

    def leave(self, later: Later) -> None:
        """Ends the making of tokens, the wait or the reservation of a caller that left."""
        if isinstance(later, TextWaiting) and later.outcome is None:
            later.forget_caller()
            # The frames of its CancelledError refer to `later`: a cycle, if that kept the task.
            task, later.task = later.task, None
            if task is not None and task.cancel() and not later.with_desk:
                self._desk.refused(caller_left(), later.text)
        else:
            self._desk.leave(later)

    async def explain(self, request: bytes, caller: Caller) -> bytes:
        """Answers a RouteRequest of Explain by an Explanation, both as bytes; raises Refusal."""
        if caller.usage is not None:
            caller.usage.request(reserves=False)
        if not text_form(request):
            return b"".join(await turned(self._desk.explain(request, caller)))
        text = text_codec.read_text(request, caller)
        made = await self.tokens(text, inf)
        text_codec.put_tokens(text, made)
        parts = await turned(self._desk.explain(text, caller))
        return b"".join((*parts, text_codec.explained(made, text)))

    async def _awaited(self, answered: Later | Steps) -> Answered:
        """The answer of a request that waits, or is decided in steps; raises Refusal. A caller that
        is cancelled leaves the queue."""
        later = answered if isinstance(answered, Later) else await turned(answered)
        if not isinstance(later, Later):
            return later
        if later.outcome is None:
            done = asyncio.get_running_loop().create_future()
            later.on_done = partial(_settle, done)
            try:
                await done
            except asyncio.CancelledError:
                self.leave(later)
                raise
        return later.take()

    async def _make(self, waiting: TextWaiting, left_s: float, caller: Caller) -> None:
        """Makes the prompt's tokens and routes the request; gives the outcome to `waiting`."""
        try:
            waiting.finish(await self._routed(waiting, left_s, caller))
        except Refusal as refusal:  # counted
            waiting.finish(refusal)
        except Exception as error:  # a fault of ours, which ends one request and no other
            waiting.finish(self._desk.failed(error, waiting.text))

    async def _routed(self, waiting: TextWaiting, left_s: float, caller: Caller) -> Answered:
        """Makes the prompt's tokens and has the desk answer the request within left_s seconds;
        raises Refusal, which is counted."""
        began_s, request = asyncio.get_running_loop().time(), waiting.text
        span = self._desk.render_span(request)
        try:
            made = await self.tokens(request, left_s)
        except Refusal as refusal:
            span({}, refusal.reason)
            raise self._desk.refused(refusal, request) from None
        except Exception:
            span({}, Reason.INTERNAL)
            raise
        span({"kvroute.prompt_tokens": made.count, "kvroute.tokens_from": made.made_by.value})
        left_s -= asyncio.get_running_loop().time() - began_s
        text_codec.put_tokens(request, made)
        waiting.with_desk = True
        answered = self._desk.item(request, left_s, caller)
        if not isinstance(answered, tuple):
            answered = await self._awaited(answered)
        return self._answer(request, made, answered)

    def _answer(self, request: ReceivedRequest, made: PromptTokens, answered: Answered) -> Answered:
        """The desk's answer with the field `prompt`; if that fails, its reservation ends."""
        answer, reservation, repeated = answered
        try:
            if not repeated:
                made = self.prompts.on_pick(reservation.id, made, reservation.worker.worker_id)
            return answer + text_codec.answered(made, request), reservation, repeated
        except Exception:
            if not repeated:
                self._desk.unsent(reservation)
            raise

    async def tokens(
        self, request: ReceivedRequest, left_s: float, source: Source | None = None
    ) -> PromptTokens:
        """The tokens of a text or a body, or an estimate of their number; raises Refusal. source:
        replaces the configured source.
        """
        if left_s <= 0:
            raise _too_late()
        self.open += 1
        try:
            async with asyncio.timeout(None if left_s == inf else left_s):
                try:
                    return await self._made(request, left_s, source)
                except PromptError as error:
                    if error.reason in REFUSED:
                        raise
                return await self._made(
                    request, left_s, source
                )  # by another engine, the next in turn
        except PromptError as error:
            retry_s = RETRY_S if error.reason in _MOMENTARY else None
            raise Refusal(error.reason, error.message, retry_s) from None
        except TimeoutError:
            raise _too_late() from None
        finally:
            self.open -= 1

    async def _made(
        self, request: ReceivedRequest, left_s: float, source: Source | None
    ) -> PromptTokens:
        """Makes the tokens by one source or engine; raises Refusal and PromptError."""
        ask = PromptAsk(
            self._core.fleet.base_model(request.model),
            text_codec.KINDS[request.form],
            bytes(request.data),
            self._workers.next(request.model),
            left_s=left_s,
            require=request.require_tokens,
            source=source,
        )
        if self.open > OPEN_MAX:
            return self._bounded(self.prompts.estimate(ask, _many()), request, ask)
        return self._bounded(await self.prompts.tokens_of(ask), request, ask)

    def _bounded(
        self, made: PromptTokens, request: ReceivedRequest, ask: PromptAsk
    ) -> PromptTokens:
        """Checks the number of tokens: raises Refusal for too many; lowers an estimate instead, and
        estimates where a single engine made too many. Raises PromptError if no estimate may be
        made."""
        most = self._core.routing.prompt_tokens_max
        if made.only_for and made.count > min(most, self._longest_prompt(request)):
            why = f"worker {made.only_for} made {made.count} tokens, more than any worker takes"
            made = self.prompts.estimate(
                ask, PromptError(Reason.RENDERER_UNAVAILABLE, why, made.shape)
            )
        if made.made_by is MadeBy.ESTIMATE:
            count = min(made.count, most, self._workers.estimate_max(request.model))
            return replace(made, count=max(1, int(count)))
        if made.count > most:
            raise Refusal(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {made.count} tokens, the limit is {most}"
                " (routing.prompt_tokens_max)",
            )
        return made

    def _longest_prompt(self, request: ReceivedRequest) -> float:
        """Tokens of the longest prompt that any worker of the model takes with its output."""
        output = request.expected_output_tokens
        if output is None:
            output = self._core.routing.expected_output_tokens
        return self._workers.longest(request.model) - min(output, OUTPUT_TOKENS_MAX)


def _settle(done: "asyncio.Future[None]") -> None:
    """Wakes a caller that waits for an outcome, unless the caller is gone."""
    if not done.done():
        done.set_result(None)


def _many() -> PromptError:
    return PromptError(
        Reason.RENDER_QUEUE_FULL,
        f"the tokens of {OPEN_MAX} prompts are being made, which is the bound",
    )


def _too_late() -> Refusal:
    return Refusal(
        Reason.DEADLINE_EXCEEDED, "the caller's deadline passed before the prompt had its tokens"
    )
