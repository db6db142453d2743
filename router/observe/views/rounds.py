"""Messages to viewers of the console: everything once, then the changes of each second. Pure.

    round 1   all ─────────────────> whole(): a viewer that comes after round 1
    round 2   tick: what changed ──> viewers that had the whole of round 1, or its tick

Laws:
- `whole` of a round and the ticks after it show the same as `whole` of the last round;
- a message is encoded once, however many viewers get it;
- at most SLICE_TILES tiles are written before other calls have their turn.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass

import msgspec

from indexer.identity import WorkerKey
from router.observe.views.decisions import Decisions
from router.observe.views.history import History
from router.observe.views.news import News
from router.observe.views.shared_prefixes import SharedPrefixes, Tree
from router.observe.views.summary import Subject, Summary, summary_of
from router.observe.views.tiles import tile_of

SLICE_TILES = 16
"""Most tiles that are written before other calls have their turn: about 1 ms."""
TREE_S = 5.0
"""Seconds between two trees of prefixes."""


@dataclass(eq=False)
class Rounds:
    """Makes the rounds of the console's messages; keeps what the last round has shown."""

    subject: Subject
    history: History
    decisions: Decisions
    prefixes: SharedPrefixes
    news: News
    number: int = 0
    tiles_written: int = 0

    def __post_init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode
        self.forget()

    @property
    def is_fresh(self) -> bool:
        """Whether there is a round to which the next tick adds its changes."""
        return self._summary is not None

    def forget(self) -> None:
        """Drops the tiles and other state that is only needed while there are viewers."""
        self._tiles: dict[WorkerKey, bytes] = {}
        self._summary: Summary | None = None
        self._tree = Tree(0, [])
        self._tree_at_s = 0.0
        self._whole = b""
        self._at_s = 0.0
        self._point_s = 0.0
        self._decision = self.decisions.count
        self._change = self.news.count

    def write(self, now_s: float) -> Generator[None, None, bytes]:
        """Makes a round. A generator that yields between steps; its result is the tick: the changes
        since the round before, as bytes of a server-sent event."""
        sources = self.subject.core.fleet.view.sources
        before, tiles = self._tiles, {}
        for count, key in enumerate(sorted(sources), 1):
            if count % SLICE_TILES == 0:
                yield
            if (source := sources.get(key)) is not None:  # it may go between two slices
                tiles[key] = self._encode(tile_of(source, self.subject.core, now_s))
        self.tiles_written += len(tiles)
        yield
        tree = None
        if now_s - self._tree_at_s >= TREE_S:
            tree = yield from self.prefixes.tree(self.subject.core)
        # No yield from here on: what comes in between would be in no tick.
        summary = summary_of(self.subject, self.decisions, now_s)
        fields = {
            "at_s": self._encode(now_s),
            "workers": _listed(tile for key, tile in tiles.items() if before.get(key) != tile),
            "gone": self._encode([key for key in before if key not in tiles]),
            "summary": self._encode(summary),
            "points": self._encode([p for p in self.history.points if p.at_s > self._point_s]),
            "decisions": self._encode(self.decisions.since(self._decision)),
            "news": self._encode(self.news.since(self._change)),
        }
        if tree is not None:
            fields["prefixes"] = self._encode(tree)
            self._tree, self._tree_at_s = tree, now_s
        # From here on nothing fails: the next tick adds to this one, which viewers have got.
        self.number += 1
        self._tiles, self._summary, self._whole, self._at_s = tiles, summary, b"", now_s
        self._point_s = self.history.points[-1].at_s if self.history.points else 0.0
        self._decision, self._change = self.decisions.count, self.news.count
        return _event("tick", fields)

    def whole(self) -> bytes:
        """Everything as of the last round, as one message; there must have been a round."""
        if not self._whole:
            decisions = [d for d in self.decisions.kept if d.number <= self._decision]
            self._whole = _event(
                "whole",
                {
                    "about": self._encode(self.subject.about),
                    "at_s": self._encode(self._at_s),
                    "workers": _listed(self._tiles.values()),
                    "summary": self._encode(self._summary),
                    "points": self._encode(
                        [p for p in self.history.points if p.at_s <= self._point_s]
                    ),
                    "decisions": self._encode(decisions),
                    "news": self._encode(
                        [each for each in self.news.kept if each.number <= self._change]
                    ),
                    "prefixes": self._encode(self._tree),
                },
            )
        return self._whole


def _listed(items: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _event(name: str, fields: dict[str, bytes]) -> bytes:
    """A server-sent event of fields that are encoded as JSON, which has no line breaks."""
    members = b",".join(b'"%b":%b' % (key.encode(), value) for key, value in fields.items())
    return b"event: %b\ndata: {%b}\n\n" % (name.encode(), members)
