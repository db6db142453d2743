"""A prompt as the router sees it: a length, and hashes in whatever block size a pool asks for."""

from collections.abc import Iterable

import numpy as np
from typing_extensions import override
from xxhash import xxh3_64_intdigest

from indexer.hashing import HashArray, MultimodalItem, block_hashes, hash_seed, prefix_hashes
from router.refusals import Reason, Refusal


class Prompt:
    """Tokens, or BlockHashes that the caller made. Hashes once for each block size."""

    def __init__(
        self,
        token_count: int,
        *,
        token_bytes: bytes | None = None,
        hashes: HashArray | None = None,
        hashes_block_size: int = 0,
        lora_name: str = "",
        cache_salt: str = "",
        items: Iterable[MultimodalItem] = (),
    ) -> None:
        self.token_count = token_count
        self.lora_name = lora_name
        self.hashes_block_size = hashes_block_size
        """The only block size this prompt can be compared in; 0: any."""
        self._token_bytes = token_bytes
        self._seed = hash_seed(lora_name, cache_salt)
        self._items = tuple(items)
        self._prefixes: dict[int, HashArray] = {}
        if hashes is not None:
            self._prefixes[hashes_block_size] = prefix_hashes(hashes)
        self._content = token_bytes if token_bytes is not None else self._packed_hashes()

    @override
    def __repr__(self) -> str:
        return f"<Prompt {self.token_count} tokens>"

    @classmethod
    def from_tokens(
        cls,
        token_bytes: bytes,
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
        return cls(
            len(token_bytes) // 4,
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

    def prefixes(self, block_size: int) -> HashArray:
        """PrefixHashes of the full blocks; none for a size of 0, or one that the
        caller's hashes aren't in."""
        if block_size < 1:  # a worker that has not told its own yet
            return np.empty(0, np.uint64)
        found = self._prefixes.get(block_size)
        if found is None:
            if self._token_bytes is None:
                blocks = block_hashes(b"", block_size)
            else:
                blocks = block_hashes(self._token_bytes, block_size, self._seed, self._items)
            found = self._prefixes[block_size] = prefix_hashes(blocks)
        return found

    def fingerprint(self) -> int:
        """Tells this prompt from another one, LoRA and salt included."""
        items = repr(self._items).encode() if self._items else b""
        return int(xxh3_64_intdigest(self._content + items, self._seed)) ^ self.token_count

    def _packed_hashes(self) -> bytes:
        return b"".join(hashes.tobytes() for hashes in self._prefixes.values())
