"""Token ids beside a chat's messages, for engines that take both.

The engine computes these tokens and does not render the messages again; its answer is a chat's,
with tool calls and reasoning taken apart. vLLM 0.32 takes them as `prompt_token_ids` in
kv_transfer_params (made for decode workers of pairs), SGLang 0.5.23 as `input_ids`. An engine that
does not know the field ignores it, and computes the same tokens from the messages.
"""

from collections.abc import Sequence
from typing import Any

ENGINES = ("vllm", "sglang")


def token_fields(engine: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """Fields for the top level of a chat's body; empty: the engine takes no tokens."""
    match engine:
        case "vllm":
            return {"kv_transfer_params": {"prompt_token_ids": token_ids}}
        case "sglang":
            return {"input_ids": token_ids}
        case _:
            return {}
