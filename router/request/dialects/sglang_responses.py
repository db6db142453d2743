"""OpenAI's responses as the chat that SGLang makes of them. Pure.

Written from what SGLang 0.5.23 does (sglang/srt/entrypoints/openai/serving_responses.py and
responses_adapters.py, parser/template_detection.py, read 2026-11-28), and compared with the chats
that its converter makes; it has no endpoint that renders responses. Models of the Harmony format,
and templates of SGLang's own, have other tokens: that shows in the answers' counts.
"""

import json
from typing import Any

from router.request.dialects import sglang
from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.messages import refused
from router.request.dialects.responses import (
    CUSTOM_INPUT,
    Fields,
    custom_arguments,
    effort_of,
    instructions_of,
    items_of,
    kind_of,
    text_of,
    tools_of,
)
from router.request.prompt_error import unsupported

_LABEL = "Developer instructions:"
"""The line that SGLang puts before a developer's text, which it gives as the system's."""
_NOT_OF_CHAT = ("id", "status", "type")
_TEXTS = frozenset({"input_text", "output_text"})


def to_template(fields: Fields, facts: ModelFacts) -> TemplateInput:
    """The template's input for a response's body. Raises PromptError."""
    return sglang.to_template(to_chat(fields, facts), facts)


def to_chat(fields: Fields, facts: ModelFacts) -> Fields:
    """The body of a chat. Raises PromptError."""
    messages: list[Fields] = []
    for message in [*instructions_of(fields), *map(_message, items_of(fields))]:
        if message is not None:
            _add(messages, message)
    if len(facts.templates) > 1 or not facts.first_template.shows_later_systems:
        messages = _one_system(messages)
    if not messages:
        raise unsupported("an input without items is known to an engine only")
    tools = [function for tool in tools_of(fields) for function in _functions(tool)]
    return {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _choice(fields.get("tool_choice", "auto")) if tools else "none",
        "reasoning_effort": effort_of(fields),
        "chat_template_kwargs": fields.get("chat_template_kwargs"),
    }


def _message(item: Fields) -> Fields | None:
    """The message of an item; None: SGLang drops it."""
    match item.get("type"):
        case "function_call":
            if item.get("namespace"):
                raise unsupported("SGLang names a tool in a namespace by the model's parser")
            return _call(item, _arguments(item.get("arguments")))
        case "custom_tool_call":
            return _call(item, custom_arguments(item))
        case "function_call_output" | "custom_tool_call_output":
            content = _output(item.get("output", ""))
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        case "reasoning":
            return _thought(item)
        case None | "message":
            return _of_role(item)
        case kind:
            raise refused(f"an item of the type {kind!r:.40}")


def _of_role(item: Fields) -> Fields:
    role, content = text_of(item, "role"), item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    if role == "developer":
        role, content = "system", _labelled(content)
    message = {**item, "role": role, "content": content}
    return {
        name: value
        for name, value in message.items()
        if value is not None and name not in _NOT_OF_CHAT
    }


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text", "")}
    return part


def _labelled(content: Any) -> Any:
    if isinstance(content, str):
        return f"{_LABEL}\n{content}"
    if not isinstance(content, list):
        return content
    for place, part in enumerate(content):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            return [*content[:place], {**part, "text": f"{_LABEL}\n{text}"}, *content[place + 1 :]]
    return [{"type": "text", "text": _LABEL}, *content]


def _call(item: Fields, arguments: str) -> Fields:
    function = {"name": text_of(item, "name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _arguments(given: Any) -> str:
    """The arguments if they are an object in JSON, else those of an empty one."""
    if isinstance(given, dict):
        raise unsupported("SGLang writes arguments that came as an object in a way of its own")
    try:
        parsed = json.loads(given) if isinstance(given, str) and given else None
    except (ValueError, RecursionError):
        parsed = None
    return given if isinstance(parsed, dict) and isinstance(given, str) else "{}"


def _output(output: Any) -> Any:
    if isinstance(output, list):
        return "".join(_plain(part.get("text", "")) for part in output if isinstance(part, dict))
    return output


def _plain(text: Any) -> str:
    if not isinstance(text, str):
        raise refused("a part whose text is none")
    return text


def _thought(item: Fields) -> Fields | None:
    for name in ("summary", "content"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise refused(f"reasoning whose {name} is no array")
        texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("text")]
        if texts:
            return {"role": "assistant", "reasoning_content": "\n".join(map(_plain, texts))}
    if item.get("encrypted_content"):
        raise unsupported("encrypted reasoning is known to an engine only")
    return None


def _add(messages: list[Fields], message: Fields) -> None:
    """Adds a message, or joins an assistant's with the assistant's before it."""
    last = messages[-1] if messages else {}
    is_joined = message["role"] == last.get("role") == "assistant" and (
        last.get("phase") == message.get("phase") or last.keys() == {"role", "reasoning_content"}
    )
    if not is_joined:
        messages.append(message)
        return
    joined = messages[-1] = dict(last)
    if message.get("phase") is not None:
        joined["phase"] = message["phase"]
    if (content := message.get("content")) not in (None, ""):
        joined["content"] = _joined(joined.get("content"), content)
    if calls := message.get("tool_calls"):
        joined["tool_calls"] = (joined.get("tool_calls") or []) + calls
    if thought := message.get("reasoning_content"):
        before = joined.get("reasoning_content")
        joined["reasoning_content"] = f"{before}\n{thought}" if before else thought


def _joined(before: Any, after: Any) -> Any:
    if before in (None, ""):
        return after
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    return [*_parts(before), *_parts(after)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if isinstance(content, str) else []


def _one_system(messages: list[Fields]) -> list[Fields]:
    """All system messages as the first message, in the place of a system message between others,
    which most templates lose."""
    texts: list[str] = []
    for message in messages:
        if message["role"] == "system":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            each = [part.get("text") for part in parts if isinstance(part, dict)]
            texts += [text for text in each if isinstance(text, str)]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _choice(choice: Any) -> Any:
    """A chat's tool_choice: of the object forms, those that name a function or a custom tool."""
    if not isinstance(choice, dict):
        return choice
    function = choice.get("function")
    name = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
    if choice.get("type") in ("function", "custom") and name:
        return {"type": "function", "function": {"name": name}}
    return "auto"


def _functions(tool: Any) -> list[Fields]:
    """The functions as which the model sees a tool."""
    match kind_of(tool):
        case "function":
            described, parameters = tool.get("description"), tool.get("parameters")
        case "custom":
            form = tool.get("format")
            if isinstance(form, dict) and form.get("type") == "grammar":
                raise unsupported("SGLang describes a custom tool's grammar in words of its own")
            described, parameters = tool.get("description") or None, CUSTOM_INPUT
        case "" | "namespace":  # a namespace is shown by one parser of tools alone
            return []
        case kind:
            raise refused(f"a tool of the type {kind!r:.40}")
    function = {
        "name": text_of(tool, "name"),
        "description": described,
        "parameters": parameters,
        "strict": tool.get("strict", False),
    }
    return [{"type": "function", "function": function}]
