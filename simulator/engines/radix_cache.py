"""A KV cache kept as a tree of page runs, as SGLang keeps it. Pure: no clock, no sockets.

A page holds `page_size` tokens. The tree has the cached pages. A node is a run of pages, named by
their chained hashes, and a path from the root is a prefix. Requests lock the path that they read
and compute into private pages, which join the tree when they are *inserted*. Pages are counted and
have no numbers here:

    free + evictable + protected + private = total

*free*: without content. *evictable*: in unlocked nodes of the tree. *protected*: in locked nodes of
the tree. *private*: a request's pages, taken with `take` and not yet inserted.

Details of the engine that a naive model misses:
- whole nodes are evicted, the longest unused leaf first, so more pages may go than needed;
- a lookup counts as a use, and splits the node in which it ends; a split causes no event;
- a page that two requests compute at once is stored once: the second copy is freed.

Since names are chained, two runs that agree at a place agree at all places before it. So a node is
compared by its last page alone, and a bisection yields the place where two runs part.

Source: sgl-project/sglang python/sglang/srt/mem_cache/radix_cache.py, releases 0.5.7 and 0.5.23.
Checked against a recording of 0.5.23 in tests/simulator/schedulers/test_sglang_recording.py.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from typing_extensions import override

from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.scheduler import Content


class RadixNode:
    """A node of the tree: a run of pages, which follow the pages of its parent.

    Law: lock_count of a node >= that of each of its children, since a lock covers the whole path.
    """

    __slots__ = ("children", "hashes", "last_use", "lock_count", "offered", "parent")

    def __init__(self, hashes: list[int], parent: "RadixNode | None", last_use: int) -> None:
        self.hashes = hashes
        self.parent = parent
        self.children: dict[int, RadixNode] = {}
        """first page of a child -> the child"""
        self.lock_count = 0
        self.last_use = last_use
        self.offered = False
        """Whether the eviction queue has an entry for the node."""

    @override
    def __repr__(self) -> str:
        return f"<RadixNode {len(self.hashes)} pages, {self.lock_count} locks>"


class RadixCache:
    """A fixed number of pages, looked up by prefix, evicted leaf by leaf, longest unused first."""

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self.free = page_count
        self.evictable = 0
        self.protected = 0
        self.root = RadixNode([], None, 0)
        """The root, which has no pages and is never locked, split or evicted."""
        self._uses = 0
        """Lookups, insertions and new nodes so far: the clock of last uses."""
        self._queue: list[tuple[int, int, RadixNode]] = []
        """(last use when offered, serial number, node): a heap with at most one entry per node.

        An entry may be outdated: its node was used, locked or extended meanwhile. This is checked
        when the entry comes up.
        """
        self._serial = count()
        self._events: list[PoolEvent] = []

    @override
    def __repr__(self) -> str:
        return (
            f"<RadixCache {self.free} free, {self.evictable} evictable, {self.protected} protected "
            f"of {self.page_count} pages>"
        )

    @property
    def available(self) -> int:
        """Pages that can be taken: free and evictable pages."""
        return self.free + self.evictable

    @property
    def private(self) -> int:
        return self.page_count - self.free - self.evictable - self.protected

    def nodes(self) -> Iterator[RadixNode]:
        """Yields all nodes but the root, parents before children. For checks."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def contents(self) -> Iterator[int]:
        """The names of all pages in the tree. For checks."""
        for node in self.nodes():
            yield from node.hashes

    def find(self, hashes: Sequence[int], page_count: int) -> int:
        """How many of the first `page_count` pages are cached. Changes nothing, not even last
        uses."""
        return sum(shared for _, shared in self._path(hashes, page_count))

    def match(self, hashes: Sequence[int], page_count: int) -> tuple[RadixNode, int]:
        """The node in which the longest cached prefix ends, and the prefix's number of pages.

        At most the first `page_count` pages. Counts as a use; splits the last node if necessary.
        """
        self._uses += 1
        return self._walk(hashes, page_count)

    def insert(self, content: Content, page_count: int) -> tuple[RadixNode, int]:
        """Puts the first `page_count` pages of a sequence into the tree, unlocked.

        Returns the node in which they end, and how many pages were in the tree before; the pages
        after these are private pages that the tree takes over.
        """
        hashes = content.hashes(page_count)
        self._uses += 1
        node, known = self._walk(hashes, page_count)
        if known < page_count:
            self._uses += 1  # new nodes are younger than nodes that the same call only passed
            leaf = RadixNode(hashes[known:page_count], node, self._uses)
            node.children[hashes[known]] = leaf
            node = leaf
            self.evictable += page_count - known
            self._offer(leaf)
            self._add_stored(content.stored(known, page_count))
        return node, known

    def lock(self, node: RadixNode) -> None:
        """Keeps a node and its path from being evicted."""
        while node.parent is not None:
            if not node.lock_count:
                self.evictable -= len(node.hashes)
                self.protected += len(node.hashes)
            node.lock_count += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """Takes one lock of a node and its path back. Raises ValueError without a lock."""
        if node.parent is not None and not node.lock_count:
            raise ValueError(f"{node!r} is not locked")
        leaf = node
        while node.parent is not None:
            node.lock_count -= 1
            if not node.lock_count:
                self.evictable += len(node.hashes)
                self.protected -= len(node.hashes)
            node = node.parent
        if leaf.parent is not None and not leaf.lock_count and not leaf.children:
            self._offer(leaf)

    def make_room(self, page_count: int) -> bool:
        """Evicts until `page_count` pages are free; False when too few pages were evictable."""
        queue = self._queue
        removed: list[int] = []
        while self.free < page_count and queue:
            due, _, node = heappop(queue)
            node.offered = False
            if node.children or node.lock_count:
                continue
            if node.last_use != due:
                self._offer(node)
                continue
            parent = node.parent
            if parent is None:
                raise RuntimeError("the root came up for eviction")
            del parent.children[node.hashes[0]]
            self.free += len(node.hashes)
            self.evictable -= len(node.hashes)
            removed += node.hashes
            if parent.parent is not None and not parent.children and not parent.lock_count:
                self._offer(parent)
        if removed:
            self._add_removed(tuple(removed))
        return self.free >= page_count

    def take(self, page_count: int) -> None:
        """Makes free pages private. Raises ValueError when there are too few: see `make_room`."""
        if page_count > self.free:
            raise ValueError(f"{page_count} pages wanted, but {self.free} are free: {self!r}")
        self.free -= page_count

    def give_back(self, page_count: int) -> None:
        """Makes private pages free. Raises ValueError when there are fewer."""
        if not 0 <= page_count <= self.private:
            raise ValueError(f"{page_count} pages given back of {self.private} private ones")
        self.free += page_count

    def reset(self) -> bool:
        """Forgets all content; False, and nothing changed, while requests hold pages."""
        if self.protected or self.private:
            return False
        self.root.children.clear()
        self._queue.clear()
        self.free, self.evictable = self.page_count, 0
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[PoolEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _path(self, hashes: Sequence[int], page_count: int) -> Iterator[tuple[RadixNode, int]]:
        """The nodes of the longest cached prefix, each with how many of its pages are shared."""
        node, depth = self.root, 0
        while depth < page_count:
            child = node.children.get(hashes[depth])
            if child is None:
                return
            shared = _shared(child.hashes, hashes, depth, page_count)
            yield child, shared
            if shared < len(child.hashes):
                return
            node, depth = child, depth + shared

    def _walk(self, hashes: Sequence[int], page_count: int) -> tuple[RadixNode, int]:
        node, depth = self.root, 0
        for node, shared in self._path(hashes, page_count):
            node.last_use = self._uses
            depth += shared
            if shared < len(node.hashes):
                return self._split(node, shared), depth
        return node, depth

    def _split(self, node: RadixNode, head_count: int) -> RadixNode:
        """Moves a node's first pages to a new parent node; returns the new node."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root can't be split")
        self._uses += 1
        head = RadixNode(node.hashes[:head_count], parent, self._uses)
        head.lock_count = node.lock_count
        head.children[node.hashes[head_count]] = node
        parent.children[head.hashes[0]] = head
        node.parent = head
        node.hashes = node.hashes[head_count:]
        return head

    def _offer(self, node: RadixNode) -> None:
        """Puts an unlocked leaf into the eviction queue."""
        if not node.offered:
            node.offered = True
            heappush(self._queue, (node.last_use, next(self._serial), node))

    def _add_removed(self, hashes: tuple[int, ...]) -> None:
        """Adds an event of evicted pages; consecutive removals become one event."""
        before = self._events[-1] if self._events else None
        if isinstance(before, Removed):
            self._events[-1] = Removed(before.hashes + hashes)
        else:
            self._events.append(Removed(hashes))

    def _add_stored(self, stored: Stored) -> None:
        """Adds an event of stored pages, or extends the last event if that stored their parent."""
        before = self._events[-1] if self._events else None
        if (
            isinstance(before, Stored)
            and stored.parent == before.hashes[-1]
            and stored.session_id == before.session_id
        ):
            self._events[-1] = Stored(
                before.hashes + stored.hashes,
                before.parent,
                before.token_ids + stored.token_ids,
                before.extra_keys + stored.extra_keys,
                before.lora_name,
                before.lora_id,
                before.session_id,
            )
        else:
            self._events.append(stored)


def _shared(run: list[int], hashes: Sequence[int], first: int, last: int) -> int:
    """How many leading pages of `run` equal those of hashes[first:last]; the first page must."""
    most = min(len(run), last - first)
    if run[most - 1] == hashes[first + most - 1]:
        return most
    low, high = 1, most - 1  # run[low - 1] is shared, run[high] is not
    while low < high:
        middle = (low + high) // 2
        if run[middle] == hashes[first + middle]:
            low = middle + 1
        else:
            high = middle
    return low
