"""The body of SGLang's /tokenize for a chat. Pure."""

from typing import Any

import msgspec

from router.request.dialects.tokenize import Unsupported, json_object

_NOT_OF_CHATS = ("add_generation_prompt", "add_special_tokens")
"""Fields that SGLang's chats ignore, and that its /tokenize obeys."""


def tokenize_chat(content: bytes) -> bytes:
    """The same chat, without what only SGLang's /tokenize reads in it. Raises
    Unsupported, msgspec.DecodeError."""
    fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    if "tools" in fields and any(map(_is_reordered, _tools(fields["tools"]))):
        raise Unsupported("SGLang's /tokenize reorders the fields of these tools")
    if not any(name in fields for name in _NOT_OF_CHATS):
        return content
    return json_object({name: fields[name] for name in fields if name not in _NOT_OF_CHATS})


def _tools(tools: msgspec.Raw) -> list[Any]:
    read = msgspec.json.decode(tools)
    return read if isinstance(read, list) else []


def _is_reordered(tool: Any) -> bool:
    """Whether SGLang 0.5.23's /tokenize gives a template the fields of a tool's function in another
    order than its chats do (protocol.py): it drops nulls before it reads the tool once more, so
    that null fields come last, and after what the tool hands on to its function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return False
    null = [name for name in ("description", "parameters") if function.get(name) is None]
    deferred = tool.get("defer_loading") is not None and function.get("defer_loading") is None
    return any(name in function for name in null) or (deferred and bool(null))
