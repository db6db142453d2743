"""The order of dfs-weight: a compressed trie of waiting prompts, heavy branches first. Pure.

A node is a run of blocks that the same requests have; its weight is the number of requests whose
prompts pass through it or end in it. Children go before the node's own requests, the heaviest one
first, of equal ones the one with the first arrival.

    prompts, as runs of blocks: A-C four times, A-D twice, B-E-F twice, B-E-G twice
    order, by their last runs:  C C C C D D F F G G
"""

from collections.abc import Sequence

from indexer.hashing import HashArray
from router.decide.waiter import Waiter


class _Node:
    __slots__ = ("chain", "children", "end", "first", "own", "weight")

    def __init__(self, chain: HashArray | None, end: int) -> None:
        self.chain = chain
        """PrefixHashes of some request whose prompt passes through this node."""
        self.end = end
        """Depth in blocks at which the node's run ends."""
        self.children: dict[int, _Node] = {}
        """Nodes behind this one, by the PrefixHash of their first block."""
        self.own: list[int] = []
        """Numbers of the requests whose prompts end here."""
        self.weight = 0
        self.first = 0
        """Lowest number of the requests whose prompts pass through this node."""


def depth_first(waiters: Sequence[Waiter]) -> list[int]:
    """Indices of the requests in the order of dfs-weight; `waiters` are in the order of arrival."""
    root = _Node(None, 0)
    for number, waiter in enumerate(waiters):
        _insert(root, number, waiter.prefixes)
    order: list[int] = []
    stack: list[_Node | list[int]] = [root]
    while stack:
        match stack.pop():
            case _Node() as node:
                stack.append(node.own)
                children = list(node.children.values())
                children.sort(key=_weight)
                stack.extend(children)
            case own:
                order.extend(own)
    return order


def _weight(node: _Node) -> tuple[int, int]:
    return node.weight, -node.first


def _insert(root: _Node, number: int, chain: HashArray | None) -> None:
    node = root
    length = 0 if chain is None else len(chain)
    while True:
        node.weight += 1
        if chain is None or node.end == length:
            node.own.append(number)
            return
        start = int(chain[node.end])
        child = node.children.get(start)
        if child is None:
            child = node.children[start] = _Node(chain, length)
            child.first = number
        else:
            shared = _shared(child, chain, node.end, length)
            if shared < child.end:
                child = _split(node, start, child, shared)
        node = child


def _shared(child: _Node, chain: HashArray, start: int, length: int) -> int:
    """Depth in blocks up to which a prompt and a child's run are the same. A binary search: equal
    PrefixHashes mean that all blocks before them are equal, too. start: depth of the child's first
    block. length: blocks of the prompt."""
    other = child.chain
    assert other is not None
    low, high = start + 1, min(child.end, length)
    if other[high - 1] == chain[high - 1]:
        return high
    while high - low > 1:  # the first `low` blocks are shared, the first `high` are not
        middle = (low + high) // 2
        if other[middle - 1] == chain[middle - 1]:
            low = middle
        else:
            high = middle
    return low


def _split(parent: _Node, start: int, child: _Node, depth: int) -> _Node:
    """Puts a new node between a parent and its child, for the blocks up to a depth; returns it."""
    chain = child.chain
    assert chain is not None
    upper = parent.children[start] = _Node(chain, depth)
    upper.weight, upper.first = child.weight, child.first
    upper.children[int(chain[depth])] = child
    return upper
