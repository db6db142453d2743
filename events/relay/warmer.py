"""Has an engine compute a prefix ahead of the requests for it, when a router asks.

    router ──NATS──> Warmer ──POST /v1/completions: the tokens, one more to come──> engine
    router <──NATS── what became of it

Works on every engine that has a prefix cache: it keeps what it computed. A shell: it awaits, and
decides only what the bounds say: one prefix at a time, JOBS_MAX in all, and none while requests
wait in the engine. Routers that ask for the same at the same time share one computation.
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

from events.engines.endpoints import masked
from events.engines.probe import redirect_of
from events.plane.facts import Unreadable, Warm, Warmed, decode, encode
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor
from indexer.identity import WorkerKey

WARM_S = 60.0
"""From the question to its answer, at most."""
JOBS_MAX = 4
ASKERS_MAX = 64
_TROUBLE_BYTES_MAX = 500

log = logging.getLogger("kvroute.warmer")


@dataclass(slots=True, eq=False)
class _Job:
    """One prefix that is wanted, and by whom."""

    asked: Warm
    askers: dict[str, str] = field(default_factory=dict)
    """By id of the copy, where its answer goes."""
    task: asyncio.Task[None] | None = None


class Warmer:
    """Of one engine's rank."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: EngineSettings,
        worker: WorkerKey,
        *,
        model: Callable[[], str],
        is_busy: Callable[[], bool],
        answer: Callable[[str, bytes], Awaitable[bool]],
        counts: Counter[str],
        supervisor: Supervisor,
    ) -> None:
        """model: the engine's name for it; empty: unknown. is_busy: whether requests wait there.

        counts: warm_failed, warm_busy (with other requests, or other prefixes), warm_malformed.
        """
        self._session = session
        self._settings = settings
        self._worker = worker
        self._model = model
        self._is_busy = is_busy
        self._answer = answer
        self._counts = counts
        self._supervisor = supervisor
        self._jobs: dict[tuple[bytes, str, str], _Job] = {}
        """By tokens, LoRA and salt."""
        self._one_at_a_time = asyncio.Semaphore(1)

    async def asked(self, message: Msg) -> None:
        """A router asks, or takes back what it asked."""
        asked = decode(Warm, message.data)
        if isinstance(asked, Unreadable):
            self._counts["warm_malformed"] += 1
            return
        if asked.cancel:
            self._cancel(asked.id)
            return
        job = self._jobs.get(_key(asked))
        if job is None and len(self._jobs) < JOBS_MAX:
            job = self._jobs[_key(asked)] = _Job(asked)
            job.task = self._supervisor.once(partial(self._run, job), "warm")
        if job is None or len(job.askers) >= ASKERS_MAX:
            self._counts["warm_busy"] += 1
            await self._tell(asked.id, message.reply, "busy with other prefixes")
        else:
            job.askers[asked.id] = message.reply

    def _cancel(self, copy_id: str) -> None:
        for job in self._jobs.values():
            if job.askers.pop(copy_id, None) is not None:
                if not job.askers:
                    self._end(job)
                    if job.task is not None:
                        job.task.cancel()
                return

    def _end(self, job: _Job) -> None:
        """Frees the job's place; the next question for its prefix is another job.

        A cancelled job ends here at once, since its task may never have begun.
        """
        if self._jobs.get(_key(job.asked)) is job:
            del self._jobs[_key(job.asked)]

    async def _run(self, job: _Job) -> None:
        asked, kind = job.asked, "warm_failed"
        try:
            async with asyncio.timeout(WARM_S), self._one_at_a_time:
                if self._is_busy():
                    kind, trouble = "warm_busy", "requests wait in the engine"
                else:
                    trouble = await self._compute(asked)
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
        for copy_id, reply in job.askers.items():
            await self._tell(copy_id, reply, trouble)

    async def _compute(self, asked: Warm) -> str:
        """Why the engine didn't; empty when it did. Raises what aiohttp raises."""
        body = completion_of(asked, self._settings.engine, self._model())
        headers = {"Content-Type": "application/json"}
        if self._settings.ranks > 1:
            headers["X-data-parallel-rank"] = str(self._worker.dp_rank)
        async with self._session.post(
            f"{(self._settings.http or '').rstrip('/')}/v1/completions",
            data=msgspec.json.encode(body),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=WARM_S),
            allow_redirects=False,
        ) as response:
            if response.status == 200:
                return ""
            if redirect := redirect_of(response):
                return redirect
            told = await response.content.read(_TROUBLE_BYTES_MAX)
            return f"status {response.status}: {told.decode('utf-8', 'replace')}"

    async def _tell(self, copy_id: str, reply: str, trouble: str) -> None:
        if reply:
            told = Warmed(id=copy_id, done=not trouble, detail=trouble[:_TROUBLE_BYTES_MAX])
            await self._answer(reply, encode(told))


def _key(asked: Warm) -> tuple[bytes, str, str]:
    return asked.tokens, asked.lora_name, asked.cache_salt


def completion_of(asked: Warm, engine: str, model: str) -> dict[str, Any]:
    """The request that computes a prefix, for /v1/completions. model: empty: unknown."""
    body: dict[str, Any] = {
        "prompt": np.frombuffer(asked.tokens, "<u4").tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    if asked.lora_name and engine == "vllm":
        model = asked.lora_name  # vLLM knows an adapter as a model
    elif asked.lora_name:
        body["lora_path"] = asked.lora_name
    if model:
        body["model"] = model
    if asked.cache_salt:
        body["cache_salt"] = asked.cache_salt
    return body
