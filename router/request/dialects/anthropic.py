"""Parts of Anthropic's messages that vLLM and SGLang read alike. Pure."""

import json
from typing import Any

from router.request.dialects.messages import Fields, refused, text_or_none


def blocks(content: Any) -> list[Fields]:
    """The blocks of a message's content. Raises PromptError unless the content is an array of
    objects with a type."""
    if not isinstance(content, list) or not all(
        isinstance(block, dict) and isinstance(block.get("type"), str) for block in content
    ):
        raise refused("a message's content that is neither a string nor an array of blocks")
    return content


def tool_call(block: Fields) -> Fields:
    """Converts a tool_use block into a chat's tool call. Raises PromptError."""
    given = block.get("input")
    if given is not None and not isinstance(given, dict):
        raise refused("a tool_use block whose input is not an object")
    return {
        "id": text_or_none(block, "id") or "call",
        "type": "function",
        "function": {
            "name": text_or_none(block, "name") or "",
            "arguments": json.dumps(given or {}),
        },
    }
