"""Requests with a priority that were sent to engines which ignore priorities. Pure.

Such a priority counts in the router's queue alone: once the request has its worker, the engine
serves it in the order of arrival. That may be intended, so it is a warning of one worker a model.

Laws: of each model one worker at most, and MODELS_MAX models; nothing is kept of a worker that is
gone.
"""

from collections.abc import Iterable

from indexer.identity import WorkerKey

MODELS_MAX = 64
"""Models with a worker that ignored a priority; further ones are not noted."""


class IgnoredPriorities:
    """The first worker of each model that got a request with a priority and ignores priorities."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerKey] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def note(self, model: str, worker: WorkerKey) -> None:
        """Records that a worker which ignores priorities got a request with one."""
        if model not in self._workers and len(self._workers) < MODELS_MAX:
            self._workers[model] = worker

    def holds(self, model: str, worker: WorkerKey) -> bool:
        """Whether this worker was the first of its model."""
        return self._workers.get(model) == worker

    def forget(self, workers: Iterable[WorkerKey]) -> None:
        """Forgets workers that left the fleet."""
        gone = set(workers)
        if any(worker in gone for worker in self._workers.values()):
            self._workers = {
                model: worker for model, worker in self._workers.items() if worker not in gone
            }
