"""The browsers that watch: a bounded queue each. Imports asyncio for its queues; does no I/O.

Law: a viewer whose queue is full is dropped and counted; no other viewer, and no round, waits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

WAITING_MAX = 8
"""Messages that a viewer has not taken yet."""
ENDS = ("left", "slow", "signed_out", "stopped")
"""Why viewers ended; metric labels."""
VIEWERS_MAX = 64
"""Pages that watch at once: ten take 1 % of a core (docs/console.md#cost)."""


class Viewer:
    """One browser's messages."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_MAX)
        self.end = ""
        """Why it ended: see ENDS; empty: it has not."""
        self.has_all = False
        """Whether it got the whole of a round, so that ticks go on from there."""

    async def next(self) -> bytes | None:
        """The next message; None: the viewer has ended."""
        return None if self.end else await self._queue.get()

    def put(self, message: bytes) -> bool:
        """Whether there was room for a message."""
        if self._queue.full():
            return False
        self._queue.put_nowait(message)
        return True

    def stop(self, end: str) -> None:
        """No message comes any more, and those that wait are dropped."""
        self.end = self.end or end
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)


class Viewers:
    """All viewers of a router."""

    def __init__(self, most: int = VIEWERS_MAX) -> None:
        self.most = most
        self.ended: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self.refused = 0
        """Browsers that came when there were `most` viewers."""
        self._viewers: dict[Viewer, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self, cut: Callable[[], None]) -> Viewer | None:
        """A new viewer; None: there are too many. cut: ends its connection at once, whatever is
        under way there."""
        if len(self._viewers) >= self.most:
            self.refused += 1
            return None
        viewer = Viewer()
        self._viewers[viewer] = cut
        return viewer

    def leave(self, viewer: Viewer, end: str = "left") -> None:
        """A viewer's end; no effect on a viewer that has ended before."""
        if self._viewers.pop(viewer, None) is None:
            return
        viewer.stop(end)
        self.ended[viewer.end] += 1

    def publish(self, tick: bytes, whole: Callable[[], bytes]) -> None:
        """A round for all: its tick, or the whole of it for a viewer that has nothing yet."""
        for viewer, cut in list(self._viewers.items()):
            message = tick if viewer.has_all else whole()
            viewer.has_all = True
            if not viewer.put(message):
                self.leave(viewer, "slow")
                cut()

    def stop(self) -> None:
        """Ends all of them; none comes any more."""
        self.most = 0
        for viewer in list(self._viewers):
            self.leave(viewer, "stopped")
