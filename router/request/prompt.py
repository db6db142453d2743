"""A prompt as the router sees it: its length and, if its tokens or hashes are known, PrefixHashes
in the block size that a pool uses."""

from collections.abc import Iterable, Iterator

import numpy as np
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from indexer.hashing import (
    HASH_SEED,
    HashArray,
    MultimodalItem,
    block_hashes,
    hash_seed,
    prefix_hashes,
    token_prefixes,
)
from router.request.refusal import Reason, Refusal

ITEM_LAYERS_MAX = 8
"""Most multimodal items that may cover a token, on average over a prompt. A video with its sound
covers its tokens twice; without a bound, each further item would cost the hashing of the whole
prompt once more."""

_NONE: HashArray = np.empty(0, np.uint64)
ESTIMATED_BLOCKS_TOKENS = 8192
"""Most tokens whose blocks count as load, of a prompt with an estimated length. An estimate counts
an image's bytes as tokens, and must not fill a worker with blocks."""
STEP_BLOCKS = 1 << 14
"""Blocks that are hashed in one step: 2 ms where 8 items cover each of them."""


class Prompt:
    """A prompt known by its tokens, by BlockHashes that the caller made, or by its length alone,
    which matches no cached block. PrefixHashes are computed once for each block size."""

    def __init__(
        self,
        token_count: int,
        *,
        token_bytes: bytes | memoryview | None = None,
        hashes: HashArray | None = None,
        hashes_block_size: int = 0,
        digest: bytes = b"",
        lora_name: str = "",
        cache_salt: str = "",
        items: Iterable[MultimodalItem] = (),
    ) -> None:
        self.token_count = token_count
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self.hashes_block_size = hashes_block_size
        """Tokens of a block of the caller's hashes; 0: the caller gave no hashes."""
        self._token_bytes = token_bytes
        self._digest = digest
        """Digest of the text or body from which the length was estimated; empty: no digest."""
        self._seed = hash_seed(lora_name, cache_salt) if lora_name or cache_salt else HASH_SEED
        self._items = tuple(items)
        self.has_items = bool(self._items)
        """Whether images, sounds or other media cover some of the prompt's tokens."""
        self._hashes = _NONE if hashes is None else hashes
        self._prefixes: dict[int, HashArray] = {}

    @override
    def __repr__(self) -> str:
        return f"<Prompt {self.token_count} tokens>"

    @classmethod
    def from_tokens(
        cls,
        token_bytes: bytes | memoryview,
        *,
        lora_name: str = "",
        cache_salt: str = "",
        items: Iterable[MultimodalItem] = (),
    ) -> "Prompt":
        """A prompt of token ids, little-endian u32. Raises Refusal if there are none, if the bytes
        are no multiple of 4, or if an item is outside of the prompt."""
        if not token_bytes:
            raise Refusal(Reason.EMPTY_PROMPT, "the prompt has no tokens")
        if len(token_bytes) % 4:
            raise Refusal(
                Reason.MALFORMED_PROMPT,
                f"token_bytes is {len(token_bytes)} bytes long, which is no multiple of 4:"
                " it holds little-endian 32-bit token ids",
            )
        token_count = len(token_bytes) // 4
        if items:
            items = tuple(items)
            _check_items(items, token_count)
        return cls(
            token_count,
            token_bytes=token_bytes,
            lora_name=lora_name,
            cache_salt=cache_salt,
            items=items,
        )

    @classmethod
    def from_hashes(
        cls, hashes: HashArray, block_size: int, prompt_tokens: int, *, lora_name: str = ""
    ) -> "Prompt":
        """A prompt of BlockHashes, which include its LoRA and cache salt. Raises Refusal unless
        there is one hash for each full block of prompt_tokens."""
        if block_size < 1:
            raise Refusal(
                Reason.MALFORMED_PROMPT, "block_hashes needs its block_size, 1 token or more"
            )
        if not prompt_tokens:
            raise Refusal(
                Reason.EMPTY_PROMPT, "block_hashes needs prompt_tokens, the prompt's length"
            )
        if prompt_tokens // block_size != len(hashes):
            raise Refusal(
                Reason.MALFORMED_PROMPT,
                f"{prompt_tokens} tokens have {prompt_tokens // block_size} full blocks of"
                f" {block_size}, but block_hashes holds {len(hashes)}",
            )
        return cls(prompt_tokens, hashes=hashes, hashes_block_size=block_size, lora_name=lora_name)

    @classmethod
    def from_length(cls, token_count: int, *, lora_name: str = "", digest: bytes = b"") -> "Prompt":
        """A prompt of which only the length is known. digest: hash of the text from which the
        length was estimated, so that texts of equal length differ in fingerprint. Raises Refusal
        for 0 tokens."""
        if not token_count:
            raise Refusal(Reason.EMPTY_PROMPT, "estimated_tokens is 0: the prompt has no tokens")
        return cls(token_count, lora_name=lora_name, digest=digest)

    @classmethod
    def from_prefixes(
        cls, prefixes: HashArray, block_size: int, prompt_tokens: int, *, lora_name: str = ""
    ) -> "Prompt":
        """A prompt of which only the PrefixHashes are known, in blocks of block_size tokens; 0: no
        hashes are known."""
        prompt = cls(
            prompt_tokens, hashes=prefixes, hashes_block_size=block_size, lora_name=lora_name
        )
        prompt._prefixes[block_size] = prefixes
        return prompt

    @property
    def only_block_size(self) -> int:
        """Only block size, in tokens, in which this prompt can be compared with caches. 0: any
        size; so it is for a prompt shorter than a block, which matches nothing."""
        return self.hashes_block_size if self.token_count >= self.hashes_block_size else 0

    @property
    def hash_bytes(self) -> int:
        """Approximate bytes of its hashes: the caller's BlockHashes, and PrefixHashes in blocks of
        16 tokens.
        """
        return 2 * self._hashes.nbytes or self.token_count // 2

    def prefixes(self, block_size: int) -> HashArray:
        """PrefixHashes of the full blocks. Empty for a block size of 0, or one that differs from
        that of the caller's hashes."""
        prefixes = self._prefixes.get(block_size)
        if prefixes is None:
            prefixes = self._prefixes[block_size] = self._made(block_size)
        return prefixes

    def _made(self, block_size: int) -> HashArray:
        tokens = self._token_bytes
        if block_size < 1:  # a worker whose block size is unknown yet
            return _NONE
        if tokens is None:
            return prefix_hashes(self._hashes) if block_size == self.hashes_block_size else _NONE
        if not self._items:
            return token_prefixes(tokens, block_size, self._seed)
        return prefix_hashes(block_hashes(tokens, block_size, self._seed, self._items))

    def hashed(self, block_size: int) -> Iterator[None]:
        """Computes the PrefixHashes that `prefixes` then returns; yields after each STEP_BLOCKS
        blocks, so that other work has its turn."""
        tokens = self._token_bytes
        if tokens is None or block_size < 1 or block_size in self._prefixes:
            self.prefixes(block_size)
            return
        parts = [np.empty(0, np.uint64)]
        count = self.token_count // block_size
        for first in range(0, count, STEP_BLOCKS):
            begin, end = first * block_size, min(count, first + STEP_BLOCKS) * block_size
            items = [part for item in self._items if (part := _part(item, begin, end)) is not None]
            content = memoryview(tokens)[4 * begin : 4 * end]
            parts.append(block_hashes(content, block_size, self._seed, items))
            yield
        self._prefixes[block_size] = prefix_hashes(np.concatenate(parts))

    def own_blocks(self, block_size: int) -> int:
        """Number of blocks that no other request can share: 1 if the last block is partial. If only
        the length is known: all blocks of the first ESTIMATED_BLOCKS_TOKENS tokens."""
        if block_size < 1:
            return 1
        if self._token_bytes is not None or self.hashes_block_size:
            return int(self.token_count % block_size > 0)
        return -(-min(self.token_count, ESTIMATED_BLOCKS_TOKENS) // block_size)

    def leading_tokens(self, count: int) -> bytes | None:
        """The first `count` tokens, little-endian u32; None if tokens are unknown, or an item such
        as an image begins among them."""
        if self._token_bytes is None or any(item.first_token < count for item in self._items):
            return None
        return bytes(self._token_bytes[: 4 * count])

    def fingerprint(self, block_size: int) -> int:
        """64-bit hash that stands for the prompt with its LoRA and cache salt, in one block size.

        Made of the last PrefixHash, the tokens after its block (or the digest), and the length.
        With the caller's BlockHashes, their own block size takes the place of block_size.
        """
        size = self.hashes_block_size or block_size
        prefixes = self.prefixes(size)
        tail: bytes | memoryview = self._digest
        if self._token_bytes is not None:
            tail = self._token_bytes[4 * size * len(prefixes) :]
        if self._items:
            tail = bytes(tail) + repr(self._items).encode()
        form = self.token_count | self.hashes_block_size << 32
        last = int(prefixes[-1]) if len(prefixes) else 0
        return last ^ int(xxh3_64_intdigest(tail, self._seed)) ^ form


def _part(item: MultimodalItem, begin: int, end: int) -> MultimodalItem | None:
    """The part of an item that lies in tokens `begin` to `end`, its place counted from `begin`;
    None: no part does."""
    first = max(item.first_token, begin)
    last = min(item.first_token + item.token_count, end)
    return MultimodalItem(item.content_hash, first - begin, last - first) if first < last else None


def _check_items(items: tuple[MultimodalItem, ...], token_count: int) -> None:
    """Raises Refusal for items that a prompt of this length can't have."""
    for i, item in enumerate(items):
        if item.first_token + item.token_count > token_count:
            raise Refusal(
                Reason.INVALID_FIELD,
                f"multimodal_items[{i}] covers {item.token_count} tokens from token"
                f" {item.first_token} on, but the prompt has {token_count}",
            )
    if sum(item.token_count for item in items) > ITEM_LAYERS_MAX * token_count:
        raise Refusal(
            Reason.INVALID_FIELD,
            f"multimodal_items cover the prompt's tokens more than {ITEM_LAYERS_MAX} times over",
        )
