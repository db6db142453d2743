"""Turns tokens into BlockHashes, and BlockHashes into PrefixHashes.

    BlockHash  = XXH3-64(little-endian u32 token ids of the block, seed)
    PrefixHash = BlockHash for the first block,
                 else XXH3-64(LE u64 parent PrefixHash ++ LE u64 BlockHash, seed 1337)

Law: only full blocks have a hash, and a PrefixHash names the whole prompt up to the block's end.

The native kernel does the work, and tests compare it with indexer/reference.py. The scheme is
common in the field: NVIDIA Dynamo's `lib/kv-router` (release 1.6.1, verified by the known answers
in tests/indexer/test_hashing.py) and the Mooncake indexer RFC #1527 use it, too.
"""

from collections.abc import Iterable, Sequence
from string import hexdigits
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from indexer import kernel
from indexer.identity import BlockHash, PrefixHash
from indexer.identity import HashArray as HashArray

HASH_SEED = 1337
U64_MASK = (1 << 64) - 1
_HEX_DIGITS = frozenset(hexdigits)


class MultimodalItem(NamedTuple):
    """An image, a sound or the like in a prompt: its content hash and the tokens that it covers."""

    content_hash: int
    first_token: int
    token_count: int


def hash_seed(lora_name: str = "", cache_salt: str = "") -> int:
    """The BlockHash seed: 1337, plus a term for each of LoRA and salt if not empty, mod 2^64."""
    seed = HASH_SEED
    if lora_name:
        seed += int(xxh3_64_intdigest(lora_name.encode(), 0))
    if cache_salt:
        seed += int(xxh3_64_intdigest(cache_salt.encode(), 1))
    return seed & U64_MASK


def multimodal_hash(item_id: str) -> int:
    """64-bit content hash of an item id: 64 hex digits are read as their first 16, else XXH3-64."""
    if len(item_id) == 64 and _HEX_DIGITS.issuperset(item_id):
        return int(item_id[:16], 16)
    return int(xxh3_64_intdigest(item_id.encode(), 0))


def pack_tokens(token_ids: Sequence[int] | npt.NDArray[np.uint32]) -> bytes:
    """Little-endian u32 form of token ids; raises OverflowError for an id outside [0, 2^32)."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def block_hashes(
    token_bytes: bytes | bytearray | memoryview,
    block_size: int,
    seed: int = HASH_SEED,
    items: Iterable[MultimodalItem] = (),
) -> HashArray:
    """BlockHashes of the full blocks of little-endian u32 tokens; shape (tokens // block_size,).

    An item adds its content hash to every block with a token that it covers.
    """
    hashes = kernel.block_hashes(token_bytes, block_size, seed)
    spans = [
        (
            item.content_hash & U64_MASK,
            item.first_token // block_size,
            (item.first_token + item.token_count - 1) // block_size,
        )
        for item in items
        if item.token_count > 0
    ]
    if spans:
        kernel.add_items(token_bytes, block_size, seed, np.array(sorted(spans), np.uint64), hashes)
    return hashes


def token_prefixes(
    token_bytes: bytes | bytearray | memoryview, block_size: int, seed: int = HASH_SEED
) -> HashArray:
    """PrefixHashes of the full blocks of little-endian u32 tokens without items: what
    `prefix_hashes(block_hashes(...))` returns, in one step."""
    return kernel.token_prefixes(token_bytes, block_size, seed)


def prefix_hashes(blocks: HashArray, parent: PrefixHash | None = None) -> HashArray:
    """PrefixHashes of a chain of BlockHashes, after `parent` if there is one."""
    return kernel.prefix_hashes(blocks, parent)


def extend_prefix(parent: PrefixHash | None, block: BlockHash) -> PrefixHash:
    """PrefixHash of one block after `parent`; of a first block when parent is None."""
    if parent is None:
        return PrefixHash(block)
    pair = parent.to_bytes(8, "little") + block.to_bytes(8, "little")
    return PrefixHash(xxh3_64_intdigest(pair, HASH_SEED))
