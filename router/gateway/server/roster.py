"""The list of workers, refreshed from a router at an interval: for /v1/models, /ready, and pairs.

Law: an old list stays while no router answers; requests go on with the client's fallback then.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvroute.client import KvRouteError
from kvroute.v1 import WorkerStatus
from router.gateway.exchange import ESTIMATE_MAX
from router.gateway.routers import Router

REFRESH_S = 5.0
"""Least seconds from one list of workers to the next."""
WORKER_S = 0.025
"""Least seconds between lists for each worker in the last list: a router writes a list of 1,000
workers in 30 ms."""

log = logging.getLogger("kvroute.gateway")


@dataclass(slots=True)
class _Model:
    """The workers of one model."""

    workers: int = 0
    pair_engines: frozenset[str] = frozenset()
    """Engines of the model's prefill workers."""
    shortest: int = sys.maxsize
    """Smallest max_model_len of the model's workers, in tokens."""

    def add(self, worker: WorkerStatus) -> None:
        self.workers += 1
        if worker.role == "prefill":
            self.pair_engines |= {worker.engine}
        if worker.max_model_len:
            self.shortest = min(self.shortest, worker.max_model_len)


_NO_WORKER = _Model()


class Roster:
    """The list of workers that a router gave last."""

    def __init__(self, client: Router, clock: Callable[[], float]) -> None:
        """clock: Unix time, for `created` of models."""
        self._client = client
        self._clock = clock
        self.workers: Sequence[WorkerStatus] = ()
        """The last list."""
        self._engines: dict[str, str] = {}
        """Worker id -> its engine."""
        self._models: dict[str, _Model] = {}
        """Name of a model, alias or LoRA -> its workers; "" -> all workers."""
        self._created: dict[str, int] = {}
        self._tried = False
        """Whether a list was tried, so that routers that have never answered are logged once."""
        self.listed = False
        """Whether the last call for a list was answered."""

    async def keep(self) -> None:
        """Refreshes the list repeatedly, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(max(REFRESH_S, WORKER_S * len(self.workers)))

    async def refresh(self) -> None:
        """Gets a list of workers from a router; if no router answers, the last list stays."""
        try:
            workers = await self._client.list_workers()
        except KvRouteError as error:
            if self.listed or not self._tried:
                log.warning("the workers can't be listed; this is tried again: %s", error)
            self.listed, self._tried = False, True
            return
        if not self.listed:
            log.info("%d workers are listed", len(workers))
        self.listed = self._tried = True
        self.use(workers)

    def use(self, workers: Iterable[WorkerStatus]) -> None:
        """Replaces the list of workers."""
        self.workers = list(workers)
        self._engines = {each.worker_id: each.engine for each in self.workers}
        self._models = {}
        for each in self.workers:
            for name in ("", *_names(each)):
                self._models.setdefault(name, _Model()).add(each)
        now = int(self._clock())
        self._created = {name: self._created.get(name, now) for name in self._models}

    @property
    def ready(self) -> bool:
        """Whether some worker of some model may be picked."""
        return any(each.schedulable or each.last_resort for each in self.workers)

    def pair_engines(self, model: str) -> frozenset[str]:
        """Engines of the model's prefill workers; model empty: of all models' prefill workers."""
        return self._models.get(model, _NO_WORKER).pair_engines

    def engine(self, worker_id: str) -> str:
        """Name of a worker's engine; empty: the worker is not in the list."""
        return self._engines.get(worker_id, "")

    def count(self, model: str) -> int:
        """Number of the model's workers; model empty: of all workers."""
        return self._models.get(model, _NO_WORKER).workers

    def has_other(self, model: str, role: str, gone: Collection[tuple[str, int]]) -> bool:
        """Whether a worker of this model and role may be picked that is not in `gone`. model:
        empty: any. gone: (worker id, rank) each.
        """
        return any(
            each.schedulable
            and each.role == role
            and (each.worker_id, each.dp_rank) not in gone
            and (not model or model in _names(each))
            for each in self.workers
        )

    def estimate_max(self, model: str) -> int:
        """Largest estimated length of a prompt, in tokens: ESTIMATE_MAX, or if less half the
        model's smallest max_model_len, since only engines know whether a prompt is too long."""
        return min(ESTIMATE_MAX, self._models.get(model, _NO_WORKER).shortest // 2)

    def models(self) -> list[dict[str, Any]]:
        """The models of all workers as OpenAI lists them: names, aliases, LoRAs, each once."""
        cards: dict[str, dict[str, Any]] = {}
        for each in self.workers:
            if each.drained or not each.model:
                continue
            for name in _names(each):
                parent = each.model if name in each.lora_names else None
                card = cards.setdefault(
                    name,
                    {
                        "id": name,
                        "object": "model",
                        "created": self._created.get(name, 0),
                        "owned_by": each.engine or "kvroute",
                        "root": each.model,
                        "parent": parent,
                        "max_model_len": each.max_model_len or None,
                    },
                )
                if each.max_model_len and (
                    not card["max_model_len"] or each.max_model_len < card["max_model_len"]
                ):
                    card["max_model_len"] = each.max_model_len
        return [cards[name] for name in sorted(cards)]


def _names(worker: WorkerStatus) -> list[str]:
    return [worker.model, *worker.model_aliases, *worker.lora_names] if worker.model else []
