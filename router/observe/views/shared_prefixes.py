"""Prefixes that many of the last sampled prompts share, as a tree with their holders. Pure.

    prompt 1  ████████████▓▓▓▓▓▓▓▓
    prompt 2  ████████████▒▒▒▒▒▒     -> node of 12 blocks, shared by 3 of 4; below it ▓ and ▒
    prompt 3  ████████████▒▒▒
    prompt 4  ░░░░░░

A node is a run of blocks that the same prompts have; it ends at the first block that differs.

Laws:
- PROMPTS_MAX prompts are kept, of BLOCKS_MAX blocks each;
- a node is shared by SHARED_MIN prompts at least, and a tree has NODES_MAX nodes at most.
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.hashing import HashArray
from indexer.identity import WorkerKey
from indexer.index import BlockIndex
from router.decide.core.core import RouterCore
from router.decide.decision.decision import Decision
from router.fleet.pools import heartbeat_of

PROMPTS_MAX = 256
BLOCKS_MAX = 1024
SHARED_MIN = 2
NODES_MAX = 40
HOLDERS_MAX = 12
"""Most holders that a node names; Node.holders_left_out counts the others."""
DEPTH_MAX = 6


class Holder(msgspec.Struct, frozen=True):
    """A worker that holds a node's prefix."""

    worker_id: str
    dp_rank: int
    share: float
    """Share of the prefix that the worker holds, from its beginning: above 0, at most 1."""


class Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prefix that prompts share."""

    id: str
    """16 hexadecimal digits of its last block's PrefixHash."""
    tokens: int
    """Tokens from the prompt's beginning to this node's end."""
    prompts: int
    model: str = ""
    holders: list[Holder] = []
    holders_left_out: int = 0
    children: list["Node"] = []


class Tree(msgspec.Struct, frozen=True):
    """The shared prefixes of the last sampled prompts."""

    prompts: int
    """Sampled prompts that the tree is made of."""
    roots: list[Node]


class _Sampled(NamedTuple):
    model: str
    block_size: int
    chain: HashArray


class SharedPrefixes:
    """The last sampled prompts, as PrefixHashes."""

    def __init__(self) -> None:
        self._prompts: deque[_Sampled] = deque(maxlen=PROMPTS_MAX)

    def __len__(self) -> int:
        return len(self._prompts)

    def watch(self, decision: Decision) -> None:
        """Keeps the prompt of a sampled decision, before anything of the decision is reserved."""
        if not decision.order:
            return
        heartbeat = heartbeat_of(decision.sources[decision.order[0]])
        chain = decision.request.prompt.prefixes(heartbeat.block_size)[:BLOCKS_MAX]
        if len(chain):
            self._prompts.append(_Sampled(heartbeat.model, heartbeat.block_size, chain.copy()))

    def tree(self, core: RouterCore) -> Generator[None, None, Tree]:
        """A generator whose result is the tree of shared prefixes, the most shared first, with
        their present holders. A step makes one node, in about 1 ms with 1,000 workers."""
        budget = [NODES_MAX]
        kinds: dict[tuple[str, int], list[_Sampled]] = {}
        for prompt in self._prompts:
            kinds.setdefault((prompt.model, prompt.block_size), []).append(prompt)
        roots: list[Node] = []
        for (model, block_size), prompts in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
            chains = [prompt.chain for prompt in prompts]
            place = _Place.of(core, model, block_size)
            roots += yield from _nodes(chains, 0, 0, place, budget)
        return Tree(len(self._prompts), roots)


class _Place(NamedTuple):
    """The index and the workers of a model, among which the holders of prefixes are looked up."""

    held: BlockIndex
    model: str
    block_size: int
    workers: list[WorkerKey]
    slots: npt.NDArray[np.intp]

    @classmethod
    def of(cls, core: RouterCore, model: str, block_size: int) -> "_Place":
        view = core.fleet.view
        sources = [
            source
            for source in view.sources.values()
            if source.heartbeat is not None
            and source.heartbeat.model == model
            and source.heartbeat.block_size == block_size
        ]
        slots = np.array([source.slot for source in sources], np.intp)
        return cls(view.index, model, block_size, [source.key for source in sources], slots)


def _nodes(
    chains: Sequence[HashArray], begin: int, depth: int, place: _Place, budget: list[int]
) -> Generator[None, None, list[Node]]:
    """A generator that makes the nodes of chains whose first `begin` blocks are the same. budget:
    list of one number, the nodes that may still be made."""
    groups: dict[int, list[HashArray]] = {}
    for chain in chains:
        if len(chain) > begin:
            groups.setdefault(int(chain[begin]), []).append(chain)
    shared = [group for group in groups.values() if len(group) >= SHARED_MIN]
    shared.sort(key=len, reverse=True)
    nodes = []
    for group in shared:
        if budget[0] <= 0:
            break
        budget[0] -= 1
        end = _parting(group, begin)
        below: list[Node] = []
        if depth + 1 < DEPTH_MAX:
            below = yield from _nodes(group, end, depth + 1, place, budget)
        yield
        nodes.append(_node(group, end, below, place))
    return nodes


def _parting(group: Sequence[HashArray], begin: int) -> int:
    """Number of blocks, from the beginning, that all chains of a group share; more than `begin`."""
    shortest = min(map(len, group))
    first = group[0][:shortest]
    shared = shortest
    for chain in group[1:]:
        same = first[begin:shared] == chain[begin:shared]
        if not same.all():
            shared = begin + int(np.argmin(same))
    return shared


def _node(group: Sequence[HashArray], end: int, below: list[Node], place: _Place) -> Node:
    holders = _holders(group[0][:end], place)
    return Node(
        f"{int(group[0][end - 1]):016x}",
        end * place.block_size,
        len(group),
        place.model,
        holders[:HOLDERS_MAX],
        max(0, len(holders) - HOLDERS_MAX),
        below,
    )


def _holders(chain: HashArray, place: _Place) -> list[Holder]:
    """Workers of the model that hold a prefix, or its beginning; those that hold most first."""
    if not place.workers:
        return []
    held = place.held.overlap(chain, len(chain), place.slots)[0].tolist()
    holders = [
        Holder(key.worker_id, key.dp_rank, blocks / len(chain))
        for key, blocks in zip(place.workers, held, strict=True)
        if blocks
    ]
    holders.sort(key=lambda holder: (-holder.share, holder.worker_id, holder.dp_rank))
    return holders
