"""Consistent hashing with bounded loads. Pure; the same in every process, and in a gateway.

Each worker has a weight for each key; a key's worker is the heaviest worker within the bound:

    open requests of a worker  <=  ceil(1.25 * (all open requests + 1) / workers)

Sources: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996), for the
weights: unlike a ring they need no virtual nodes and no state, and one pass over the workers looks
at filter, bound and weight. Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded
Loads" (2016), for the bound, with its ceiling.

Laws: no worker goes over the bound, since some worker is always below it; a worker that leaves
moves only its own keys, while no worker is at its bound.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import nlargest

TOKEN_BYTES_MAX = 4096
"""Bytes of a prompt's tokens that its key is made of: 1,024 tokens as little-endian u32."""
TEXT_BYTES_MAX = 4096
"""Bytes of a prompt's text that its key is made of, at most."""
_MASK = (1 << 64) - 1


def session_key(session_id: str) -> int:
    """The key of a conversation, the same for all its requests."""
    return _hash(b"session", session_id.encode(errors="surrogatepass"))


def tokens_key(token_bytes: bytes) -> int:
    """The key of a prompt's first 1,024 tokens, little-endian u32."""
    return _hash(b"tokens", token_bytes[:TOKEN_BYTES_MAX])


def text_key(text: bytes) -> int:
    """The key of a prompt's first 4 KiB of text."""
    return _hash(b"text", text[:TEXT_BYTES_MAX])


def blocks_key(block_hashes: Iterable[int]) -> int:
    """The key of the block hashes of a prompt's first 1,024 tokens."""
    return _hash(b"blocks", b"".join(block.to_bytes(8, "little") for block in block_hashes))


def worker_seed(worker_id: str, dp_rank: int) -> int:
    """The seed of a worker's weights for all keys, a hash of its id and rank."""
    return _hash(b"worker", f"{dp_rank}/{worker_id}".encode(errors="surrogatepass"))


def bound(open_requests: int, workers: int) -> int:
    """Most open requests of one of `workers` workers, the next request counted; open_requests: of
    all workers."""
    return -(-5 * (open_requests + 1) // (4 * workers))


def ranked(
    key: int, seeds: Sequence[int], open_requests: Sequence[int], count: int = 1
) -> list[int]:
    """Places in `seeds` of workers that may take another request, by falling weight for the key,
    `count` at most; empty only if there are no workers.

    weight = (x ^ x >> 32) * B, x = (key ^ seed) * A, in 64 bits, with odd constants A and B. Key
    and seed are hashes already, and two multiplications let every bit of both reach the highest
    bits of the weight.
    """
    if not seeds:
        return []
    most = bound(sum(open_requests), len(seeds))
    weights = []
    for place, (seed, load) in enumerate(zip(seeds, open_requests, strict=True)):
        if load < most:
            mixed = (key ^ seed) * 0x9E3779B97F4A7C15 & _MASK
            weights.append(((mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _MASK, seed, place))
    return [place for _, _, place in nlargest(count, weights)]


def _hash(kind: bytes, content: bytes) -> int:
    digest = blake2b(content, digest_size=8, person=kind)
    return int.from_bytes(digest.digest(), "little")
