"""Turns a body of Anthropic's messages into the chat that vLLM makes of it. Pure.

Written from what vLLM 0.32 does (vllm/entrypoints/anthropic/serving.py and protocol.py, read
2026-11-22), and compared with its /v1/messages/render.
"""

from typing import Any

from router.request.dialects import vllm
from router.request.dialects.anthropic import blocks, tool_call
from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.messages import Fields, checked_messages, refused, text_or_none
from router.request.prompt_error import unsupported

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_template(fields: Fields, facts: ModelFacts) -> TemplateInput:
    """The template's input for the body of messages. Raises PromptError."""
    return vllm.to_template(to_chat(fields, facts), facts)


def to_chat(fields: Fields, facts: ModelFacts) -> Fields:
    """The body of the chat that vLLM makes of a body of messages. Raises PromptError."""
    thinking = fields.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        raise unsupported("which reasoning_effort disables thinking is decided by trials in vLLM")
    messages = checked_messages(fields)
    merges = any(template.refuses_later_systems for template in facts.templates.values())
    systems = [_system_text(fields.get("system"))]
    if merges:
        systems += [_inline(message) for message in messages if message["role"] == "system"]
    result: list[Fields] = []
    if text := "".join(systems):
        result.append({"role": "system", "content": text})
    for message in messages:
        if message["role"] != "system":
            result += _converted(message)
        elif not merges and (text := _inline(message)):
            result.append({"role": "system", "content": text})
    chat: Fields = {"messages": result, "chat_template_kwargs": fields.get("chat_template_kwargs")}
    config = fields.get("output_config")
    if isinstance(config, dict):
        chat["reasoning_effort"] = config.get("effort")
    return chat | _tools(fields)


def _tools(fields: Fields) -> Fields:
    tools = fields.get("tools")
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise refused("a body whose tools are no array")
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    return {
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": _CHOICES.get(kind) if isinstance(kind, str) else None,
    }


def _tool(tool: Any) -> Fields:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise refused("a tool without an input_schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


def _system_text(content: Any) -> str:
    """The text of system content, without blocks that begin with BILLING_HEADER."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for block in blocks(content):
        text = text_or_none(block, "text")
        if block["type"] == "text" and text and not text.startswith(vllm.BILLING_HEADER):
            texts.append(text)
    return "".join(texts)


def _inline(message: Fields) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(vllm.BILLING_HEADER) else content
    if any(block["type"] in ("tool_addition", "tool_removal") for block in blocks(content)):
        raise unsupported("messages that add or remove tools have tokens that only an engine knows")
    return _system_text(content)


def _converted(message: Fields) -> list[Fields]:
    """The chat messages that vLLM makes of one message: one for each tool result in it, then one
    for the rest."""
    role = message["role"]
    if role not in ("user", "assistant"):
        raise refused("a message whose role is not user, assistant or system")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    result: list[Fields] = []
    last: Fields = {"role": role}
    parts: list[Fields] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for block in blocks(content):
        text = text_or_none(block, "text")
        match block["type"]:
            case "text":
                if text:
                    parts.append({"type": "text", "text": text})
            case "thinking":
                thoughts.append(text_or_none(block, "thinking") or "")
            case "redacted_thinking" | "tool_reference":
                pass
            case "tool_use":
                calls.append(tool_call(block))
            case "tool_result" if role == "user":
                result.append(_result(block))
            case kind:
                raise unsupported(
                    f"a block of the type {kind!r:.40} has tokens that only an engine knows"
                )
    if thoughts:
        last["reasoning"] = "".join(thoughts)
    if calls:
        last["tool_calls"] = calls
    if parts:
        last["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if role == "assistant" or "content" in last:
        result.append(last)
    return result


def _result(block: Fields) -> Fields:
    content = block.get("content")
    texts = [content] if isinstance(content, str) else []
    for item in content if isinstance(content, list) else []:
        if not isinstance(item, dict) or item.get("type") != "text":
            raise unsupported(
                "a tool's result with other parts than text has tokens that only an engine knows"
            )
        texts.append(text_or_none(item, "text") or "")
    result = {"role": "tool", "tool_call_id": text_or_none(block, "tool_use_id") or ""}
    return {**result, "content": "\n".join(texts)}
