"""Names the shape of a body: the features by which engines make tokens of it in different ways.
Pure.

Law: a shape's name shows nothing of the texts, its length is bounded, and any decoded JSON has a
shape.
"""

from collections.abc import Iterator
from typing import Any

from router.request.bodies import Templated
from router.request.rendering.body import Body

KWARGS_MAX = 4
"""Most keyword arguments that a shape's name lists; a body with more is `kwargs(many)`."""
NAME_CHARACTERS_MAX = 24
"""Most characters of a keyword argument's name; a body with a longer one is `kwargs(many)`, too."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_TOOL = frozenset({"type", "function", "name", "description", "input_schema", "cache_control"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})
_ROLES = frozenset({"user", "assistant", "system", "developer", "tool"})
_ITEMS = {
    "function_call": "tool_calls",
    "custom_tool_call": "custom_calls",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
    "reasoning": "reasoning",
}
"""Items of a response's input that are no messages, and their features."""
_OPTIONS = (
    "add_special_tokens",
    "chat_template",
    "documents",
    "echo",
    "mm_processor_kwargs",
    "output_config",
    "prompt_embeds",
    "response_format",
    "structured_outputs",
    "suffix",
    "previous_response_id",
    "thinking",
    "truncate_prompt_tokens",
)
"""Fields whose presence, with any value but null and false, is a feature."""


def shape_of(body: Body) -> str:
    """The name of a body's shape, such as `chat+kwargs(enable_thinking)+system+tools`: the format,
    then features in alphabetical order."""
    return "+".join([body.kind.name, *sorted(set(_features(body)))])


def _features(body: Body) -> Iterator[str]:
    fields = body.fields
    yield from (name for name in _OPTIONS if fields.get(name) not in (None, False))
    if body.kind.templated is None:
        yield from _prompt(fields.get("prompt"))
        return
    if fields.get("tools"):
        yield "tools"
        if not _are_plain(fields["tools"]):
            yield "tool_fields"
    yield from _choice(fields.get("tool_choice"))
    effort = fields.get("reasoning_effort")
    if effort is not None:
        yield "effort_none" if effort == "none" else "effort"
    if fields.get("continue_final_message"):
        yield "continue"
    if fields.get("add_generation_prompt") is False:
        yield "no_generation_prompt"
    yield from _kwargs(fields.get("chat_template_kwargs"))
    if fields.get("system"):
        yield "system"
        yield from _content(fields["system"])
    if body.kind.templated is Templated.RESPONSES:
        yield from _response(fields)
        return
    messages = fields.get("messages")
    if isinstance(messages, list) and messages:
        yield from _messages(messages)


def _prompt(prompt: Any) -> Iterator[str]:
    if not isinstance(prompt, list):
        return
    first = prompt[0] if prompt else 0
    if isinstance(first, int):
        yield "ids"
        return
    yield "list"
    if isinstance(first, list):
        yield "ids"


def _are_plain(tools: Any) -> bool:
    """Whether no tool has rare fields, which each engine treats in a way of its own."""
    return isinstance(tools, list) and all(
        isinstance(tool, dict) and _is_plain(tool) for tool in tools
    )


def _is_plain(tool: dict[str, Any]) -> bool:
    if isinstance(tool.get("function"), dict):
        return tool.keys() <= _TOOL and tool["function"].keys() <= _FUNCTION
    if "input_schema" in tool:
        return tool.keys() <= _TOOL
    return tool.get("type") == "function" and tool.keys() <= _FUNCTION | {"type"}


def _choice(choice: Any) -> Iterator[str]:
    if isinstance(choice, dict):
        choice = choice.get("type") if choice.get("type") in ("auto", "any", "none") else "named"
    if choice in ("none", "required", "any", "named"):
        yield f"tool_choice_{choice}"


def _kwargs(kwargs: Any) -> Iterator[str]:
    if not isinstance(kwargs, dict) or not kwargs:
        return
    names = sorted(kwargs)
    plain = all(
        len(name) <= NAME_CHARACTERS_MAX and name.isascii() and name.isidentifier()
        for name in names
    )
    listed = ",".join(names) if plain and len(names) <= KWARGS_MAX else "many"
    yield f"kwargs({listed})"


def _messages(messages: list[Any]) -> Iterator[str]:
    systems = 0
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        role = message.get("role")
        if role == "system":
            systems += 1
            if place:
                yield "system_later"
        elif role not in ("user", "assistant"):
            yield role if isinstance(role, str) and role in _ROLES else "other_role"
        yield from _message(message)
    if systems:
        yield "system" if systems == 1 else "systems"
    last = messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        yield "assistant_last"


def _response(fields: dict[str, Any]) -> Iterator[str]:
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict):
        effort = reasoning.get("effort")
        yield "effort_none" if effort == "none" else "effort" if effort else "effort_unset"
    given = fields.get("input")
    items = given if isinstance(given, list) else []
    messages = [{"role": "system", "content": ""}] if fields.get("instructions") else []
    for item in items:
        if isinstance(item, dict) and "role" in item:
            messages.append(item)
        elif isinstance(item, dict):
            kind = item.get("type")
            yield _ITEMS.get(kind, "other_item") if isinstance(kind, str) else "other_item"
            yield from _content(item.get("output"))
    last = items[-1] if items and isinstance(items[-1], dict) else {}
    if last.get("status") not in (None, "completed"):
        yield "continue"
    features = set(_messages(messages)) if messages else set()
    yield from features - ({"assistant_last"} if "role" not in last else set())


def _message(message: dict[Any, Any]) -> Iterator[str]:
    content = message.get("content")
    if content is None:
        yield "no_content"
    elif not isinstance(content, str):
        yield from _content(content)
    if message.get("tool_calls"):
        yield "tool_calls"
    if message.get("name"):
        yield "names"
    if message.get("reasoning") or message.get("reasoning_content"):
        yield "reasoning"
    if message.get("tools"):
        yield "message_tools"


def _content(content: Any) -> Iterator[str]:
    if not isinstance(content, list):
        return
    yield "parts"
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind == "tool_use":
            yield "tool_calls"
        elif kind == "tool_result":
            yield "tool"
            yield from _content(part.get("content"))
        elif kind in ("thinking", "redacted_thinking"):
            yield "reasoning"
        elif not isinstance(kind, str) or kind not in _TEXT_PARTS:
            yield "media"
