"""How fast a prompt becomes PrefixHashes: what every routed request pays first."""

from typing import Any

from indexer.hashing import MultimodalItem, block_hashes, pack_tokens, prefix_hashes
from tests.bench.timing import duration_us

BLOCK_SIZE = 16
PROMPT_TOKENS = [1024, 8192, 100_000, 1_000_000]


def rows() -> list[dict[str, Any]]:
    """Microseconds a prompt, and what packing a list of ids and items in it cost."""
    found = []
    for count in PROMPT_TOKENS:
        packed = _prompt(count)
        found.append(
            duration_us(
                f"prefix_hashes_{count}",
                lambda packed=packed: prefix_hashes(block_hashes(packed, BLOCK_SIZE)),
            )
        )
    token_ids = list(range(8192))
    items = [MultimodalItem(i, 1024 * i, 512) for i in range(8)]
    packed = _prompt(8192)
    found += [
        duration_us("pack_token_ids_8192", lambda: pack_tokens(token_ids)),
        duration_us(
            "prefix_hashes_8192_8_images",
            lambda: prefix_hashes(block_hashes(packed, BLOCK_SIZE, items=items)),
        ),
    ]
    return found


def _prompt(count: int) -> bytes:
    return pack_tokens([i * 7919 % 150_000 for i in range(count)])
