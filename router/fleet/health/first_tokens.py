"""Measures how long first tokens take, and for how long each worker has owed one. Pure.

A worker owes a first token while this router's requests wait there for one; the time counts from
the last first token that the worker gave. The usual time is a mean over all workers: if callers
report nothing before an answer's end, it is that of whole answers. Without any reports, no worker
is overdue.
"""

from indexer.identity import WorkerKey

LEARNED_MIN = 10
"""First tokens that must have come before the mean is used."""
_KEPT = 16
"""Number of the latest first tokens that the mean is about."""


class FirstTokens:
    """Times to the first token of all workers, and since when each worker has owed one."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """Mean seconds from the pick to the first token."""
        self._count = 0
        self._owed: dict[WorkerKey, tuple[float, int]] = {}
        """Worker -> time since which it owes a first token, and the first tokens of all workers
        counted by then."""

    def on_first(self, after_s: float) -> None:
        """Records the first token of a request, after_s seconds after its pick."""
        count = self._count = self._count + 1
        kept = count if count < _KEPT else _KEPT  # noqa: FURB136  # half a call, for each request
        self.mean_s += (after_s - self.mean_s) / kept

    def owed_for_s(self, worker: WorkerKey, owes: bool, last_s: float, now_s: float) -> float:
        """Seconds for which a worker has owed a first token; 0 if it owes none, or if too few came
        from all workers since then (`may_judge`).

        owes: whether enough requests wait there. last_s: when the worker's last first token came.
        """
        if not owes:
            self._owed.pop(worker, None)
            return 0.0
        since_s, count = self._owed.get(worker, (now_s, self._count))
        if last_s > since_s:
            since_s, count = last_s, self._count
        self._owed[worker] = since_s, count
        return now_s - since_s if self.may_judge(self._count - count) else 0.0

    def may_judge(self, since: int = LEARNED_MIN) -> bool:
        """Whether callers report enough first tokens to call a worker late: LEARNED_MIN in all, and
        3 of any worker while this one owes its own (`since`).
        """
        return self._count >= LEARNED_MIN and since >= 3

    def forget(self, worker: WorkerKey) -> None:
        """Forgets since when a worker owes a first token."""
        self._owed.pop(worker, None)
