"""Changes of workers' states (serving, drained, ejected), compared once a second. Pure: no clock.

Law: the last NEWS_MAX changes are kept; comparing a fleet where no state changed adds none.
"""

from collections import deque
from collections.abc import Mapping

import msgspec

from indexer.identity import WorkerKey

NEWS_MAX = 200
REASON_MAX = 200
GONE, NEW = "gone", "new"


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of a worker's state."""

    number: int
    """Number of the change, from 1 at the router's start."""
    at_s: float
    worker_id: str
    dp_rank: int
    was: str
    now: str
    why: str = ""


class News:
    """The last changes of workers' states."""

    def __init__(self) -> None:
        self.kept: deque[Change] = deque(maxlen=NEWS_MAX)
        self.count = 0
        """Changes since the start."""
        self._standings: dict[WorkerKey, str] | None = None

    def look(self, standings: Mapping[WorkerKey, tuple[str, str]], now_s: float) -> None:
        """Records the changes since the last call. standings: state and reason of every worker. The
        first call records none.
        """
        before = self._standings
        self._standings = {key: now for key, (now, _) in standings.items()}
        if before is None or before == self._standings:
            return
        for key, (now, why) in standings.items():
            was = before.get(key, NEW)
            if was != now:
                self._add(now_s, key, was, now, why)
        for key in before.keys() - standings.keys():
            self._add(now_s, key, before[key], GONE, "")

    def since(self, number: int) -> list[Change]:
        """Changes with a higher number, the oldest first."""
        return [each for each in self.kept if each.number > number]

    def _add(self, now_s: float, key: WorkerKey, was: str, now: str, why: str) -> None:
        self.count += 1
        self.kept.append(
            Change(self.count, now_s, key.worker_id, key.dp_rank, was, now, why[:REASON_MAX])
        )
