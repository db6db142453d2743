"""A stand-in engine in asyncio: takes requests, takes time, returns tokens and KV events.

The scheduler decides which request is computed when, the clock how fast time passes. The engine has
a timer for the end of its current step, and the futures of waiting clients. Everything runs on one
event loop.

    engine = Engine(EngineConfig("w0", SchedulerConfig(block_count=2048, block_size=64)), clock)
    completion = await engine.complete(token_ids, max_tokens=100)

Law: while there is work, step follows step without a gap in engine time, however late the event
loop calls; so durations are those of the cost model, not of this machine.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Literal, Unpack

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from indexer.identity import Tier
from simulator.engines.content import About, Answer, TokenContent, greedy_answer, token_submission
from simulator.engines.scheduler import (
    Load,
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    Sequence,
    TokenArray,
)
from simulator.live.clock import Clock, Timer
from simulator.live.latencies import Latencies
from simulator.schedulers import SCHEDULERS, Kind

__all__ = ["Chunk", "Completion", "Engine", "EngineConfig", "EngineStopped", "RequestRefused"]

Prompt = list[int] | npt.NDArray[np.uint32]
Publish = Callable[[bytes], object]
"""Called with each encoded batch of events."""


Half = Literal["prefill", "decode"]
"""The part of each request that an engine serves, where prefill and decode are apart."""


class EngineStopped(RuntimeError):
    """The engine ended before the request did, or has ended already."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's identity, and its scheduler's limits."""

    engine_id: str
    scheduler: SchedulerConfig
    model: str = "stand-in"
    kind: str = "vllm"
    """Kind of the engine: a name of simulator.schedulers.SCHEDULERS."""
    half: Half | None = None
    """The half of each request that the engine serves; None: whole requests."""

    @property
    def what(self) -> Kind:
        """The entry of the engine's kind in SCHEDULERS."""
        return SCHEDULERS[self.kind]


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request. Durations are in engine seconds."""

    token_ids: tuple[int, ...]
    """Tokens of the answer."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens in the prefix cache when the request was first admitted."""
    queue_s: float
    """Seconds from arrival to the first step that computed part of it."""
    ttft_s: float
    """Seconds from arrival to the first token."""
    e2e_s: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a stream; the last chunk has the `completion`."""

    token_ids: tuple[int, ...]
    completion: Completion | None


@dataclass(slots=True, eq=False)
class _Client:
    """A caller that waits for a sequence: for its end, or for each chunk."""

    sequence: Sequence
    content: TokenContent
    done: asyncio.Future[Completion]
    on_first_token: Callable[[], None] | None = None
    chunks: asyncio.Queue[Chunk | EngineStopped] | None = None


class Engine:
    """One engine with one rank. Needs a running loop, and a clock that is running."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        publish: Publish | None = None,
        answer: Answer = greedy_answer,
    ) -> None:
        self.config = config
        self.clock = clock
        self.latencies = Latencies()
        self.started_unix_s = clock.unix_s()
        self.stopped = False
        self._publish = publish
        self._answer = answer
        self._scheduler: Scheduler = config.what.scheduler(config.scheduler)
        self._encode_batch = config.what.encode_batch
        self._clients: dict[str, _Client] = {}
        self._timer: Timer | None = None
        self._due_s = 0.0
        """Engine time up to which the schedule is fixed: end of the last step, or last arrival."""

    @override
    def __repr__(self) -> str:
        return f"<Engine {self.config.engine_id} {self._scheduler!r}>"

    def load(self) -> Load:
        return self._scheduler.load()

    def cached_tokens(self, token_ids: Prompt, **about: Unpack[About]) -> int:
        """Prompt tokens that are in the cache now: the truth that an index is measured by."""
        tokens = _as_tokens(token_ids)
        submission, _ = token_submission(tokens, 0, self.config.scheduler, **about)
        return self._scheduler.cached_tokens(submission)

    def contents(self) -> list[tuple[Tier, int]]:
        """Tier and engine hash of every block that can be reused: the truth about the whole cache.

        Includes blocks of the current step, whose events are not published yet.
        """
        return list(self._scheduler.contents())

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False while requests hold blocks.

        Subscribers get the event with the next step's events, as with vLLM.
        """
        return self._scheduler.reset_prefix_cache()

    async def complete(
        self,
        token_ids: Prompt,
        max_tokens: int,
        *,
        on_first_token: Callable[[], None] | None = None,
        **about: Unpack[About],
    ) -> Completion:
        """Serves a request to its end. Cancelling the caller aborts the request.

        Raises RequestRefused, or EngineStopped when the engine ends first.
        """
        client = self._submit(token_ids, max_tokens, about)
        client.on_first_token = on_first_token
        try:
            return await client.done
        finally:
            self._leave(client)

    async def stream(
        self, token_ids: Prompt, max_tokens: int, **about: Unpack[About]
    ) -> AsyncGenerator[Chunk, None]:
        """Serves a request, yields its tokens as they come; closing the iterator aborts the
        request.

        Raises as `complete` does, at the first chunk.
        """
        client = self._submit(token_ids, max_tokens, about)
        client.chunks = asyncio.Queue()
        try:
            while True:
                chunk = await client.chunks.get()
                if isinstance(chunk, EngineStopped):
                    try:
                        raise chunk
                    finally:
                        del chunk  # a cycle: its traceback refers to this frame
                yield chunk
                if chunk.completion is not None:
                    return
        finally:
            self._leave(client)

    def stop(self) -> None:
        """Ends the engine at once, as a crash would: every waiting caller gets EngineStopped."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for client in self._clients.values():
            error = EngineStopped(f"engine {self.config.engine_id} stopped")
            if client.chunks is not None:
                client.chunks.put_nowait(error)
            elif not client.done.done():
                client.done.set_exception(error)
        self._clients.clear()

    def _submit(self, token_ids: Prompt, max_tokens: int, about: About) -> _Client:
        if self.stopped:
            raise EngineStopped(f"engine {self.config.engine_id} stopped")
        now_s = max(self.clock.now_s(), 0.0)
        submission, content = token_submission(
            _as_tokens(token_ids), max_tokens, self.config.scheduler, self._answer, **about
        )
        sequence = self._scheduler.add(submission, now_s)
        client = _Client(sequence, content, asyncio.get_running_loop().create_future())
        self._clients[sequence.request_id] = client
        if self._scheduler.step is None:
            self._due_s = max(self._due_s, now_s)
            self._begin_step()
        else:
            self._cut_step(now_s)
        return client

    def _leave(self, client: _Client) -> None:
        if self._clients.pop(client.sequence.request_id, None) is not None:
            now_s = max(self.clock.now_s(), 0.0)
            self._cut_step(now_s)
            self._scheduler.abort(client.sequence)
            if self._scheduler.step is None:
                self._due_s = max(self._due_s, now_s)
                self._begin_step()

    def _cut_step(self, now_s: float) -> None:
        step = self._scheduler.step
        if step is not None and step.count > 1:
            step = self._scheduler.cut_step(now_s)
            if step is not None:
                self._due_s = step.end_s
                self._call_at(step.end_s, self._end_step)

    def _begin_step(self) -> None:
        step = self._scheduler.begin_step(self._due_s)
        if step is not None:
            self._due_s = step.end_s
            self._call_at(step.end_s, self._end_step)
        elif (ready_s := self._scheduler.next_ready_s) is not None:
            self._call_at(ready_s, self._wake)

    def _wake(self) -> None:
        self._due_s = max(self._due_s, self.clock.now_s())
        self._begin_step()

    def _call_at(self, when_s: float, then: Callable[[], None]) -> None:
        """Sets the engine's only timer; the call set before is cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.clock.call_at(when_s, then)

    def _end_step(self) -> None:
        result = self._scheduler.end_step(self._due_s)
        if result.events and self._publish is not None:
            size = self.config.scheduler.block_size
            self._publish(self._encode_batch(self.clock.unix_s(), result.events, size))
        for output in result.outputs:
            client = self._clients.get(output.sequence.request_id)
            if client is None:
                continue
            if output.first == output.sequence.prompt_tokens:
                self.latencies.first_token(_ttft_s(output.sequence, self._due_s))
            if output.finished:
                del self._clients[output.sequence.request_id]
            completion = _completion(client, self._due_s) if output.finished else None
            if completion is not None:
                self.latencies.ended(
                    queue_s=completion.queue_s,
                    ttft_s=completion.ttft_s,
                    e2e_s=completion.e2e_s,
                    output_tokens=len(completion.token_ids),
                )
            _deliver(client, output.first, output.last, completion)
        # A request may have come after the step's end but before this call; it must not be served
        # before its arrival.
        self._due_s = max(self._due_s, self._scheduler.newest_arrival_s)
        self._begin_step()


def _deliver(client: _Client, first: int, last: int, completion: Completion | None) -> None:
    sequence = client.sequence
    if first == sequence.prompt_tokens and client.on_first_token is not None:
        client.on_first_token()
    if client.chunks is not None:
        client.chunks.put_nowait(
            Chunk(tuple(client.content.token_ids[first:last].tolist()), completion)
        )
    elif completion is not None and not client.done.done():
        client.done.set_result(completion)


def _completion(client: _Client, now_s: float) -> Completion:
    sequence = client.sequence
    scheduled_s = sequence.arrival_s if sequence.scheduled_s is None else sequence.scheduled_s
    return Completion(
        token_ids=tuple(client.content.token_ids[sequence.prompt_tokens :].tolist()),
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens or 0,
        queue_s=scheduled_s - sequence.arrival_s,
        ttft_s=_ttft_s(sequence, now_s),
        e2e_s=now_s - sequence.arrival_s,
        preemptions=sequence.preemptions,
    )


def _ttft_s(sequence: Sequence, now_s: float) -> float:
    first_token_s = now_s if sequence.first_token_s is None else sequence.first_token_s
    return first_token_s - sequence.arrival_s


def _as_tokens(token_ids: Prompt) -> TokenArray:
    try:
        return np.asarray(token_ids, dtype=np.uint32)
    except (OverflowError, ValueError, TypeError) as error:
        raise RequestRefused(f"token ids must be integers from 0 to 2^32 - 1: {error}") from error
