"""Parts of Anthropic's messages that vLLM and SGLang read alike. Pure."""

import json
from typing import Any

from router.request.dialects.messages import Fields, refused, text_or_none


def blocks(content: Any) -> list[Fields]:
    """The blocks of a message's content that is no text. Raises PromptError if it is no list of
    blocks.
    """
    if not isinstance(content, list) or not all(
        isinstance(block, dict) and isinstance(block.get("type"), str) for block in content
    ):
        raise refused("content that is neither a string nor a list of blocks")
    return content


def tool_call(block: Fields) -> Fields:
    """A tool_use block as a chat's tool call. Raises PromptError."""
    given = block.get("input")
    if given is not None and not isinstance(given, dict):
        raise refused("a tool_use whose input is no object")
    return {
        "id": text_or_none(block, "id") or "call",
        "type": "function",
        "function": {
            "name": text_or_none(block, "name") or "",
            "arguments": json.dumps(given or {}),
        },
    }
