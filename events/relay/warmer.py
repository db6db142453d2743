"""Makes an engine compute a prefix ahead of its requests, for a router.

    router ──NATS: Warm────> Warmer ──POST /v1/completions: the tokens, max_tokens 1──> engine
    router <──NATS: Warmed──

Works on every engine with a prefix cache, which keeps the computed blocks. Bounds: one prefix at a
time, JOBS_MAX that are computed or wait, and none while requests wait in the engine. Routers that
request the same prefix at the same time share its computation.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import msgspec
import numpy as np
from nats.aio.msg import Msg

from events.engines.access import EngineAccess, refused_key
from events.engines.endpoints import masked
from events.engines.pages.probe import redirect_of
from events.engines.table import engine_of
from events.plane.facts import Unreadable, Warm, Warmed, decode, encode
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor
from indexer.identity import WorkerKey

WARM_S = 60.0
"""Seconds from a router's request to its answer, at most."""
JOBS_MAX = 4
REPLIES_MAX = 64
_TROUBLE_BYTES_MAX = 500

log = logging.getLogger("kvroute.warmer")


@dataclass(slots=True, eq=False)
class _Job:
    """A requested prefix, and the routers that requested it."""

    request: Warm
    replies: dict[str, str] = field(default_factory=dict)
    """Id of the copy -> subject of its answer"""
    task: asyncio.Task[None] | None = None


class Warmer:
    """Computes prefixes on one engine's rank."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        access: EngineAccess,
        settings: EngineSettings,
        worker: WorkerKey,
        *,
        model: Callable[[], str],
        is_busy: Callable[[], bool],
        answer: Callable[[str, bytes], Awaitable[bool]],
        counts: Counter[str],
        supervisor: Supervisor,
    ) -> None:
        """model: the engine's name for its model; empty: unknown. is_busy: whether requests wait in
        the engine.

        counts: warm_failed, warm_busy (with other requests, or other prefixes), warm_malformed.
        """
        self._session = session
        self._access = access
        self._settings = settings
        self._worker = worker
        self._model = model
        self._is_busy = is_busy
        self._answer = answer
        self._counts = counts
        self._supervisor = supervisor
        self._jobs: dict[tuple[bytes, str, str], _Job] = {}
        """(tokens, LoRA, salt) -> job"""
        self._one_at_a_time = asyncio.Semaphore(1)

    async def on_message(self, message: Msg) -> None:
        """Handles a router's Warm: a request for a prefix, or its cancel."""
        request = decode(Warm, message.data)
        if isinstance(request, Unreadable):
            self._counts["warm_malformed"] += 1
            return
        if request.cancel:
            self._cancel(request.id)
            return
        job = self._jobs.get(_key(request))
        if job is None and len(self._jobs) < JOBS_MAX:
            job = self._jobs[_key(request)] = _Job(request)
            job.task = self._supervisor.once(partial(self._run, job), "warm")
        if job is None or len(job.replies) >= REPLIES_MAX:
            self._counts["warm_busy"] += 1
            await self._reply(request.id, message.reply, "busy with other prefixes")
        else:
            job.replies[request.id] = message.reply

    def _cancel(self, copy_id: str) -> None:
        for job in self._jobs.values():
            if job.replies.pop(copy_id, None) is not None:
                if not job.replies:
                    self._end(job)
                    if job.task is not None:
                        job.task.cancel()
                return

    def _end(self, job: _Job) -> None:
        """Frees a job's place; the next request for its prefix is another job.

        A cancelled job ends here at once, since its task may never have begun.
        """
        if self._jobs.get(_key(job.request)) is job:
            del self._jobs[_key(job.request)]

    async def _run(self, job: _Job) -> None:
        request, kind = job.request, "warm_failed"
        try:
            async with asyncio.timeout(WARM_S), self._one_at_a_time:
                if self._is_busy():
                    kind, trouble = "warm_busy", "requests wait in the engine"
                else:
                    trouble = await self._compute(request)
        except TimeoutError:
            trouble = f"not done after {WARM_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            trouble = str(error) or type(error).__name__
        finally:
            self._end(job)
        trouble = masked(trouble)
        if trouble:
            self._counts[kind] += 1
            log.warning("%s: a prefix was not computed: %s", self._worker, trouble)
        for copy_id, reply in job.replies.items():
            await self._reply(copy_id, reply, trouble)

    async def _compute(self, request: Warm) -> str:
        """Has the engine compute a prefix; returns why it did not, or an empty text. Raises
        aiohttp's errors."""
        body = completion_of(request, self._settings.engine, self._model())
        headers = {"Content-Type": "application/json"}
        if self._settings.ranks > 1:
            headers["X-data-parallel-rank"] = str(self._worker.dp_rank)
        async with self._session.post(
            self._access.url("/v1/completions"),
            data=msgspec.json.encode(body),
            headers=self._access.headers(headers),
            ssl=self._access.tls,
            timeout=aiohttp.ClientTimeout(total=WARM_S),
            allow_redirects=False,
        ) as response:
            if response.status == 200:
                return ""
            if why := redirect_of(response) or refused_key(response.status):
                return why
            detail = await response.content.read(_TROUBLE_BYTES_MAX)
            return f"status {response.status}: {detail.decode('utf-8', 'replace')}"

    async def _reply(self, copy_id: str, reply: str, trouble: str) -> None:
        if reply:
            warmed = Warmed(id=copy_id, done=not trouble, detail=trouble[:_TROUBLE_BYTES_MAX])
            await self._answer(reply, encode(warmed))


def _key(request: Warm) -> tuple[bytes, str, str]:
    return request.tokens, request.lora_name, request.cache_salt


def completion_of(request: Warm, engine: str, model: str) -> dict[str, Any]:
    """The body for /v1/completions that computes a prefix. model: empty: unknown."""
    body: dict[str, Any] = {
        "prompt": np.frombuffer(request.tokens, "<u4").tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    lora_field = engine_of(engine).lora_field
    if request.lora_name and lora_field:
        body[lora_field] = request.lora_name
    elif request.lora_name:
        model = request.lora_name
    if model:
        body["model"] = model
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body
