"""The items of a stream: those that wait to be written, and those written and not answered. Pure.

Laws:
- an item waits or is sent until it is answered, dropped or given up, once;
- items and cancels together never exceed items_max, the requests held never exceed bytes_max;
- a batch never exceeds BATCH_ITEMS_MAX and BATCH_BYTES_MAX;
- an item is written SENDINGS_MAX times at most.
"""

import asyncio
import math
from collections import OrderedDict
from dataclasses import dataclass

import grpc
from typing_extensions import override

from kvroute.client.errors import ClientOverloaded
from kvroute.client.messages.options import OnQueued, RouteBytes
from kvroute.client.messages.wire import VARINT, head, varint
from kvroute.v1 import RouteBatch, RouteItem, RouteResponse

BATCH_ITEMS_MAX = 4096
"""Items in a batch; the router's bound is the same."""
BATCH_BYTES_MAX = 1_000_000
"""Bytes of requests in a batch; below the least message limit of a router (1 MiB) and of a proxy
(4 MiB). A larger request is a call of its own, whose cost is small beside its size."""
SENDINGS_MAX = 3
"""Times that an item is written before it counts as failed, each on another stream."""
_TIMEOUT_MS_MAX = (1 << 32) - 1
_ITEMS = RouteBatch.ITEMS_FIELD_NUMBER
_REQUEST = RouteItem.REQUEST_FIELD_NUMBER
_INDEX = varint(RouteItem.INDEX_FIELD_NUMBER << 3 | VARINT)
_TIMEOUT_MS = varint(RouteItem.TIMEOUT_MS_FIELD_NUMBER << 3 | VARINT)


@dataclass(slots=True, eq=False)
class Item:
    """One request on a stream, from route() to its answer."""

    index: int
    request: RouteBytes
    timeout_s: float
    deadline_s: float
    answer: asyncio.Future[RouteResponse]
    on_queued: OnQueued | None = None
    """Called with a QueueProgress while the request waits in the router's queue; None: never."""
    sendings: int = 0


class RouteStreamItems:
    """The items of one stream, by index."""

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._waiting_bytes = 0
        self._next_index = 1
        self._waiting: OrderedDict[int, Item] = OrderedDict()
        self._sent: dict[int, Item] = {}
        self._cancels: list[int] = []
        """Indexes of sent items without a caller, for which the router has yet to get a cancel."""

    @override
    def __repr__(self) -> str:
        return f"<RouteStreamItems {len(self._waiting)} waiting, {len(self._sent)} sent>"

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def to_write(self) -> bool:
        """Whether there is anything to write: waiting items or cancels."""
        return bool(self._waiting or self._cancels)

    @property
    def full_batch(self) -> bool:
        """Whether the waiting items reach the bound of a batch, in items or bytes."""
        return self._waiting_bytes >= BATCH_BYTES_MAX or len(self._waiting) >= BATCH_ITEMS_MAX

    @property
    def sent_count(self) -> int:
        """Number of items that are written and not answered."""
        return len(self._sent)

    def add(
        self,
        request: RouteBytes,
        timeout_s: float,
        now_s: float,
        answer: asyncio.Future[RouteResponse],
        on_queued: OnQueued | None = None,
    ) -> Item:
        """Adds a request to the next batch; raises ClientOverloaded at the bounds."""
        size = request.size
        if len(self) + len(self._cancels) >= self._items_max:
            raise _full(f"{self._items_max} requests are unanswered")
        if self._bytes + size > self._bytes_max and self._bytes:
            raise _full(f"{self._bytes} bytes of requests are unanswered")
        item = Item(self._next_index, request, timeout_s, now_s + timeout_s, answer, on_queued)
        self._next_index += 1
        self._bytes += size
        self._waiting_bytes += size
        self._waiting[item.index] = item
        return item

    def batch(self, now_s: float) -> tuple[bytes, list[int]]:
        """The next RouteBatch, as bytes, and its indexes: cancels, then waiting items, the oldest
        first."""
        indexes = self._cancels[:BATCH_ITEMS_MAX]
        del self._cancels[:BATCH_ITEMS_MAX]
        pieces = [
            RouteBatch(items=[RouteItem(index=index, cancel=True)]).SerializeToString()
            for index in indexes
        ]
        size = 0
        while self._waiting:
            item = next(iter(self._waiting.values()))
            size += item.request.size
            if len(indexes) >= BATCH_ITEMS_MAX or (indexes and size > BATCH_BYTES_MAX):
                break
            _write(pieces, item, now_s)
            indexes.append(item.index)
            item.sendings += 1
            self._waiting_bytes -= item.request.size
            del self._waiting[item.index]
            self._sent[item.index] = item
        return b"".join(pieces), indexes

    def expired(self, now_s: float) -> tuple[list[Item], float]:
        """Items past their deadline, and the next deadline; inf: there is none."""
        over: list[Item] = []
        next_s = math.inf
        for item in (*self._sent.values(), *self._waiting.values()):
            if item.deadline_s <= now_s:
                over.append(item)
            else:
                next_s = min(next_s, item.deadline_s)
        return over, next_s

    def sent(self, index: int) -> Item | None:
        """The sent item with an index; None when it has no caller any longer."""
        return self._sent.get(index)

    def answered(self, item: Item) -> None:
        """Removes a sent item, which is answered."""
        del self._sent[item.index]
        self._bytes -= item.request.size

    def cancel(self, index: int) -> None:
        """Adds a cancel of a sent item, so that the router ends the item's reservation."""
        self._cancels.append(index)

    def drop(self, item: Item) -> bool:
        """Removes an item without a caller; returns whether it was here."""
        if self._waiting.pop(item.index, None) is not None:
            self._waiting_bytes -= item.request.size
        elif self._sent.pop(item.index, None) is not None:
            self._cancels.append(item.index)
        else:
            return False
        self._bytes -= item.request.size
        return True

    def drop_all(self) -> list[Item]:
        """Removes all unanswered items, with cancels for sent ones; returns the items."""
        items = [*self._sent.values(), *self._waiting.values()]
        for item in items:
            self.drop(item)
        return items

    def put_back(self) -> list[Item]:
        """Makes sent items wait again, before the others, since the stream has ended. Removes and
        returns items that were written SENDINGS_MAX times."""
        self._cancels.clear()
        given_up = [item for item in self._sent.values() if item.sendings >= SENDINGS_MAX]
        for item in given_up:
            self.answered(item)
        self._waiting_bytes = self._bytes
        self._waiting = OrderedDict([*self._sent.items(), *self._waiting.items()])
        self._sent = {}
        return given_up

    def clear(self) -> list[Item]:
        """Removes all items and cancels; returns the items."""
        self._cancels.clear()
        given_up = [*self._sent.values(), *self._waiting.values()]
        self._sent, self._waiting = {}, OrderedDict()
        self._bytes = self._waiting_bytes = 0
        return given_up


def _write(pieces: list[bytes], item: Item, now_s: float) -> None:
    """Appends an item to the pieces of a RouteBatch, with the pieces of its request uncopied."""
    left_ms = math.ceil((item.deadline_s - now_s) * 1000)
    if not 0 < left_ms <= _TIMEOUT_MS_MAX:
        left_ms = 1 if left_ms < 1 else _TIMEOUT_MS_MAX
    request = item.request
    before = (
        _INDEX + varint(item.index) + _TIMEOUT_MS + varint(left_ms) + head(_REQUEST, request.size)
    )
    pieces += (head(_ITEMS, len(before) + request.size) + before, *request.pieces)


def _full(message: str) -> ClientOverloaded:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return ClientOverloaded(code, None, f"{message}, the most this client keeps for one router")
