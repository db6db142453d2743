"""The messages of the RPC WatchWorkers, written once for all its callers.

Laws:
- while there are watchers, every worker's status is written once in WATCH_S seconds, and never
  without watchers;
- SLICE_STATUSES statuses at most are written without a turn for other calls;
- a watcher that has not taken a message yet misses rounds, and then gets what changed since its
  last message.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from events.feed.fleet_view import Source, away
from events.plane.facts import Heartbeat
from indexer.identity import WorkerKey
from kvroute.v1 import fleet_pb2
from router.api.desk import answer_codec, worker_codec
from router.decide.core.core import RouterCore
from router.net.keys.identity import ANYBODY, Identity
from router.request.refusal import Reason, Refusal

WATCH_S = 0.5
WATCHES_MAX = 1000
SLICE_STATUSES = 32
RETRY_S = 5.0
_CHANGED, _REMOVED = 1, 2
"""Field numbers in a WatchWorkersResponse of changed and of removed workers."""


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A worker's status as written; a new object as soon as anything but its ages changes."""

    settled: bytes
    """The status, as bytes, without beat_age_s and sample_age_s, which change with time alone."""
    heartbeat: Heartbeat | None


Shows: TypeAlias = Callable[[WorkerKey, Written], bool]


class Scope(NamedTuple):
    """Selects the workers that a list shows."""

    model: str = ""
    """Model that the shown workers serve; empty: workers of all models are shown."""
    sight: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Patterns of worker ids and of models that the caller may see; None: all (Identity.sight)."""


@dataclass(slots=True, eq=False)
class Round:
    """The statuses of all workers at one time."""

    number: int
    at_s: float
    """Time on the event loop's clock."""
    statuses: dict[WorkerKey, Written] = field(default_factory=dict)
    ages: dict[WorkerKey, bytes] = field(default_factory=dict)
    messages: dict[tuple[int, Scope], bytes] = field(default_factory=dict)
    """Number of an earlier round (-1: none), scope -> the changes since then, as bytes."""

    def since(self, before: "Round | None", scope: Scope, shows: Shows) -> bytes:
        """A WatchWorkersResponse, as bytes, with the changes since the round `before`; before None:
        with all workers.
        """
        known = (before.number if before is not None else -1, scope)
        message = self.messages.get(known)
        if message is None:
            message = self.messages[known] = b"".join(self._since(before, shows))
        return message

    def _since(self, before: "Round | None", shows: Shows) -> Iterable[bytes]:
        old = before.statuses if before is not None else {}
        gone = [key for key, was in old.items() if key not in self.statuses and shows(key, was)]
        for key, status in self.statuses.items():
            was = old.get(key)
            if was is status:
                continue
            if shows(key, status):
                yield answer_codec.framed(_CHANGED, status.settled + self.ages[key])
            elif was is not None and shows(key, was):
                gone.append(key)
        for key in gone:
            removed = fleet_pb2.WorkerRef(worker_id=key.worker_id, dp_rank=key.dp_rank)
            yield answer_codec.framed(_REMOVED, removed.SerializeToString())


class WorkerFeed:
    """Makes rounds for all watchers, and lists for single calls."""

    def __init__(
        self,
        core: RouterCore,
        clock: Callable[[], float],
        stopping: asyncio.Event,
        watches_max: int = WATCHES_MAX,
    ) -> None:
        self._core = core
        self._clock = clock
        self._stopping = stopping
        self._watches_max = watches_max
        self.watches = 0
        """Number of open WatchWorkers calls."""
        self.statuses_written = 0
        self._numbers = 0
        self._round: Round | None = None
        self._coming: asyncio.Future[Round | None] | None = None
        """The next round, once a watcher waits for it; None: the server stops."""
        self._writer: asyncio.Task[None] | None = None

    async def list(
        self, model: str, identity: Identity = ANYBODY, *, only_away: bool = False
    ) -> bytes:
        """A ListWorkersResponse, as bytes, with the workers that an identity may see. only_away:
        workers that stopped answering, unless so many stopped at once that NATS may have failed.
        """
        pieces = []
        async for source, settled, ages in self._statuses(model, only_away=only_away):
            if not _may_see(identity, source.key, source.heartbeat):
                continue
            pieces.append(answer_codec.framed(1, settled + ages))
        return b"".join(pieces)

    async def watch(
        self, model: str, age_s: float | None, identity: Identity = ANYBODY
    ) -> AsyncGenerator[bytes, None]:
        """Yields WatchWorkersResponses as bytes, first with all workers that an identity may see,
        then with changes, for age_s seconds (None: without end) or until the server stops.

        Raises Refusal when too many calls are open.
        """
        if self.watches >= self._watches_max:
            raise Refusal(
                Reason.TOO_MANY_WATCHES,
                f"{self.watches} WatchWorkers calls are open, as many as this router takes",
                RETRY_S,
            )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        seen: Round | None = None
        scope = Scope(model, identity.sight)

        def shows(key: WorkerKey, worker: Written) -> bool:
            return self._serves(worker, model) and _may_see(identity, key, worker.heartbeat)

        self.watches += 1
        try:
            while not self._stopping.is_set() and (age_s is None or loop.time() - began_s < age_s):
                now = await self._after(seen)
                if now is None:
                    return
                message = now.since(seen, scope, shows)
                if message or seen is None:
                    yield message
                seen = now
        finally:
            self.watches -= 1

    async def _after(self, seen: Round | None) -> Round | None:
        """Waits for a round later than `seen`; returns None when the server stops."""
        loop = asyncio.get_running_loop()
        last = self._round
        if last is not None and last is not seen and loop.time() - last.at_s < WATCH_S:
            return last
        if self._coming is None:
            self._coming = loop.create_future()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_rounds(), name="watched workers")
        return await asyncio.shield(self._coming)

    async def _write_rounds(self) -> None:
        """Writes a round each WATCH_S, as long as there are watchers and the server goes on."""
        while (coming := self._coming) is not None:
            if self._stopping.is_set():
                self._coming = None
                coming.set_result(None)
                return
            try:
                now = await self._write_round()
            except (Exception, asyncio.CancelledError) as error:  # each watcher's call ends with it
                self._coming = None
                failed = RuntimeError("the workers' statuses could not be written")
                failed.__cause__ = error
                coming.set_exception(failed)
                coming.exception()  # there may be no watcher left that awaits it
                return
            self._round, self._coming = now, None
            coming.set_result(now)
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._stopping.wait()
        if self._coming is None and not self.watches:
            self._round = None  # nobody watches: nothing is kept

    async def _write_round(self) -> Round:
        self._numbers += 1
        now = Round(self._numbers, asyncio.get_running_loop().time())
        before = self._round.statuses if self._round is not None else {}
        async for source, settled, ages in self._statuses(""):
            was = before.get(source.key)
            if was is None or was.settled != settled:
                was = Written(settled, source.heartbeat)
            now.statuses[source.key] = was
            now.ages[source.key] = ages
        return now

    async def _statuses(
        self, model: str, *, only_away: bool = False
    ) -> AsyncIterator[tuple[Source, bytes, bytes]]:
        """Yields workers by id and rank, each with its status without ages, and with the ages
        alone, as bytes."""
        sources = self._core.fleet.view.sources
        for n, key in enumerate(sorted(sources)):
            if n % SLICE_STATUSES == SLICE_STATUSES - 1:
                await asyncio.sleep(0)  # other calls have a turn
            source = sources.get(key)
            if source is None or (model and not self._core.fleet.serves(source, model)):
                continue
            if only_away and (not away(source) or self._core.fleet.last_resort(source)):
                continue
            self.statuses_written += 1
            status = worker_codec.write_worker(source, self._core, self._clock())
            ages = worker_codec.take_ages(status)
            yield source, status.SerializeToString(deterministic=True), ages.SerializeToString()

    def _serves(self, status: Written, model: str) -> bool:
        if not model:
            return True
        heartbeat = status.heartbeat
        return heartbeat is not None and self._core.fleet.models.serves(heartbeat, model)


def _may_see(identity: Identity, key: WorkerKey, heartbeat: Heartbeat | None) -> bool:
    if identity.sight is None:
        return True
    names: tuple[str, ...] = ()
    if heartbeat is not None:
        names = (heartbeat.model, *heartbeat.model_aliases, *heartbeat.lora_names)
    return identity.may_see(key.worker_id, names)
