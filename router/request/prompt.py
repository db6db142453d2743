"""A prompt as the router sees it: a length, and hashes in whatever block size a pool asks for, if
more than the length is known."""

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
"""How often items may cover a prompt on average. A video with its sound covers it twice; a hostile
client would make us hash the whole prompt again for every item."""

_NONE: HashArray = np.empty(0, np.uint64)
ESTIMATED_BLOCKS_TOKENS = 8192
"""Tokens whose blocks count as load, of a prompt of which only the length is known: blocks make a
worker full, and an image's bytes, say, are hardly ever tokens."""
STEP_BLOCKS = 1 << 14
"""Blocks that are hashed in one step: 2 ms where 8 items cover each of them."""


class Prompt:
    """Tokens, or BlockHashes that the caller made, or a length alone, which matches nothing. Hashes
    once for each block size."""

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
        """Block size of the caller's hashes, tokens; 0: there are none."""
        self._token_bytes = token_bytes
        self._digest = digest
        """Digest of the text or body of which a length alone was estimated; empty: there is
        none."""
        self._seed = hash_seed(lora_name, cache_salt) if lora_name or cache_salt else HASH_SEED
        self._items = tuple(items)
        self.has_items = bool(self._items)
        """Images, sounds or the like cover some of its tokens."""
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
        """A prompt of little-endian u32 token ids; raises Refusal when they are none."""
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
        """A prompt of BlockHashes, salts included; raises Refusal when the numbers don't fit."""
        if block_size < 1:
            raise Refusal(Reason.MALFORMED_PROMPT, "block_hashes needs its block_size, in tokens")
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
        """A prompt of which only the length is known. digest: of a text that the length was
        estimated of, so that two texts of one length have two fingerprints. Raises Refusal."""
        if not token_count:
            raise Refusal(Reason.EMPTY_PROMPT, "estimated_tokens is 0: the prompt has no tokens")
        return cls(token_count, lora_name=lora_name, digest=digest)

    @classmethod
    def from_prefixes(
        cls, prefixes: HashArray, block_size: int, prompt_tokens: int, *, lora_name: str = ""
    ) -> "Prompt":
        """A prompt of which only the PrefixHashes are known, in one block size; 0: nothing is."""
        prompt = cls(
            prompt_tokens, hashes=prefixes, hashes_block_size=block_size, lora_name=lora_name
        )
        prompt._prefixes[block_size] = prefixes
        return prompt

    @property
    def only_block_size(self) -> int:
        """The only block size in which this prompt can be compared; 0: any size, also for a prompt
        without a full block, which matches nothing.
        """
        return self.hashes_block_size if self.token_count >= self.hashes_block_size else 0

    @property
    def hash_bytes(self) -> int:
        """Approximate bytes of its hashes: the caller's BlockHashes, and PrefixHashes in blocks of
        16 tokens.
        """
        return 2 * self._hashes.nbytes or self.token_count // 2

    def prefixes(self, block_size: int) -> HashArray:
        """PrefixHashes of the full blocks; none for a size of 0, or one that the caller's hashes
        aren't in."""
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
        """Makes the PrefixHashes of a block size, in steps of STEP_BLOCKS blocks."""
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
        """Blocks that no other request can share: the last, partial one; of a prompt of which only
        the length is known, those of its first ESTIMATED_BLOCKS_TOKENS."""
        if block_size < 1:
            return 1
        if self._token_bytes is not None or self.hashes_block_size:
            return int(self.token_count % block_size > 0)
        return -(-min(self.token_count, ESTIMATED_BLOCKS_TOKENS) // block_size)

    def leading_tokens(self, count: int) -> bytes | None:
        """The first tokens, little-endian u32; None where they are not all there is (images), or
        not known."""
        if self._token_bytes is None or any(item.first_token < count for item in self._items):
            return None
        return bytes(self._token_bytes[: 4 * count])

    def fingerprint(self, block_size: int) -> int:
        """A value that differs from that of any other prompt, LoRA and salt included, for the same
        block size.

        It is made of the last PrefixHash, which is computed once a worker is picked, and of the
        tokens after it, or of the digest. BlockHashes are taken in their own block size.
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
    """The part of an item that lies between two tokens, as seen from the first."""
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
