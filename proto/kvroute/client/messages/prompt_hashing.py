"""Token prompts hashed by the client, so that a router gets an eighth of their bytes or less.

A router's answer has the block size of its model (RouteResponse.hash_block_size); the next prompts
for that model are then sent as block hashes. Only plain requests are: LoRA names, salts and
multimodal items change the hashes, and a request id of the caller's own stands for one form of the
prompt.

Law: a prompt is hashed only in the block size of the model's last answer.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvroute.client.messages.options import RouteOptions
from kvroute.client.messages.tokens import pack_tokens

MODELS_MAX = 1024
"""Models whose block sizes are kept; past the bound the oldest entry is dropped."""
_NOT_PLAIN = frozenset((
    "lora_name", "cache_salt", "multimodal_items", "request_id", "phase", "block_hashes",
    "block_size", "prompt_tokens",
))  # fmt: skip
_TOKEN_SIZE = 4
_SEED = 1337
"""Seed of the block hashes that routers keep; indexer/hashing.py defines them."""

BlockHashing: TypeAlias = Callable[[bytes, int], Iterable[int]]
"""Little-endian u32 tokens and the tokens of a block -> the hashes of the full blocks."""


class PromptHashing:
    """The block size of each model, from the routers' answers."""

    def __init__(self) -> None:
        """Raises ImportError where neither the router nor the package xxhash is installed."""
        self._block_hashes = _native_hashing() or xxhash_hashing()
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def hashed(self, options: RouteOptions) -> str | None:
        """Replaces the tokens in `options` by block hashes if the model's block size is known.

        Returns the model if the request is plain, for answered(); None otherwise. Raises
        InvalidRequest for tokens that can't be packed.
        """
        token_ids = options.get("token_ids")
        if token_ids is None or not _NOT_PLAIN.isdisjoint(options):
            return None
        model = options.get("model") or ""
        if (size := self._sizes.get(model)) and (tokens := pack_tokens(token_ids)):
            del options["token_ids"]
            options["block_hashes"] = self._block_hashes(tokens, size)
            options["block_size"] = size
            options["prompt_tokens"] = len(tokens) // _TOKEN_SIZE
        return model

    def answered(self, model: str, block_size: int) -> None:
        """Keeps the block size of an answer to a plain request; 0: prompts go as tokens."""
        if self._sizes.get(model, 0) == block_size:
            return
        self._sizes.pop(model, None)
        if block_size:
            self._sizes[model] = block_size
            if len(self._sizes) > MODELS_MAX:
                self._sizes.popitem(last=False)


def _native_hashing() -> BlockHashing | None:
    """The router's own kernel, where the router is installed: 8 us for 8,192 tokens."""
    try:
        from indexer.hashing import block_hashes
    except ImportError:
        return None
    return block_hashes


def xxhash_hashing() -> BlockHashing:
    """The same hashes by the package xxhash: 150 us for 8,192 tokens in blocks of 16."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError(
            "hash_prompts needs the package xxhash: pip install 'kvroute-client[hash-prompts]'"
        ) from error

    def block_hashes(tokens: bytes, block_size: int) -> Iterable[int]:
        step = block_size * _TOKEN_SIZE
        whole = len(tokens) - len(tokens) % step
        starts = range(0, whole, step)
        return array("Q", [xxh3_64_intdigest(tokens[i : i + step], _SEED) for i in starts])

    return block_hashes
