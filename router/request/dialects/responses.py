"""Parts of OpenAI's responses that vLLM and SGLang read alike. Pure."""

import json
from typing import Any

from router.request.dialects.messages import refused, text_or_none
from router.request.prompt_error import type_name, unsupported

Fields = dict[str, Any]

NOT_SHOWN = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
        *("image_generation", "local_shell", "mcp", "shell", "tool_search", "web_search"),
        *("web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    }
)
"""Kinds of tools that engines take, and a chat template never gets."""
CUSTOM_INPUT = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function as which the model sees a custom tool, in the engines' words."""


def items_of(fields: Fields) -> list[Fields]:
    """The items of a body's input; a text is the user's. Raises PromptError."""
    for name in ("previous_response_id", "previous_input_messages", "prompt"):
        if fields.get(name) is not None:
            raise unsupported(f"{name} adds messages that only an engine knows")
    if fields.get("truncation", "disabled") != "disabled":
        raise unsupported("truncation changes the prompt in the engine")
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise refused(f"input that is {type_name(given)}")
    for item in given:
        if not isinstance(item, dict):
            raise refused(f"an item that is {type_name(item)}")
    return given


def instructions_of(fields: Fields) -> list[Fields]:
    """The system message of a body, if it has instructions. Raises PromptError."""
    text = text_or_none(fields, "instructions")
    return [{"role": "system", "content": text}] if text else []


def effort_of(fields: Fields) -> Any:
    """The effort of reasoning, as a chat's reasoning_effort. Raises PromptError."""
    reasoning = fields.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise refused(f"reasoning that is {type_name(reasoning)}")
    return None if reasoning is None else reasoning.get("effort")


def custom_arguments(item: Fields) -> str:
    """The arguments of a custom tool's call, as the model wrote them. Raises PromptError."""
    return json.dumps({"input": text_or_none(item, "input") or ""}, ensure_ascii=False)


def tools_of(fields: Fields) -> list[Any]:
    """A body's tools. Raises PromptError."""
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise refused("tools that are no array")
    return tools or []


def kind_of(tool: Any) -> str:
    """The type of a tool; empty: the template never gets it. Raises PromptError."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise refused("a tool without a type")
    return "" if kind in NOT_SHOWN else kind


def text_of(fields: Fields, name: str) -> str:
    """The text of a field that must be there. Raises PromptError."""
    text = text_or_none(fields, name)
    if text is None:
        raise refused(f"an item or a tool without {name}")
    return text
