"""Changes of the workers' standing, as they are noticed once a second. Pure: no clock.

Law: NEWS_MAX changes are kept, and a look at a fleet where nothing changed keeps none.
"""

from collections import deque
from collections.abc import Mapping

import msgspec

from indexer.identity import WorkerKey

NEWS_MAX = 200
REASON_MAX = 200
GONE, NEW = "gone", "new"


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's standing became another one."""

    number: int
    """Ascends by one."""
    at_s: float
    worker_id: str
    dp_rank: int
    was: str
    now: str
    why: str = ""


class News:
    """The last changes."""

    def __init__(self) -> None:
        self.kept: deque[Change] = deque(maxlen=NEWS_MAX)
        self.count = 0
        """Changes since the start."""
        self._standings: dict[WorkerKey, str] | None = None

    def look(self, standings: Mapping[WorkerKey, tuple[str, str]], now_s: float) -> None:
        """standings: of every worker, with its reason. The first look only learns."""
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
        """Changes of higher numbers, oldest first."""
        return [each for each in self.kept if each.number > number]

    def _add(self, now_s: float, key: WorkerKey, was: str, now: str, why: str) -> None:
        self.count += 1
        self.kept.append(
            Change(self.count, now_s, key.worker_id, key.dp_rank, was, now, why[:REASON_MAX])
        )
