"""Turns a body of OpenAI's responses into the chat that SGLang makes of it. Pure.

Written from what SGLang 0.5.23 does (sglang/srt/entrypoints/openai/serving_responses.py and
responses_adapters.py, parser/template_detection.py, read 2026-11-28), and compared with the chats
that its converter makes; SGLang has no endpoint that renders responses. SGLang's built-in
templates, and its tool parser that shows namespaces (muse), make other tokens; a comparison with
the answers' token counts detects this.
"""

import json
from typing import Any

import msgspec

from router.request.dialects import sglang
from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.messages import Fields, refused
from router.request.dialects.responses import (
    CUSTOM_INPUT,
    check_template,
    custom_arguments,
    instructions_of,
    items_of,
    reasoning_of,
    required_text,
    tools_of,
)
from router.request.prompt_error import type_name, unsupported

_LABEL = "Developer instructions:"
"""The line that SGLang puts before a developer's text, which becomes a system message."""
_NOT_OF_CHAT = ("id", "status", "type")
_TEXTS = ("input_text", "output_text")
_OWN_REASONING = "sglang-reasoning-v1."
"""Prefix of encrypted reasoning that SGLang itself made; SGLang drops all other."""


def to_template(fields: Fields, facts: ModelFacts) -> TemplateInput:
    """The template's input for a response's body. Raises PromptError."""
    return sglang.to_template(to_chat(fields, facts), facts)


def to_chat(fields: Fields, facts: ModelFacts) -> Fields:
    """The body of the chat that SGLang makes of a response's body. Raises PromptError."""
    check_template(facts)
    given = [*instructions_of(fields), *map(_message, items_of(fields))]
    messages = _joined([message for message in given if message is not None])
    if len(facts.templates) > 1 or not facts.first_template.shows_later_systems:
        messages = _one_system(messages)
    if not messages:
        raise unsupported("an input without items has a prompt that only an engine knows")
    tools = [function for tool in tools_of(fields) for function in _functions(tool)]
    return {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _choice(fields.get("tool_choice", "auto")) if tools else "none",
        "reasoning_effort": _effort(fields),
        "chat_template_kwargs": fields.get("chat_template_kwargs"),
    }


def _effort(fields: Fields) -> Any:
    reasoning = reasoning_of(fields)
    if reasoning is None:
        return None
    if "reasoning_effort" in reasoning:
        raise unsupported("how SGLang reads reasoning.reasoning_effort is not reproduced")
    return reasoning.get("effort", "medium")


def _message(item: Fields) -> Fields | None:
    """The chat message of an input item; None: SGLang drops the item."""
    match item.get("type"):
        case "function_call":
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
            raise refused(f"an item of input with the type {kind!r:.40}")


def _of_role(item: Fields) -> Fields:
    role, content = required_text(item, "role"), item.get("content")
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
    function = {"name": required_text(item, "name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _arguments(given: Any) -> str:
    """A call's arguments as JSON text; `{}` if they are no JSON object."""
    if isinstance(given, dict):
        return json.dumps(given)
    if not isinstance(given, str):
        return "{}"
    try:
        parsed = msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "{}"
    return given if isinstance(parsed, dict) else "{}"


def _output(output: Any) -> Any:
    if isinstance(output, list):
        return "".join(_plain(part.get("text", "")) for part in output if isinstance(part, dict))
    return output


def _plain(text: Any) -> str:
    if not isinstance(text, str):
        raise refused(f"a part of the input whose text is {type_name(text)}")
    return text


def _thought(item: Fields) -> Fields | None:
    for name in ("summary", "content"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise refused(f"a reasoning item whose {name} is no array")
        texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("text")]
        if texts:
            return {"role": "assistant", "reasoning_content": "\n".join(map(_plain, texts))}
    packed = item.get("encrypted_content")
    if isinstance(packed, str) and packed.startswith(_OWN_REASONING):
        raise unsupported(
            "reasoning that SGLang has encrypted has a text that only an engine knows"
        )
    return None


def _joined(messages: list[Fields]) -> list[Fields]:
    """The messages, with successive messages of the assistant joined to one where their phase is
    equal, or where the earlier ones have reasoning alone."""
    runs: list[list[Fields]] = []
    phase, is_thought = None, False
    for message in messages:
        is_next = bool(runs) and message["role"] == runs[-1][0]["role"] == "assistant"
        if is_next and (message.get("phase") == phase or is_thought):
            runs[-1].append(message)
            phase = phase if message.get("phase") is None else message["phase"]
            is_thought = is_thought and not any(
                message.get(name) not in (None, "") for name in ("phase", "content", "tool_calls")
            )
        else:
            runs.append([message])
            phase, is_thought = (
                message.get("phase"),
                message.keys() == {"role", "reasoning_content"},
            )
    return [run[0] if len(run) == 1 else _one_turn(run) for run in runs]


def _one_turn(run: list[Fields]) -> Fields:
    """Joins successive messages of the assistant to one."""
    turn = dict(run[0])
    for message in run[1:]:
        if message.get("phase") is not None:
            turn["phase"] = message["phase"]
    contents = [message.get("content") for message in run]
    if contents := [content for content in contents if content not in (None, "")]:
        turn["content"] = _one_content(contents)
    calls: list[Any] = []
    for message in run:
        if not isinstance(more := message.get("tool_calls") or [], list):
            raise refused("a message whose tool_calls are no array")
        calls += more
    if calls:
        turn["tool_calls"] = calls
    thoughts = [message.get("reasoning_content") for message in run]
    if thoughts := [_plain(thought) for thought in thoughts if thought]:
        turn["reasoning_content"] = "\n".join(thoughts)
    return turn


def _one_content(contents: list[Any]) -> Any:
    """Joins contents to one: a string if all are strings, else an array of parts."""
    place = next((n for n, content in enumerate(contents) if not isinstance(content, str)), None)
    if place is None:
        return "\n\n".join(contents)
    texts = ["\n\n".join(contents[:place])] if place else []
    parts: list[Any] = []
    for content in [*texts, *contents[place:]]:
        if isinstance(content, list):
            parts += content
        elif isinstance(content, str):
            parts.append({"type": "text", "text": content})
    return parts


def _one_system(messages: list[Fields]) -> list[Fields]:
    """The messages, with all system messages joined to one at the beginning, since most templates
    lose a system message between others."""
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
    """A chat's tool_choice. An object that names a function or a custom tool names that function;
    any other object is `auto`; a string stays."""
    if not isinstance(choice, dict):
        return choice
    function = choice.get("function")
    name = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
    if choice.get("type") in ("function", "custom") and name:
        return {"type": "function", "function": {"name": name}}
    return "auto"


def _description(tool: Fields) -> str | None:
    """A custom tool's description, and its grammar if it has one, in SGLang's words."""
    texts = [tool.get("description")]
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        syntax, rules = form.get("syntax") or "lark", form.get("definition") or ""
        texts.append(f"The payload must conform to this {syntax} grammar:\n{rules}")
    return "\n\n".join(_plain(text) for text in texts if text) or None


def _functions(tool: Fields) -> list[Fields]:
    """The functions of a chat as which SGLang shows a tool to the model."""
    match tool["type"]:
        case "function":
            described, parameters = tool.get("description"), tool.get("parameters")
        case "custom":
            described, parameters = _description(tool), CUSTOM_INPUT
        case "namespace":
            return []
        case kind:
            raise refused(f"a tool of the type {kind!r:.40}")
    function = {
        "name": required_text(tool, "name"),
        "description": described,
        "parameters": parameters,
        "strict": tool.get("strict", False),
    }
    return [{"type": "function", "function": function}]
