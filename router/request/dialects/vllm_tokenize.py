"""The body of vLLM's /tokenize for a chat. Pure."""

import msgspec

from router.request.dialects.tokenize import Unsupported, is_set, json_object

_KNOWN = (
    "messages", "model", "tools", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
)  # fmt: skip
"""Fields of a chat that vLLM's /tokenize knows."""
_IGNORED = ("reasoning_effort", "documents")
"""Fields of which vLLM's /tokenize takes no notice, though they change the prompt."""


def tokenize_chat(content: bytes) -> bytes:
    """The body of vLLM's /tokenize for a chat. Raises Unsupported, msgspec.DecodeError."""
    fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    if ignored := [name for name in _IGNORED if name in fields and is_set(fields[name])]:
        raise Unsupported(f"vLLM's /tokenize ignores {', '.join(ignored)}")
    return json_object({name: fields[name] for name in _KNOWN if name in fields})
