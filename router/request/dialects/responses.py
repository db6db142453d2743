"""Parts of OpenAI's responses that vLLM and SGLang read alike. Pure."""

import json

from router.request.dialects.dialect import ModelFacts
from router.request.dialects.messages import Fields, refused, text_or_none
from router.request.prompt_error import type_name, unsupported

NOT_SHOWN = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
        *("image_generation", "local_shell", "mcp", "shell", "tool_search", "web_search"),
        *("web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    }
)
"""Types of tools that engines accept and never give to a chat template."""
CUSTOM_INPUT = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}
"""JSON Schema of a custom tool's parameters, in the engines' words: they show it as a function."""
_HARMONY = ("<|start|>", "<|channel|>")


def check_template(facts: ModelFacts) -> None:
    """Raises PromptError for a model of the Harmony format, such as gpt-oss: engines write the
    prompts of its responses without its chat template."""
    texts = [template.text for template in facts.templates.values()]
    if any(all(word in text for word in _HARMONY) for text in texts):
        raise unsupported("engines write responses of the Harmony format without a chat template")


def items_of(fields: Fields) -> list[Fields]:
    """The items of a body's `input`; a string becomes a message of the user. Raises PromptError."""
    if fields.get("previous_response_id") is not None:
        raise unsupported("previous_response_id adds messages that only an engine knows")
    given = fields.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise refused(f"input that is {type_name(given)}, not a string or an array")
    for item in given:
        if not isinstance(item, dict):
            raise refused(f"an item of input that is {type_name(item)}, not an object")
    return given


def instructions_of(fields: Fields) -> list[Fields]:
    """The system message that a body's `instructions` make; empty: there are none. Raises
    PromptError."""
    text = text_or_none(fields, "instructions")
    return [{"role": "system", "content": text}] if text else []


def reasoning_of(fields: Fields) -> Fields | None:
    """The object in a body's field `reasoning`; None: it is null or absent. Raises PromptError."""
    reasoning = fields.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise refused(f"reasoning that is {type_name(reasoning)}, not an object")
    return reasoning


def custom_arguments(item: Fields) -> str:
    """The arguments of a custom tool's call as JSON text. Raises PromptError."""
    return json.dumps({"input": text_or_none(item, "input") or ""}, ensure_ascii=False)


def tools_of(fields: Fields) -> list[Fields]:
    """The tools of a body that a chat template may get. Raises PromptError."""
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise refused("a body whose tools are no array")
    for tool in tools or ():
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise refused("a tool without a type")
    return [tool for tool in tools or () if tool["type"] not in NOT_SHOWN]


def required_text(fields: Fields, name: str) -> str:
    """The text of a field that must be there. Raises PromptError."""
    text = text_or_none(fields, name)
    if text is None:
        raise refused(f"an item or a tool without {name}")
    return text
