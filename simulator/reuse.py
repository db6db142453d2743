"""How much of a trace's prompts could be reused at best: the ceiling of every hit rate. Pure.

One cache for all, infinite, that knows a prompt as soon as it has arrived. Of a prompt it serves
the leading blocks seen before, at most (prompt_tokens - 1) // block_size of them, since an engine
computes at least one token. Hits are measured in the same unit.

Law: no fleet that serves a trace's requests in this order has a higher hit rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indexer.hashing import prefix_hashes
from simulator.results import Integers
from simulator.trace import ID_TOKENS, TraceRequest, check_block_size


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best possible hit rates, 0 to 1."""

    blocks: float
    """Reusable / full prompt blocks."""
    tokens: float
    """Tokens of the reusable blocks / all prompt tokens."""


def reuse_ceiling(requests: Sequence[TraceRequest], block_size: int) -> Ceiling:
    """The ceiling of requests that come in this order; 0 of nothing. Raises ValueError for a block
    size that the trace's ids can't be expanded to."""
    tokens = np.array([request.prompt_tokens for request in requests], np.int64)
    return ceiling_of(tokens, reusable_blocks(requests, block_size), block_size)


def ceiling_of(prompt_tokens: Integers, reusable: Integers, block_size: int) -> Ceiling:
    """The ceiling of prompts of which so many blocks can be reused."""
    hits, blocks = int(reusable.sum()), int((prompt_tokens // block_size).sum())
    return Ceiling(
        blocks=hits / blocks if blocks else 0.0,
        tokens=hits * block_size / int(prompt_tokens.sum()) if blocks else 0.0,
    )


def reusable_blocks(requests: Sequence[TraceRequest], block_size: int) -> Integers:
    """Leading blocks of each prompt that were seen before, as far as usable; shape (requests,).

    Works on the 512-token ids, which is exact: of a piece of 512 tokens, as many blocks were seen
    as the longest earlier prompt with the same chain of ids reaches into it.
    """
    check_block_size(block_size)
    if not requests:
        return np.empty(0, np.int64)
    tokens = np.array([request.prompt_tokens for request in requests], np.int64)
    pieces = -(-tokens // ID_TOKENS)
    chains = np.concatenate([prefix_hashes(request.hash_ids) for request in requests])
    request = np.repeat(np.arange(len(requests)), pieces)
    last = np.cumsum(pieces) - 1
    reach = np.full(len(chains), ID_TOKENS // block_size)
    """Full blocks of each piece that its prompt has."""
    reach[last] = (tokens - (pieces - 1) * ID_TOKENS) // block_size
    # By chain, and in it by request: what was reached before is the running maximum within a chain.
    order = np.argsort(chains, kind="stable")
    same = np.flatnonzero(np.diff(chains[order], prepend=chains[order][:1]))
    group = np.zeros(len(chains), np.int64)
    group[same] = 1
    offset = np.cumsum(group) * (ID_TOKENS + 1)
    running = np.maximum.accumulate(reach[order] + offset)
    before = np.zeros(len(chains), np.int64)
    before[1:] = running[:-1]
    seen = np.empty(len(chains), np.int64)
    seen[order] = np.minimum(np.maximum(before - offset, 0), reach[order])
    found = np.bincount(request, weights=seen, minlength=len(requests)).astype(np.int64)
    return np.minimum(found, (tokens - 1) // block_size)
