"""Token prompts hashed here, so that a router gets an eighth of their bytes or less.

A router's answer says for its model in blocks of which size (RouteResponse.hash_block_size); the
next prompts for that model then go as block hashes. Only requests that are plain: LoRA names, salts
and multimodal items change the hashes, and a caller's own request id stands for one form of prompt.

Law: a prompt is never hashed in a size that no answer has said, and the last answer counts.
"""

from collections import OrderedDict

from kvroute.client.options import RouteOptions
from kvroute.client.tokens import pack_tokens

MODELS_MAX = 1024
"""Models whose sizes are kept; past it the one heard of first is forgotten."""
_NOT_PLAIN = frozenset((
    "lora_name", "cache_salt", "multimodal_items", "request_id", "phase", "block_hashes",
    "block_size", "prompt_tokens",
))  # fmt: skip
_TOKEN_SIZE = 4


class PromptHashing:
    """What the answers of a client's routers have said."""

    def __init__(self) -> None:
        """Raises ImportError where the router's own packages aren't installed."""
        from indexer.hashing import block_hashes  # a caller may do without numpy

        self._block_hashes = block_hashes
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def hashed(self, options: RouteOptions) -> str | None:
        """Turns the tokens in `options` into hashes if that is known to do.

        Returns the model if the request is plain, so that its answer is worth hearing. Raises
        InvalidRequest for tokens that are none.
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

    def heard(self, model: str, block_size: int) -> None:
        """An answer to a plain request; 0: tokens are wanted."""
        if self._sizes.get(model, 0) == block_size:
            return
        self._sizes.pop(model, None)
        if block_size:
            self._sizes[model] = block_size
            if len(self._sizes) > MODELS_MAX:
                self._sizes.popitem(last=False)
