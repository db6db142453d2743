"""Turns a chat's body into the chat template's input as SGLang does. Pure.

Written from what SGLang 0.5.23 does (sglang/srt/entrypoints/openai/serving_chat.py and protocol.py,
parser/jinja_template_utils.py, function_call/utils.py, read 2026-11-22), and compared with the
token ids in the answers of its chats.

Law: the input equals SGLang's, or PromptError is raised; a body that this release refuses raises
UNSUPPORTED_CONTENT, since another release may take it.
"""

from typing import Any

import msgspec

from router.request.dialects.dialect import ModelFacts, TemplateInput
from router.request.dialects.json_schema import with_standard_types
from router.request.dialects.messages import (
    check_absent,
    checked_messages,
    drop_unset_flags,
    flag,
    kwargs_of,
    named_function,
    refused,
    text_or_none,
)
from router.request.prompt_error import unsupported

Message = dict[str, Any]

_ROLES = frozenset(
    {"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"}
)
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_EFFORT_MAX = 0.99
_FUNCTION = ("description", "name", "parameters", "strict", "defer_loading")
_MEDIA = ("image", "audio", "video", "vision")
"""Words in a template's text by which SGLang gives it contents as lists of parts."""
_TEXTS = ("tool_call_id", "name", "phase", "reasoning_content")
"""String fields of a message, in the order in which templates see them."""


def to_template(fields: dict[str, Any], facts: ModelFacts) -> TemplateInput:
    """The template's input for a chat's body. Raises PromptError."""
    check_absent(fields, ("input_ids", "mm_processor_kwargs"))
    template = facts.first_template
    as_parts = template.loops_over_named_content or any(word in template.text for word in _MEDIA)
    messages = [_message(message, as_parts) for message in checked_messages(fields)]
    suffix = _end(messages, flag(fields, "continue_final_message", False))
    if not messages:
        raise refused("a chat of one assistant message that is to be continued")
    names = _names(fields, facts)
    documents = names.pop("documents", None)
    return TemplateInput(
        messages,
        template,
        _tools(fields),
        names,
        documents=documents,
        suffix=suffix,
        flat_tools_second=True,
    )


def _end(messages: list[Message], continued: bool) -> str:
    """Treats a last message of the assistant. continued: removes it and returns its text, which the
    model continues; else it becomes the user's. Returns an empty text otherwise. Changes the list.
    """
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return ""
    if continued:
        return str(messages.pop()["content"])
    messages[-1] = {"role": "user", "content": last["content"]}
    return ""


def _names(fields: dict[str, Any], facts: ModelFacts) -> dict[str, Any]:
    kwargs = kwargs_of(fields)
    effort, thinking = _effort(fields)
    if thinking is not None:
        kwargs.setdefault("thinking", thinking)
        kwargs.setdefault("enable_thinking", thinking)
    if facts.chat_template_kwargs:
        kwargs = {**facts.chat_template_kwargs, **kwargs}
        if effort is None:
            effort = kwargs.get("reasoning_effort")
    return kwargs if effort is None else {"reasoning_effort": effort, **kwargs}


def _effort(fields: dict[str, Any]) -> tuple[Any, bool | None]:
    """The reasoning effort, and whether the model is to think; None: the body does not say."""
    if isinstance(fields.get("reasoning"), dict):
        raise unsupported("how the engine reads an object in the field reasoning is not reproduced")
    effort = fields.get("reasoning_effort")
    if effort is None:
        return None, None
    if isinstance(effort, str) and effort in _EFFORTS:
        return effort, effort != "none"
    if isinstance(effort, int | float) and not isinstance(effort, bool):
        if not 0 <= effort <= _EFFORT_MAX:
            raise refused(f"a reasoning_effort that is a number outside of 0 to {_EFFORT_MAX}")
        return float(effort), True
    raise refused("a reasoning_effort that is neither a number nor a known word, such as low")


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = fields.get("tools")
    if tools is None:
        tools = []
    if not isinstance(tools, list):
        raise refused("a body whose tools are no array")
    result = [_tool(tool) for tool in tools]
    choice = fields.get("tool_choice")
    if choice == "none" or not result:
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        result = [tool for tool in result if tool["function"]["name"] == name]
        if not result:
            raise refused("a tool_choice that names none of the tools")
    elif choice not in (None, "auto", "required"):
        raise refused("a tool_choice that is no object and not none, auto or required")
    return result


def _tool(tool: Any) -> dict[str, Any]:
    function = named_function(tool)
    deferred = tool.get("defer_loading")
    inner = {
        name: function.get(name) for name in (*function, *_FUNCTION) if name in _FUNCTION
    }  # in the client's order, then the rest
    text_or_none(inner, "description")
    if inner["defer_loading"] is None:
        inner["defer_loading"] = deferred
    drop_unset_flags(inner)
    inner["parameters"] = with_standard_types(inner["parameters"])
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise refused("a tool whose type is not a string")
    return {"type": kind, "function": inner, "defer_loading": deferred}


def _message(message: Message, as_parts: bool) -> Message:
    role = message["role"]
    if role == "user":
        if message.get("content") is None:
            raise refused("a user's message without content")
        return {"role": role, "content": _content(role, message["content"], as_parts)}
    role = role.lower()
    if role not in _ROLES:
        raise refused("a message with a role that SGLang does not know")
    result: Message = {"role": role}
    content = _content(role, message.get("content"), as_parts)
    in_list = isinstance(message.get("content"), list) and as_parts
    if not in_list:
        result["content"] = content
    for name in _TEXTS:
        if (text := text_or_none(message, name)) is not None:
            result[name] = text
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise refused("a message whose tool_calls are no array")
        result["tool_calls"] = [_call(call, role == "assistant") for call in calls]
    if message.get("tools") is not None:
        raise unsupported("how the engine reads tools inside of a message is not reproduced")
    if message.get("prefix") is not None:
        result["prefix"] = flag(message, "prefix", False)
    if in_list:
        result["content"] = content
    return result


def _content(role: str, content: Any, as_parts: bool) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused("a message's content that is neither a string nor an array of parts")
    parts = [part for part in (_part(role, part) for part in content) if part is not None]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if not as_parts or (role == "tool" and len(texts) == len(parts)):
        return " ".join(texts)
    return parts


def _part(role: str, part: Any) -> dict[str, str] | None:
    """A content part as the template gets it; None: SGLang drops the part."""
    kind = part.get("type") if isinstance(part, dict) else None
    match kind:
        case "text" if isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        case "thinking" | "reasoning":
            given = [key for key in ("thinking", "text") if part.get(key) is not None]
            if role != "assistant" or len(given) != 1:
                raise refused("a thinking part of a role other than assistant, or without one text")
            return None
        case "tool_reference" if isinstance(part.get("name"), str):
            return {"type": "tool_reference", "name": part["name"]}
        case _:
            raise unsupported(
                f"a part of the type {kind!r:.40} has tokens that only an engine knows"
            )


def _call(call: Any, parsed: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise refused("a tool call without a function")
    index = call.get("index")
    if index is not None and type(index) is not int:
        raise refused("a tool call whose index is no integer")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments) if parsed else arguments
    elif arguments is not None and not isinstance(arguments, dict):
        raise refused("a tool call whose arguments are neither a string nor an object")
    return {
        "id": text_or_none(call, "id"),
        "index": index,
        "type": "function",
        "function": {"name": text_or_none(function, "name"), "arguments": arguments},
    }


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refused("a tool call whose arguments are not JSON") from error
    if not isinstance(arguments, dict):
        raise refused("a tool call whose arguments are no object")
    return arguments
