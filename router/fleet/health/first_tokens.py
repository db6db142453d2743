"""How long first tokens take, and the workers from which none come. Pure: no clock, no I/O.

A worker waits while requests of ours there have no first token, since the last one that came. What
is long is learned from all workers: callers that report nothing before the end of an answer teach
the time of whole answers, and those that report nothing at all make nobody overdue.
"""

from indexer.identity import WorkerKey

LEARNED_MIN = 10
"""First tokens from which on the mean says something."""
_KEPT = 16
"""The mean is over about so many of the last ones."""


class FirstTokens:
    """Times to the first token of all workers, and since when each worker has owed one."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """Mean seconds from the pick to the first token."""
        self._count = 0
        self._owed: dict[WorkerKey, tuple[float, int]] = {}
        """Time since which a worker owes a first token, and how many of all workers came before."""

    def on_first(self, after_s: float) -> None:
        """Records the first token of a request, after_s seconds after its pick."""
        count = self._count = self._count + 1
        kept = count if count < _KEPT else _KEPT  # noqa: FURB136  # half a call, for each request
        self.mean_s += (after_s - self.mean_s) / kept

    def owed_for_s(self, worker: WorkerKey, owes: bool, last_s: float, now_s: float) -> float:
        """Seconds that a worker owes a first token, while others gave as many as it takes to tell.

        owes: whether enough requests wait there. last_s: when its last first token came.
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
        """Whether callers report first tokens at all. since: number of first tokens that came while
        one was owed.
        """
        return self._count >= LEARNED_MIN and since >= 3

    def forget(self, worker: WorkerKey) -> None:
        """Forgets what a worker owed, since no request waits there for a first token."""
        self._owed.pop(worker, None)
