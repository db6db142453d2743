"""Turns a body of Anthropic's messages into the chat that SGLang makes of it. Pure.

Written from what SGLang 0.5.23 does (sglang/srt/entrypoints/anthropic/serving.py, read 2026-11-23),
and compared with the chats that its converter makes; SGLang has no endpoint that renders messages.
"""

from typing import Any

from router.request.dialects import sglang
from router.request.dialects.anthropic import blocks, tool_call
from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.messages import Fields, checked_messages, refused, text_or_none
from router.request.prompt_error import unsupported

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_template(fields: Fields, facts: ModelFacts) -> TemplateInput:
    """The template's input for the body of messages. Raises PromptError."""
    return sglang.to_template(to_chat(fields, facts), facts)


def to_chat(fields: Fields, facts: ModelFacts) -> Fields:
    """The body of the chat that SGLang makes of a body of messages. Raises PromptError."""
    if fields.get("thinking") is not None:
        raise unsupported(
            "what thinking means to a model is known to SGLang's parser of reasoning only"
        )
    result: list[Fields] = []
    if text := _system(fields.get("system")):
        result.append({"role": "system", "content": text})
    for message in checked_messages(fields):
        if message["role"] == "system":
            raise unsupported(
                "where SGLang puts a system message that follows others depends on the template"
            )
        result += _converted(message)
    chat: Fields = {"messages": result, "chat_template_kwargs": fields.get("chat_template_kwargs")}
    config = fields.get("output_config")
    if isinstance(config, dict) and (effort := config.get("effort")) is not None:
        chat["reasoning_effort"] = "max" if effort == "xhigh" else effort
    return chat | _tools(fields)


def _tools(fields: Fields) -> Fields:
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise refused("a body whose tools are no array")
    given = [_tool(tool) for tool in tools or ()]
    if not given:
        return {}
    choice = fields.get("tool_choice")
    if choice is None:
        return {"tools": given, "tool_choice": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        named = {"type": "function", "function": {"name": choice.get("name")}}
        return {"tools": given, "tool_choice": named}
    if kind not in _CHOICES:
        raise refused("a tool_choice whose type is not auto, any, none or tool")
    return {"tools": given, "tool_choice": _CHOICES[kind]}


def _tool(tool: Any) -> Fields:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise unsupported("a tool without an input_schema: one of Anthropic's own")
    return {
        "type": "function",
        "defer_loading": tool.get("defer_loading"),
        "function": {
            "name": tool.get("name"),
            "description": text_or_none(tool, "description") or "",
            "parameters": schema,
            "strict": tool.get("strict", False),  # SGLang writes it, wherever it is left out
        },
    }


def _system(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content if content and content.strip() else ""
    texts = [text_or_none(block, "text") for block in blocks(content) if block["type"] == "text"]
    return "\n".join(text for text in texts if text)


def _converted(message: Fields) -> list[Fields]:
    """The chat messages that SGLang makes of one message. Each tool result in it becomes a message
    of its own, and splits the texts around it."""
    role, content = message["role"], message.get("content")
    if role not in ("user", "assistant"):
        raise refused("a message whose role is neither user nor assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    result: list[Fields] = []
    parts: list[str] = []
    calls: list[Fields] = []
    for block in blocks(content):
        match block["type"]:
            case "text":
                text = text_or_none(block, "text")
                parts += [] if text is None else [text]
            case "tool_use":
                calls.append(tool_call(block))
            case "tool_result" if role == "user":
                result += _of_parts(role, parts)
                parts = []
                result.append(_result(block))
            case kind:
                raise unsupported(
                    f"a block of the type {kind!r:.40} has tokens that only an engine knows"
                )
    if role == "user":
        return result + _of_parts(role, parts)
    last = (_of_parts(role, parts) or [{"role": role}])[0]
    if calls:
        last["tool_calls"] = calls
    elif not parts:
        last["content"] = ""
    return [last]


def _of_parts(role: str, parts: list[str]) -> list[Fields]:
    """A list with one message of these texts; empty: there are no texts."""
    return [{"role": role, "content": _content(parts)}] if parts else []


def _content(texts: list[str]) -> Any:
    """A message's content of these texts: one string, or an array of parts if there are several."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _result(block: Fields) -> Fields:
    content = block.get("content")
    name = text_or_none(block, "tool_use_id") or text_or_none(block, "id") or ""
    message: Fields = {"role": "tool", "tool_call_id": name}
    if not isinstance(content, list):
        return {**message, "content": content if isinstance(content, str) else ""}
    texts = []
    for item in content:
        if not isinstance(item, dict) or item.get("type") != "text":
            raise unsupported(
                "a tool's result with other parts than text has tokens that only an engine knows"
            )
        texts += [text] if (text := text_or_none(item, "text")) else []
    return {**message, "content": _content(texts)}
