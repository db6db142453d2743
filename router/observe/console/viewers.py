"""The browsers that view the console, each with a bounded queue. Does no I/O.

Law: a viewer whose queue is full is dropped and counted; no other viewer, and no round, waits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

WAITING_MAX = 8
"""Most messages that a viewer has not taken yet; one more drops the viewer."""
ENDS = ("left", "slow", "signed_out", "stopped")
"""Why viewers ended; metric labels."""
VIEWERS_MAX = 64
"""Pages that watch at once: ten take 1 % of a core (docs/console.md#cost)."""


class Viewer:
    """The messages for one browser."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_MAX)
        self.end = ""
        """Why the viewer ended, one of ENDS; empty: it has not."""
        self.has_all = False
        """Whether the viewer got the message `whole` of a round, to which ticks add changes."""

    async def next(self) -> bytes | None:
        """Waits for the next message; None: the viewer has ended."""
        return None if self.end else await self._queue.get()

    def put(self, message: bytes) -> bool:
        """Queues a message; returns whether there was room for it."""
        if self._queue.full():
            return False
        self._queue.put_nowait(message)
        return True

    def stop(self, end: str) -> None:
        """Ends the viewer, and drops waiting messages."""
        self.end = self.end or end
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)


class Viewers:
    """All viewers of a router's console."""

    def __init__(self, most: int = VIEWERS_MAX) -> None:
        self.most = most
        self.ended: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self.refused = 0
        """Browsers that came when there were `most` viewers."""
        self._viewers: dict[Viewer, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self, cut: Callable[[], None]) -> Viewer | None:
        """Adds a viewer; None: there are too many. cut: closes its connection at once."""
        if len(self._viewers) >= self.most:
            self.refused += 1
            return None
        viewer = Viewer()
        self._viewers[viewer] = cut
        return viewer

    def leave(self, viewer: Viewer, end: str = "left") -> None:
        """Removes a viewer; no effect on one that has ended before."""
        if self._viewers.pop(viewer, None) is None:
            return
        viewer.stop(end)
        self.ended[viewer.end] += 1

    def publish(self, tick: bytes, whole: Callable[[], bytes]) -> None:
        """Queues a round for all viewers: its tick, or `whole` for a viewer that has
        nothing yet.
        """
        for viewer, cut in list(self._viewers.items()):
            message = tick if viewer.has_all else whole()
            viewer.has_all = True
            if not viewer.put(message):
                self.leave(viewer, "slow")
                cut()

    def stop(self) -> None:
        """Ends all viewers, and takes no further ones."""
        self.most = 0
        for viewer in list(self._viewers):
            self.leave(viewer, "stopped")
