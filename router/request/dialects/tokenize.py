"""Turns the body of a completion or a chat into one for the engine's /tokenize endpoint. Pure.

Each function raises Unsupported; for a body that can't be read msgspec.DecodeError,
UnicodeDecodeError, RecursionError.
"""

from typing import Any

import msgspec

_VLLM = (
    "messages", "model", "tools", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
)  # fmt: skip
"""Fields of a chat that vLLM's /tokenize knows."""
_VLLM_IGNORED = ("reasoning_effort", "documents")
"""Fields that vLLM's /tokenize ignores, though they change the prompt."""
_NOT_OF_SGLANG = ("add_generation_prompt", "add_special_tokens")
"""Fields that SGLang's chats ignore, and that its /tokenize obeys."""


class Unsupported(ValueError):
    """An engine's /tokenize gives other tokens for this body than the engine computes."""


class _Completion(msgspec.Struct):
    prompt: msgspec.Raw
    model: msgspec.Raw = msgspec.Raw()
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw()


def tokenize_completion(content: bytes) -> bytes:
    """The body of /tokenize for a completion."""
    body = msgspec.json.decode(content, type=_Completion)
    if not bytes(body.prompt).lstrip().startswith(b'"'):
        raise Unsupported("/tokenize takes one string, and the body's prompt is not a string")
    if _is_set(body.truncate_prompt_tokens):
        raise Unsupported("/tokenize ignores truncate_prompt_tokens")
    fields = ("prompt", "model", "add_special_tokens")
    return _object({name: getattr(body, name) for name in fields})


def tokenize_vllm_chat(content: bytes) -> bytes:
    """The body of vLLM's /tokenize for a chat."""
    fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    if ignored := [name for name in _VLLM_IGNORED if name in fields and _is_set(fields[name])]:
        raise Unsupported(f"vLLM's /tokenize ignores {', '.join(ignored)}")
    return _object({name: fields[name] for name in _VLLM if name in fields})


def tokenize_sglang_chat(content: bytes) -> bytes:
    """The body of SGLang's /tokenize for a chat: the chat without the fields that SGLang's chats
    ignore and its /tokenize obeys."""
    fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    tools = msgspec.json.decode(fields["tools"]) if "tools" in fields else None
    if isinstance(tools, list) and any(map(_is_reordered, tools)):
        raise Unsupported("SGLang's /tokenize reorders the fields of these tools, unlike its chats")
    if fields.keys().isdisjoint(_NOT_OF_SGLANG):
        return content
    return _object({name: fields[name] for name in fields if name not in _NOT_OF_SGLANG})


def _is_reordered(tool: Any) -> bool:
    """Whether SGLang 0.5.23's /tokenize gives a template the fields of a tool's function in another
    order than its chats do (protocol.py). It drops nulls before it reads the tool once more, so
    that null fields come last, after a defer_loading that the function takes from its tool."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return False
    null = [name for name in ("description", "parameters") if function.get(name) is None]
    deferred = tool.get("defer_loading") is not None and function.get("defer_loading") is None
    return any(name in function for name in null) or (deferred and bool(null))


def _object(fields: dict[str, msgspec.Raw]) -> bytes:
    """A JSON object of the fields that have a value; absent ones and null are left out."""
    return msgspec.json.encode({name: value for name, value in fields.items() if _is_set(value)})


def _is_set(value: msgspec.Raw) -> bool:
    """Whether a field is there, and not null."""
    return bytes(value) not in (b"", b"null")
