"""How much of a trace's prompts one cache for all workers could reuse. Pure.

The ceiling of every hit rate is that of a single infinite cache that has a prompt as soon as the
prompt has arrived. The cache serves the leading blocks of a prompt that were seen before, at most
(prompt_tokens - 1) // block_size of them, since an engine computes at least one token. A fleet's
hits are measured in the same unit.

Law: no fleet that serves a trace's requests in this order has a higher hit rate.

The pooled ceiling is that of one cache as large as those of the whole fleet together, which evicts
the least recently used blocks first, of a prompt its end first; answers take no room. It is a
yardstick and no bound: N caches can happen to evict more wisely than one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from indexer.hashing import prefix_hashes
from simulator.traffic.results import Integers
from simulator.traffic.trace import HashIds, TraceRequest, check_block_size


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best possible hit rates, 0 to 1."""

    blocks: float
    """Reusable / full prompt blocks."""
    tokens: float
    """Tokens of the reusable blocks / all prompt tokens."""


def reuse_ceiling(requests: Sequence[TraceRequest], block_size: int) -> Ceiling:
    """The ceiling of requests that come in this order; 0 without requests. Raises ValueError for a
    block size that the trace's ids can't be expanded to."""
    tokens = np.array([request.prompt_tokens for request in requests], np.int64)
    return ceiling_of(tokens, reusable_blocks(requests, block_size), block_size)


def ceiling_of(prompt_tokens: Integers, reusable: Integers, block_size: int) -> Ceiling:
    """The ceiling of prompts from their tokens and their reusable blocks; both of shape
    (requests,)."""
    hits, blocks = int(reusable.sum()), int((prompt_tokens // block_size).sum())
    return Ceiling(
        blocks=hits / blocks if blocks else 0.0,
        tokens=hits * block_size / int(prompt_tokens.sum()) if blocks else 0.0,
    )


def reusable_blocks(
    requests: Sequence[TraceRequest], block_size: int, cache_blocks: float = inf
) -> Integers:
    """Usable leading blocks of each prompt in one cache of `cache_blocks` blocks; shape
    (requests,).

    A prompt is looked at in pieces: the text of one id of the trace, or of one block if a block has
    several ids. A piece's blocks in the cache are those of the longest earlier prompt with the same
    chain of ids, which is exact for an infinite cache. A finite cache evicts a piece as a whole.
    Raises ValueError as `reuse_ceiling` does.
    """
    for id_tokens in {request.id_tokens for request in requests}:
        check_block_size(block_size, id_tokens)
    cache: OrderedDict[int, int] = OrderedDict()
    """Chain of a piece -> its blocks; least recently used first."""
    hits = np.zeros(len(requests), np.int64)
    held = 0
    for number, request in enumerate(requests):
        size = max(request.id_tokens, block_size)
        chains = prefix_hashes(_pieces(request, block_size)).tolist()
        blocks = [
            min(size, request.prompt_tokens - place * size) // block_size
            for place in range(len(chains))
        ]
        for chain, wanted in zip(chains, blocks, strict=True):
            present = min(cache.get(chain, 0), wanted)
            hits[number] += present
            if not present or present * block_size < size:
                break
        for chain, wanted in zip(reversed(chains), reversed(blocks), strict=True):
            present = cache.get(chain, 0)
            cache[chain] = max(present, wanted)
            cache.move_to_end(chain)
            held += cache[chain] - present
        while held > cache_blocks:
            held -= cache.popitem(last=False)[1]
    usable = [(request.prompt_tokens - 1) // block_size for request in requests]
    return np.minimum(hits, np.array(usable, np.int64))


def _pieces(request: TraceRequest, block_size: int) -> HashIds:
    """Names of a prompt's pieces: its ids, or the names of its full blocks if blocks are longer."""
    return request.hash_ids if block_size <= request.id_tokens else request.block_hashes(block_size)
